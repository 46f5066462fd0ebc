"""vLLM: the engine, the model that it runs, and the step in which rows get the same token."""

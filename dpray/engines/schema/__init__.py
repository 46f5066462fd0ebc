"""A JSON Schema as a public mask of the tokens that may follow."""

import dpray.workers  # noqa: F401  # before Ray: it says what Ray may print

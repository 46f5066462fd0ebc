import dpray.runs  # noqa: F401  # before Ray: it says what Ray may print

"""The evaluations of the papers that dpray follows: what reproduces their figures, and what an
owner of data does not need."""

"""dpray: differentially private synthetic texts, on a laptop or a Ray cluster."""

__version__ = "0.1.0"

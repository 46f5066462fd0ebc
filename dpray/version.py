"""This module holds the version of dpray and imports nothing."""

__version__ = "0.1.0"

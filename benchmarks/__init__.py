"""Benchmarks that compare dpray with other ways; `make bench` runs all of them.

This is a package: others install one of this name, which would hide a mere folder.
"""

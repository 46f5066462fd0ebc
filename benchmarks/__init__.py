"""What dpray is compared by; `make bench` runs all of it.

A package: others install one of this name, which would hide a mere folder.
"""

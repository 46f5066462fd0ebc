"""Each folder holds a method. `part` finds its files by the method's name."""

from importlib import import_module
from typing import Any


def part(method: str, name: str) -> Any:
    """Import a method's module late: a plan of one method should not wait for the others, nor for
    torch and Ray."""
    return import_module(f"dpray.methods.{method}.{name}")

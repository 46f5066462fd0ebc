"""One folder for each method, and `chain`. `load_module` imports a method's module by name."""

from importlib import import_module
from types import ModuleType


def load_module(method: str, name: str) -> ModuleType:
    """Import a module of a method, late: a plan of one method does not wait for the others, nor for
    torch and Ray."""
    return import_module(f"dpray.methods.{method}" + f".{name}" * (method != "chain"))

"""The examples in the docstrings of mechanisms are right, and every module has one."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

from dpray import mechanisms

MODULES = [module.name for module in pkgutil.iter_modules(mechanisms.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(import_module(f"dpray.mechanisms.{name}"))
    assert found.attempted > 0 and found.failed == 0

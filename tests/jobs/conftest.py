"""Fixtures for the scripts of `jobs/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def dp_kps(config_file: Callable[..., str], sequences: dict[str, Any]) -> str:
    """The configuration of a run that needs no model."""
    return config_file(**sequences)

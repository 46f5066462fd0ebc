"""A command writes the configuration that it chose to a new file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpray.io.yaml_text import dump_yaml
from dpray.types import InputError


def check_new(write: str | None) -> None:
    """Raise InputError if the file exists, before the work instead of after it."""
    if write is not None and Path(write).exists():
        raise InputError(f"--write: {write} is there already")


def write_config(file: str, tree: dict[str, Any]) -> None:
    """Write a configuration to a new file."""
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(dump_yaml(tree))
    except OSError as error:
        raise InputError(f"--write: {file} cannot be written: {error.strerror}") from None

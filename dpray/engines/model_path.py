"""A configured model is found before anything heavy is imported."""

from __future__ import annotations

import re
from pathlib import Path

from dpray.engines import smollm2
from dpray.types import InputError

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def is_at_hand(model: str) -> bool:
    """Return whether the model's files are on this machine, not on a hub."""
    return model == smollm2.NAME or Path(model).expanduser().is_dir()


def resolve_model(model: str, key: str = "engine.model") -> str:
    """Return `model`, `~` expanded, where it is a folder or can be a hub's name ("owner/name"), and
    for `smollm2` the converted model's folder: the first time this converts the packaged file.

    Raises InputError that names `key` for a path that does not exist.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return str(path)
    if model == smollm2.NAME:
        return str(smollm2.smollm2_folder())
    if path.exists() or not _HUB_NAME.fullmatch(model):
        raise InputError(f"{key}: no such folder: {model}")
    return model

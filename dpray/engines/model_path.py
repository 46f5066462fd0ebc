"""A configured model is found before anything heavy is imported."""

from __future__ import annotations

import re
from pathlib import Path

from dpray.engines import smollm2
from dpray.engines.adapters import base_of, has_adapters, merged_folder
from dpray.types import InputError

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

_MOST_ADAPTERS = 8
"""Adapters on adapters, such as those that were tuned on public records and then on private ones;
more are a folder that belongs to itself."""


def is_at_hand(model: str) -> bool:
    """Return whether the model's files are on this machine, not on a hub."""
    *_, base = _adapters_and_base(model, "engine.model")
    return base == smollm2.NAME or _is_folder(base)


def resolve_model(model: str, key: str = "engine.model") -> str:
    """Return `model`, `~` expanded, where it is a folder or can be a hub's name ("owner/name").
    For `smollm2`, and for a folder with adapters, return the folder of the model that is made of
    them: the first time this converts the packaged file, or merges the adapters.

    Raises InputError that names `key` for a path that does not exist.
    """
    *adapters, base = _adapters_and_base(model, key)
    if base == smollm2.NAME and not _is_folder(base):
        base = str(smollm2.smollm2_folder())
    elif not _is_folder(base) and (Path(base).exists() or not _HUB_NAME.fullmatch(base)):
        of = f" (the model of the adapters in {adapters[-1]})" if adapters else ""
        raise InputError(f"{key}: no such folder: {base}{of}")
    for folder in reversed(adapters):
        base = str(merged_folder(Path(folder), base, key))
    return base


def absolute_model(model: str) -> str:
    """Return `model`, a folder's path made absolute, for processes with another working directory.
    Adapters that name a relative folder are merged here, as there it would be another folder.
    What does not exist here is left as it is: it may exist there."""
    *adapters, base = _adapters_and_base(model, "engine.model")
    if adapters and _is_folder(base) and not Path(base).is_absolute():
        return resolve_model(model)
    path = _expanded(model)
    return str(Path(path).absolute()) if _is_folder(path) else model


def _adapters_and_base(model: str, key: str) -> list[str]:
    """Return the folders of adapters that lie on each other, the uppermost first, and the model
    that they belong to; of a model without adapters, itself."""
    found = [_expanded(model)]
    while _is_folder(found[-1]) and has_adapters(Path(found[-1])):
        if len(found) > _MOST_ADAPTERS:
            raise InputError(f"{key}: adapters on more than {_MOST_ADAPTERS} adapters: {model}")
        found.append(_expanded(base_of(Path(found[-1]), key)))
    return found


def _expanded(model: str) -> str:
    path = str(Path(model).expanduser())
    return path if model and _is_folder(path) else model


def _is_folder(model: str) -> bool:
    return bool(model) and Path(model).is_dir()

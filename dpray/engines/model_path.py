"""A configured model is found before anything heavy is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from dpray.engines.made_models import (
    SMOLLM2,
    base_of,
    has_adapters,
    merged_folder,
    smollm2_folder,
)
from dpray.io.hub import find_on_hub
from dpray.types import InputError

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

_MOST_ADAPTERS = 8
"""Adapters may be stacked, such as those that were tuned on private records after public ones; a
longer chain is taken for a cycle."""

_MERGED = ("engine.model", "lm")
"""The keys of causal language models: an embedder or encoder is not one."""


def is_at_hand(model: str) -> bool:
    """Return whether the model's files are on this machine, not on a hub."""
    *_, base = with_bases(model)
    return base == SMOLLM2 or _is_folder(base)


def is_hub_name(model: str) -> bool:
    """Return whether a model's name can be one on a hub: "owner/name", or a name alone."""
    return bool(_HUB_NAME.fullmatch(model))


def resolve_model(
    model: str, key: str = "engine.model", on_hub: Callable[[str, str], str] = find_on_hub
) -> str:
    """Return `model`, `~` expanded, if it is a folder, and `on_hub(model, key)` if it is the name
    of a model on a hub ("owner/name"). For `smollm2`, and for a folder with adapters, return the
    folder of the model that is made of them: the first time this converts the packaged file, or
    merges the adapters.

    Raises InputError that names `key` for a path that does not exist, and for a name that neither
    this machine nor the hub has.
    """
    *adapters, base = with_bases(model, key)
    if base == SMOLLM2 and not _is_folder(base):
        base = str(smollm2_folder())
    elif not _is_folder(base):
        if not is_hub_name(base) or os.path.exists(base):
            whose = f" (the model of the adapters in {adapters[-1]})" if adapters else ""
            raise InputError(f"{key}: no such folder: {base}{whose}")
        base = on_hub(base, key)
    for folder in reversed(adapters):
        base = str(merged_folder(Path(folder), base, key))
    return base


def absolute_model(model: str) -> str:
    """Return `model`, a folder's path made absolute, for processes with another working directory.

    Adapters of a model with a relative path are merged here, as that path may lead elsewhere from
    there. A path that does not exist here is left as it is: it may exist there.
    """
    if not _is_folder(path := _expanded(model)):
        return model
    folder, *bases = with_bases(str(Path(path).absolute()))
    if any(_is_folder(base) and not Path(base).is_absolute() for base in bases):
        return resolve_model(folder)
    return folder


def with_bases(model: str, key: str = "engine.model") -> list[str]:
    """Return the model, the model that its adapters belong to if it has some, and so on: all but
    the last one are folders with adapters. Raises InputError that names `key`."""
    found = [_expanded(model)]
    while key in _MERGED and _is_folder(found[-1]) and has_adapters(Path(found[-1])):
        if len(found) > _MOST_ADAPTERS:
            raise InputError(f"{key}: more than {_MOST_ADAPTERS} adapters on each other: {model}")
        found.append(_expanded(base_of(Path(found[-1]), key)))
    return found


def _expanded(model: str) -> str:
    try:
        path = str(Path(model).expanduser())
    except RuntimeError:  # no such user
        return model
    return path if model and _is_folder(path) else model


def _is_folder(model: str) -> bool:
    return bool(model) and os.path.isdir(model)  # False for a name that is too long, too

"""Released files name models and files by their names and digests, without their places.

A model on a hub and a packaged template keep the names of the configuration; a folder or a file on
this machine has its own name and a SHA-256 of its content. No released file tells the places of the
private data, the endpoint and the ledger.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dpray.engines.model_path import is_hub_name, with_bases
from dpray.io.columns import looks_like_name
from dpray.io.files import sha256_of

DIGITS = 16
"""Hexadecimal digits of a released digest."""

MODELS = frozenset({"model", "embedder"})
FILES = frozenset({"template", "few_shot", "vocabulary", "public", "terms", "first_texts"})
"""Keys of methods and of `public_inputs` whose values name public files."""


def public_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's plain values as they may be released."""
    sections = {name: named(keys) for name, keys in values.items()}
    sections["data"].pop("path", None)
    for key in ("text", "label", "unit"):
        sections["data"][key] = _columns(sections["data"].get(key))
    sections["engine"].pop("base_url", None)
    return sections


def _columns(names: Any) -> Any:
    """Return names of columns without those that look like a value, as the first row of a file
    without a header does."""
    if isinstance(names, list | tuple):
        return [_columns(name) for name in names]
    return names if not isinstance(names, str) or looks_like_name(names) else "(a column)"


def named(value: Any, key: str = "") -> Any:
    """Return a plain value with models and files named without their places."""
    if isinstance(value, Mapping):
        return {name: named(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [named(item) for item in value]
    if isinstance(value, str) and key in MODELS:
        return model_name(value)
    return file_name(value) if isinstance(value, str) and key in FILES else value


def model_name(model: str) -> str:
    """Return a model's public name; adapters stand before the model that they belong to."""
    return " on ".join(map(_model_name, with_bases(model)))


def _model_name(model: str) -> str:
    if model and os.path.isdir(model):
        folder = Path(model).resolve()
        files = sorted(path for path in folder.rglob("[!.]*") if path.is_file())
        newest = max((path.stat().st_mtime_ns for path in files), default=0)
        return f"{folder.name} (sha256 {_folder_digest(folder, tuple(files), newest)})"
    # A path that is not here may be on the machines of the cluster.
    return model if is_hub_name(model) else Path(model).name


@cache
def _folder_digest(folder: Path, files: tuple[Path, ...], newest: int) -> str:
    """Return a digest of the names and contents of a folder's files, computed once for those of
    one time."""
    lines = [f"{path.relative_to(folder)} {sha256_of(path)}" for path in files]
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:DIGITS]


def file_name(file: str) -> str:
    """Return the public name of a file; the name of a packaged template stays as it is."""
    if os.path.isfile(file):
        return f"{Path(file).name} (sha256 {sha256_of(Path(file))[:DIGITS]})"
    return file if file.startswith("hf://") or os.sep not in file else Path(file).name

"""The public sequences of terms that the settings of a method name by a file. In a chain the file
holds what the first method released."""

from __future__ import annotations

from typing import Any

from dpray.config.config import Config
from dpray.io.columns import match_label
from dpray.io.formats import Where
from dpray.io.public_files import public_files
from dpray.io.records import read_rows
from dpray.types import InputError

Sequences = dict[str, list[list[str]]]


def read_terms(file: str | None, config: Config) -> Sequences:
    """Read the sequences of `method.terms` by label, "" without labels; None is no file. Raises
    InputError that names the row."""
    found: Sequences = {}
    if file is None:
        return found
    names = config.data.label_names
    for path in public_files(file, "method.terms", config.data.path):
        for where, row in read_rows(path):
            try:
                label = match_label(row.get("label"), names, "label", where) if names else ""
            except InputError as error:
                raise InputError(f"method.terms: {error}") from None
            found.setdefault(label, []).append(_terms(row.get("terms"), where))
    return found


def _terms(value: Any, where: Where) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(t, str) for t in value):
        raise InputError(f"method.terms: {where}: `terms` has to be a list of terms")
    return value

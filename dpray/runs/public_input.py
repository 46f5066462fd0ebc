"""Public records that the settings of a method name by a file: sequences of terms, or texts. In a
chain the file holds what the method before released."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpray.config.config import Config
from dpray.io.columns import is_empty, match_label, text_of
from dpray.io.formats import Where
from dpray.io.public_files import public_files
from dpray.io.records import read_rows
from dpray.types import InputError

Sequences = dict[str, list[list[str]]]


def read_terms(file: str | None, config: Config) -> Sequences:
    """Read the sequences of `method.terms` by label, "" without labels; None is no file. Raises
    InputError that names the row."""
    found: Sequences = {}
    for where, label, row in _rows(file, "method.terms", config):
        terms = row.get("terms")
        if not isinstance(terms, list) or not terms or not all(isinstance(t, str) for t in terms):
            raise InputError(f"method.terms: {where}: `terms` has to be a list of terms")
        found.setdefault(label, []).append(terms)
    return found


def read_texts(file: str | None, config: Config) -> dict[str, list[str]]:
    """Read the texts of `method.first_texts` by label, without blank ones; None is no file. Raises
    InputError that names the row."""
    found: dict[str, list[str]] = {}
    for where, label, row in _rows(file, "method.first_texts", config):
        try:
            text = text_of(row, "text", where)
        except InputError as error:
            raise InputError(f"method.first_texts: {error}") from None
        if not is_empty(text):
            found.setdefault(label, []).append(text)
    return found


def _rows(
    file: str | None, key: str, config: Config
) -> Iterator[tuple[Where, str, dict[str, Any]]]:
    """Yield each row of a public file with its label."""
    names = config.data.label_names
    for path in public_files(file, key, config.data.path) if file is not None else ():
        for where, row in read_rows(path):
            try:
                label = match_label(row.get("label"), names, "label", where) if names else ""
            except InputError as error:
                raise InputError(f"{key}: {error}") from None
            yield where, label, row

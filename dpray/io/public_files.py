"""Public files, which are not the private ones by another name: few-shot examples, sequences of
terms, vocabularies and templates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dpray.io.columns import Label, is_empty, label_name, match_label, text_of
from dpray.io.file_list import identity, list_files
from dpray.io.files import names_cloud
from dpray.io.formats import Where
from dpray.io.records import read_rows
from dpray.types import InputError

LONGEST_EXAMPLE = 100_000
"""Characters of an example; no prompt has room for more."""


def public_files(path: str, key: str, private: str) -> list[str]:
    """List the files that `path` names, which have to be public, as `list_files` does. Raises
    InputError that names `key` if one of them is a file of `private`, the configuration's
    `data.path`."""
    files = list_files(path, key)
    _refuse_private(files, path, key, private)
    return files


def check_public(file: str, key: str, private: str) -> None:
    """Raise InputError that names `key` if a local file, such as a vocabulary or a template, is one
    of the files of `private`. A file that is not there raises nothing here: reading it does. None
    is in a cloud, which is not asked."""
    is_local = not names_cloud(private) or private.startswith("file://")
    if is_local and os.path.exists(file):
        _refuse_private([file], file, key, private)


def _refuse_private(files: Sequence[str], path: str, key: str, private: str) -> None:
    private_files: list[str] = []
    with suppress(InputError):  # the private data may be elsewhere: a plan does not need it
        private_files = list_files(private, once=False)
    if {*map(identity, files)} & {*map(identity, private_files)}:
        raise InputError(f"{key}: {path} is data.path itself; give a public file")


@dataclass(frozen=True)
class FewShot:
    """The public texts of each label, and under None all of them. A prompt shows `shown` texts."""

    texts: Mapping[str | None, Sequence[str]] = field(default_factory=dict, repr=False)
    shown: int = 0

    def of_label(self, label: str) -> Sequence[str]:
        """Return the texts to draw from: the label's if they are enough for a prompt, else all."""
        texts = self.texts.get(label, ())
        return texts if len(texts) >= self.shown else self.texts[None]


def read_few_shot(file: str | None, shown: int, private: str) -> FewShot:
    """Read the texts of `method.few_shot`, in the columns `text` and `label`; None is no file. An
    empty text is left out. Raises InputError for the private file itself, for a text that is
    missing or too long, and for fewer texts than a prompt shows."""
    if file is None:
        return FewShot()
    texts: dict[str | None, list[str]] = {None: []}
    for path in public_files(file, "method.few_shot", private):
        for where, row in read_rows(path):
            try:
                text = text_of(row, "text", where)
            except InputError as error:
                raise InputError(f"method.few_shot: {error}") from None
            if len(text) > LONGEST_EXAMPLE:
                raise InputError(
                    f"method.few_shot: {where}: more than {LONGEST_EXAMPLE:,} characters"
                )
            if is_empty(text):
                continue
            texts[None].append(text)
            if row.get("label") is not None:
                texts.setdefault(label_name(row["label"]), []).append(text)
    if len(texts[None]) < shown:
        raise InputError(
            f"method.few_shot: {file} has {len(texts[None])} records; "
            f"method.few_shot_examples is {shown}"
        )
    return FewShot(texts, shown)


def read_terms(
    file: str | None, labels: Mapping[str, Label], private: str
) -> dict[str, list[list[str]]]:
    """Read the sequences of `method.terms` by label, "" without labels; None is no file. In a chain
    the file holds what the first method released. Raises InputError that names the row."""
    found: dict[str, list[list[str]]] = {}
    if file is None:
        return found
    for path in public_files(file, "method.terms", private):
        for where, row in read_rows(path):
            try:
                label = match_label(row.get("label"), labels, "label", where) if labels else ""
            except InputError as error:
                raise InputError(f"method.terms: {error}") from None
            found.setdefault(label, []).append(_terms(row.get("terms"), where))
    return found


def _terms(value: object, where: Where) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(t, str) for t in value):
        raise InputError(f"method.terms: {where}: `terms` has to be a list of terms")
    return value

"""The template files of all methods are found, read and checked here.

A template is a YAML file whose texts are Jinja expressions. `templates/` holds the packaged ones,
and a user's own is named by its path. A key's value is a text or a list of texts; a list may be in
a file of its own, `{file: path}` with one entry a line, in the template's folder or below it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from dpray.io.yaml_text import YamlRefused, parse_yaml, read_yaml_text
from dpray.types import InputError, first_line

LONGEST_REASON = 200


class Fault(Exception):
    """A template is invalid; the message is one line."""


KNOWN_FAULTS = (Fault, jinja2.TemplateError, YamlRefused)


@contextmanager
def faults_named(name_or_path: str) -> Iterator[None]:
    """Raise any error of this template as an InputError of one line, which may quote what was
    rendered: it has to be public."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, KNOWN_FAULTS) else f"{type(error).__name__}: "
        reason = f"{kind}{first_line(error)}"[:LONGEST_REASON]
        raise InputError(f"method.template: {name_or_path}: {reason}") from None


def packaged(package: str) -> dict[str, Path]:
    """Return the paths of a package's templates by name, sorted."""
    files = (Path(str(resources.files(package))) / "templates").glob("*.yaml")
    return {path.stem: path for path in sorted(files)}


@dataclass(frozen=True)
class TemplateFile:
    """Holds a template's keys and values; its own files are relative to `folder`."""

    values: Mapping[str, Any]
    folder: Path

    @classmethod
    def read(
        cls, name_or_path: str, known: Mapping[str, Path], keys: Collection[str], *needed: str
    ) -> TemplateFile:
        """Read a `known` template by name, or a YAML file. Raises InputError for a missing file,
        Fault or YamlRefused for one without the `needed` keys, or with others than `keys`."""
        path = known.get(name_or_path, Path(name_or_path))
        try:
            values = parse_yaml(read_yaml_text(path))
        except (OSError, UnicodeDecodeError):
            raise InputError(
                f"method.template: no file {name_or_path}, and no packaged template "
                f"({', '.join(known)})"
            ) from None
        if not isinstance(values, dict):
            raise Fault("not a YAML file of `key: value` lines")
        if unknown := [str(key) for key in values if key not in keys]:
            raise Fault(f"there is no key {min(unknown)}")
        if missing := [key for key in needed if key not in values]:
            raise Fault(f"the key `{missing[0]}` is needed")
        return cls(values, path.parent)

    def texts(self, *keys: str) -> dict[str, str]:
        """Return the texts of those of the keys that the file has."""
        given = {key: self.values[key] for key in keys if key in self.values}
        for key, value in given.items():
            if not isinstance(value, str):
                raise Fault(f"{key}: has to be a text")
        return given

    def words(self, key: str, *, stripped: bool = True) -> tuple[str, ...]:
        """Return a list of texts, none of them empty; () where the file lacks the key."""
        if key not in self.values:
            return ()
        return self.as_words(key, self.values[key], stripped=stripped)

    def as_words(self, key: str, value: Any, *, stripped: bool = True) -> tuple[str, ...]:
        """Check the value of a key as a list of texts."""
        if isinstance(value, dict) and set(value) == {"file"}:
            value = [line for line in self._lines(key, str(value["file"])) if line.strip()]
        if not isinstance(value, list) or not value:
            raise Fault(f"{key}: has to be a list, or {{file: path}} with one entry a line")
        if not all(isinstance(word, str) for word in value):
            raise Fault(f"{key}: an entry is no text (a number, yes, no or null needs quotes)")
        words = tuple(word.strip() if stripped else word for word in value)
        if not all(words):
            raise Fault(f"{key}: an entry is empty")
        return words

    def _lines(self, key: str, name: str) -> list[str]:
        """Read the lines of a file in the template's folder; a template that came from elsewhere
        reads no other file into prompts."""
        try:
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder.resolve()):
                raise Fault(f"{key}: {name} is outside the template's folder")
            return path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            raise Fault(f"{key}: no file {name}") from None


def is_refusal(answer: str, refusals: Collection[str]) -> bool:
    """Return whether the answer is empty or begins like one of the refusals, up to case and the
    kind of apostrophe."""
    begins = _plain(answer.strip())
    return not begins or begins.startswith(tuple(map(_plain, refusals)))


def _plain(text: str) -> str:
    return text.replace("’", "'").casefold()

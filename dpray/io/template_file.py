"""A template is a YAML file of texts with placeholders: it can run nothing and read no other file.

`{label}` stands for a value, and `{{` and `}}` for a brace. What else a brace begins or ends is
refused when the file is read, so that no text can make a template fail later. docs/methods.md
describes the keys that all templates may have (`parts`, `labels`, `stop`, `refusals`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dpray.io.labels import label_name
from dpray.io.yaml_text import YamlRefused, parse_yaml, read_yaml_text, text_lines
from dpray.types import InputError

COMMON = ("parts", "labels", "stop", "refusals")
LONGEST_NAME = 40

PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
"""Matches an escaped brace, a placeholder, or a lone brace."""


@dataclass(frozen=True)
class TextKey:
    """The placeholders that a key's text may have, of which it needs one of `needed`; and the text
    where the file has none."""

    placeholders: tuple[str, ...]
    needed: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True)
class Part:
    """A text for where a placeholder has a value, and one for where it is empty."""

    placeholder: str
    then: str
    otherwise: str = ""


@dataclass(frozen=True)
class Template:
    """The checked texts of a template file, by key."""

    texts: Mapping[str, str]
    parts: Mapping[str, Part] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    name: str = field(default="", compare=False)

    def render(self, key: str, **values: str) -> str:
        """Put values into a text, in one pass: a brace in a value is a brace. Return "" where the
        template lacks the text."""
        if "label" in values:
            values["label"] = self.labels.get(values["label"], values["label"])
        return self._filled(self.texts.get(key, ""), values)

    def shows(self, key: str, placeholder: str) -> bool:
        """Return whether a text has a placeholder, itself or in one of its parts."""
        named = placeholders(self.texts[key])
        parts = [self.parts[name] for name in named & self.parts.keys()]
        return any(
            placeholder in placeholders(text)
            for text in (self.texts[key], *(part.then for part in parts))
        )

    def check_terms(self, *keys: str) -> None:
        """Raise InputError where one of the texts does not show the terms of a chain."""
        for key in keys:
            if not self.shows(key, "terms"):
                raise InputError(
                    f"method.template: {self.name}: `{key}` has no {{terms}}, which the method "
                    "before it hands on"
                )

    def refused(self, answer: str) -> bool:
        """Return whether the answer is empty or begins like one of the refusals, up to case and the
        kind of apostrophe."""
        begins = _plain(answer.strip())
        return not begins or begins.startswith(tuple(map(_plain, self.refusals)))

    def _filled(self, text: str, values: Mapping[str, str]) -> str:
        def piece(match: re.Match[str]) -> str:
            name = match.group(1)
            if name is None:
                return match.group()[0]
            if name in values:
                return values[name]
            part = self.parts[name]
            return self._filled(part.then if values[part.placeholder] else part.otherwise, values)

        return PIECE.sub(piece, text)


def placeholders(text: str) -> set[str]:
    """Return the names in braces."""
    names = (match.group(1) for match in PIECE.finditer(text))
    return {name for name in names if name is not None}


def _plain(text: str) -> str:
    return text.replace("’", "'").casefold()


def packaged(package: str) -> dict[str, Path]:
    """Return the paths of a package's templates by name, sorted."""
    files = (Path(str(resources.files(package))) / "templates").glob("*.yaml")
    return {path.stem: path for path in sorted(files)}


@dataclass(frozen=True)
class TemplateFile:
    """The keys and values of a template, and their lines. What is wrong with it is an InputError
    that names the file, the line and the key."""

    name: str
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], tuple[int, bool]]

    @classmethod
    def read(cls, name: str, package: str, keys: Collection[str], *needed: str) -> TemplateFile:
        """Read a template of the package by its name, or a YAML file by its path. It needs the
        `needed` keys, and may have `keys` and those of all templates."""
        known = packaged(package)
        try:
            source = read_yaml_text(known.get(name, Path(name)))
            values = parse_yaml(source)
        except YamlRefused as error:
            raise InputError(f"method.template: {name}: {error}") from None
        except (OSError, ValueError):  # a file that is not UTF-8, or a path with a null byte
            raise InputError(
                f"method.template: no file {name}, and no packaged template ({', '.join(known)})"
            ) from None
        if not isinstance(values, dict):
            raise InputError(f"method.template: {name}: not a YAML file of `key: value` lines")
        file = cls(name, values, text_lines(source))
        for key in values:
            if key not in (*keys, *COMMON):
                raise file.fault("is no key of this method's templates", str(key))
        for key in needed:
            if key not in values:
                raise file.fault("is missing", key)
        return file

    def template(self, keys: Mapping[str, TextKey]) -> Template:
        """Return the texts of these keys, with what all templates may have."""
        texts = {key: each.default for key, each in keys.items() if each.default is not None}
        for key in keys.keys() & self.values.keys():
            texts[key] = self._text(self.values[key], key)
        parts = {
            str(name): self._part(str(name), part) for name, part in self._mapping("parts").items()
        }
        for name in parts:
            if any(name in key.placeholders for key in keys.values()):
                raise self.fault("is the name of a placeholder", "parts", name)
        stop, refusals = self.words("stop"), self.words("refusals")
        labels = self.named_texts("labels")
        template = Template(texts, parts, labels, stop, refusals, self.name)
        for key, text in texts.items():
            self._check(template, keys[key], text, key)
            needed = keys[key].needed
            if needed and not any(template.shows(key, each) for each in needed):
                raise self.fault(f"has no {' or '.join(f'{{{each}}}' for each in needed)}", key)
        return template

    def fault(self, problem: str, *keys: str, before: str = "") -> InputError:
        """Return an error about the value that these keys lead to; `before` is its text up to the
        problem. Where YAML joins the lines of a text, the line is its first one."""
        line, literal = self.lines.get(keys, (None, False))
        if line is not None and literal:
            line += before.count("\n")
        where = f"line {line}: " if line is not None else ""
        return InputError(f"method.template: {self.name}: {where}`{'.'.join(keys)}` {problem}")

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, none of them empty; () where the file lacks the key."""
        return self.list_of(self.values[key], key) if key in self.values else ()

    def list_of(self, value: Any, *keys: str) -> tuple[str, ...]:
        """Check the value of a key as a list of texts."""
        if not isinstance(value, list) or not value:
            raise self.fault("has to be a list of texts", *keys)
        for number, entry in enumerate(value):
            if not isinstance(entry, str) or not entry:
                problem = "has to be a text (a number, true or null needs quotes), and not empty"
                raise self.fault(problem, *keys, str(number))
        return tuple(value)

    def named_texts(self, key: str) -> dict[str, str]:
        """Return a mapping of names or labels to texts; {} where the file lacks the key."""
        return {
            label_name(name): self._text(value, key, str(name))
            for name, value in self._mapping(key).items()
        }

    def _check(self, template: Template, key: TextKey, text: str, *keys: str) -> None:
        """Refuse a lone brace, and a name that is neither a part nor a placeholder of the key. A
        part is checked for each text that it stands in."""
        for match in PIECE.finditer(text):
            name, before = match.group(1), text[: match.start()]
            if (brace := match.group()) in ("{", "}"):
                problem = f"has a lone {brace} (a brace of the text itself is written {brace * 2})"
                raise self.fault(problem, *keys, before=before)
            if name is None or name in key.placeholders:
                continue
            if name not in template.parts or keys[0] == "parts":
                raise self._unknown(name, key, *keys, before=before)
            part = template.parts[name]
            if part.placeholder not in key.placeholders:
                raise self._unknown(part.placeholder, key, "parts", name, "if")
            self._check(template, key, part.then, "parts", name, "then")
            self._check(template, key, part.otherwise, "parts", name, "else")

    def _unknown(self, name: str, key: TextKey, *keys: str, before: str = "") -> InputError:
        known = ", ".join(f"{{{each}}}" for each in key.placeholders)
        shown = " ".join(name.split())[:LONGEST_NAME]
        return self.fault(
            f"has no placeholder {{{shown}}}; there are {known}", *keys, before=before
        )

    def _part(self, name: str, value: Any) -> Part:
        if not isinstance(value, dict) or set(value) | {"else"} != {"if", "then", "else"}:
            raise self.fault("has to have the keys if and then, and may have else", "parts", name)
        texts = {key: self._text(text, "parts", name, key) for key, text in value.items()}
        return Part(texts["if"], texts["then"], texts.get("else", ""))

    def _text(self, value: Any, *keys: str) -> str:
        if not isinstance(value, str):
            raise self.fault("has to be a text", *keys)
        return value

    def _mapping(self, key: str) -> dict[Any, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.fault("has to be `name: text` lines", key)
        return value

"""A template is a YAML file of texts with placeholders: it can run nothing and read no other file.

`{label}` stands for a value, and `{{` and `}}` for a brace. Every other use of braces is refused
when the file is read, so that no text can make a template fail later. docs/configuration.md
describes the keys that all templates may have (`parts`, `labels`, `stop`, `refusals`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from string import Formatter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from dpray.io.columns import label_name
from dpray.io.yaml_text import YamlRefused, parse_yaml
from dpray.types import InputError, did_you_mean

LONGEST_NAME = 40

ABOUT = ("about", "language", "attributes")
"""Every text of a template may have these placeholders, as in `About`."""

Words = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


@dataclass(frozen=True)
class TextKey:
    """The placeholders that a key's text may have. It needs one of `needed`. `default` is the text
    if the file has none."""

    placeholders: tuple[str, ...]
    needed: tuple[str, ...] = ()
    default: str | None = None


class TemplatePart(BaseModel):
    """A value of a template that has keys of its own, and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Conditional(TemplatePart):
    """The text `then` if a placeholder has a value, `otherwise` if it is empty."""

    placeholder: str = Field(alias="if")
    then: str
    otherwise: str = Field("", alias="else")


@dataclass(frozen=True)
class About:
    """Public words about the private texts: what they are, their language, what the names of
    labels mean, and the values of the attributes of one text. "" and no words say nothing."""

    about: str = ""
    language: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{label}: {meaning}" for label, meaning in self.labels.items()]
        return "; ".join(filter(None, (self.about, self.language, *words)))


@dataclass(frozen=True)
class Template:
    """The checked texts of a template file, by key. `further` are the values of the keys that one
    method's templates have. `about` is what the configuration says about the texts."""

    texts: Mapping[str, str]
    parts: Mapping[str, Conditional] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    name: str = field(default="", compare=False)
    further: Mapping[str, Any] = field(default_factory=dict)
    about: About = About()

    def render(self, key: str, **values: str) -> str:
        """Put values into a text, in one pass: a brace in a value is a brace. Return "" if the
        template lacks the text."""
        if "label" in values:
            words = {**self.labels, **self.about.labels}
            values["label"] = words.get(values["label"], values["label"])
        named = ", ".join(f"{name}: {value}" for name, value in self.about.attributes.items())
        known = {"about": self.about.about, "language": self.about.language, "attributes": named}
        values |= known
        return self._filled(self.texts.get(key, ""), values)

    def saying(self, attributes: Mapping[str, str]) -> Template:
        """Return the template of a text with these attributes."""
        return replace(self, about=replace(self.about, attributes=attributes))

    def shows(self, key: str, placeholder: str) -> bool:
        """Return whether a text has a placeholder, itself or in one of its parts."""
        named = placeholders(self.texts[key])
        parts = [self.parts[name].then for name in named if name in self.parts]
        return any(placeholder in placeholders(text) for text in (self.texts[key], *parts))

    def always_shows(self, key: str, needed: Collection[str]) -> bool:
        """Return whether a text has one of the placeholders, whatever the values are."""

        def has(text: str) -> bool:
            return any(name in needed for name in placeholders(text))

        named = [self.parts[name] for name in placeholders(self.texts[key]) if name in self.parts]
        return has(self.texts[key]) or any(
            has(part.then) and (part.placeholder in needed or has(part.otherwise)) for part in named
        )

    def check_terms(self, *keys: str) -> None:
        """Raise InputError if one of the texts does not show the terms of a chain."""
        for key in keys:
            if not self.shows(key, "terms"):
                raise self.fault("has no {terms}, which the method before it hands on", key)

    def check_attributes(self, *keys: str) -> None:
        """Raise InputError if data.attributes are given, and one of the requests does not show
        those of its text."""
        for key in keys if self.about.attributes else ():
            if not any(self.shows(k, "attributes") for k in (key, "prefix") if k in self.texts):
                raise self.fault("has no {attributes}, which data.attributes gives", key)

    def refused(self, answer: str) -> bool:
        """Return whether the answer is empty or begins like one of the refusals, up to case and the
        kind of apostrophe."""
        begins = _plain(answer.strip())
        return not begins or begins.startswith(tuple(map(_plain, self.refusals)))

    def fault(self, problem: str, *keys: str) -> InputError:
        """Return an error about the value that these keys lead to."""
        return InputError(f"method.template: {self.name}: `{'.'.join(keys)}` {problem}")

    def _filled(self, text: str, values: Mapping[str, str]) -> str:
        filled = []
        for literal, name, _, _ in Formatter().parse(text):
            filled.append(literal)
            if name is None:
                continue
            if name in values:
                filled.append(values[name])
            else:
                part = self.parts[name]
                chosen = part.then if values[part.placeholder] else part.otherwise
                filled.append(self._filled(chosen, values))
        return "".join(filled)


def placeholders(text: str) -> list[str]:
    """Return the names in braces. Raises ValueError for a lone brace, and for anything in braces
    that is more than a name."""
    names = []
    try:
        for _, name, form, conversion in Formatter().parse(text):
            if form or conversion:
                raise ValueError
            if name is not None:
                names.append(name)
    except ValueError:
        problem = "may have only names in braces (a brace of the text itself is written {{ or }})"
        raise ValueError(problem) from None
    return names


def _plain(text: str) -> str:
    return text.replace("’", "'").casefold()


def packaged(package: str) -> dict[str, Path]:
    """Return the paths of a package's templates by name, sorted."""
    files = (Path(str(resources.files(package))) / "templates").glob("*.yaml")
    return {path.stem: path for path in sorted(files)}


def read_template(
    name: str,
    package: str,
    keys: Mapping[str, TextKey],
    *required: str,
    about: About = About(),
    **further: tuple[object, object],
) -> Template:
    """Read a template of the package by its name, or a YAML file by its path. It has the `required`
    ones of `keys`; `further` keys have a type and a default. Raises InputError that names the file
    and the key."""
    values = _template_values(name, package)
    texts = {key: (str, ... if key in required else each.default) for key, each in keys.items()}
    common: dict[str, object] = {
        "parts": (dict[str, Conditional], {}),
        "labels": (dict[object, str], {}),
        "stop": (Words, ()),
        "refusals": (Words, ()),
    }
    fields: Any = texts | common | further
    try:
        model = create_model("Template", __base__=TemplatePart, **fields).model_validate(values)
    except ValidationError as error:
        deepest = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        # Without the names of types, which stand there for a key that takes one of two.
        place = [str(each) for each in deepest["loc"] if "[" not in str(each)]
        problem = deepest["msg"]
        if deepest["type"] == "extra_forbidden":
            problem = f"is no key of a template{did_you_mean(place[-1], fields)}"
        raise Template({}, name=name).fault(problem, *place) from None
    checked = {key: getattr(model, key) for key in fields}
    template = Template(
        {key: checked[key] for key in keys if checked[key] is not None},
        checked["parts"],
        {label_name(label): shown for label, shown in checked["labels"].items()},
        checked["stop"],
        checked["refusals"],
        name,
        {key: checked[key] for key in further},
        about,
    )
    _check_placeholders(template, keys)
    return template


def _template_values(name: str, package: str) -> dict[str, object]:
    known = packaged(package)
    try:
        values = parse_yaml(known.get(name, Path(name)).read_text(encoding="utf-8-sig"))
    except YamlRefused as error:
        raise InputError(f"method.template: {name}: {error}") from None
    except (OSError, ValueError):  # a file that is not UTF-8, or a path with a null byte
        raise InputError(
            f"method.template: no file {name}, and no packaged template ({', '.join(known)})"
        ) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"method.template: {name}: not a YAML file of `key: value` lines")
    return values


def _check_placeholders(template: Template, keys: Mapping[str, TextKey]) -> None:
    """Refuse the name of a placeholder for a part, and texts without what they need."""
    for name in template.parts:
        if name in ABOUT or any(name in key.placeholders for key in keys.values()):
            raise template.fault("is the name of a placeholder", "parts", name)
    for key, text in template.texts.items():
        _check_names(template, keys[key], text, key)
        needed = keys[key].needed
        if needed and not template.always_shows(key, needed):
            sometimes = any(template.shows(key, each) for each in needed)
            has = "does not always show" if sometimes else "has no"
            raise template.fault(f"{has} {_in_braces(needed, ' or ')}", key)


def _check_names(template: Template, key: TextKey, text: str, *place: str) -> None:
    """Refuse a name in braces that is neither a part nor a placeholder of the key. A part is
    checked for each text that it stands in, and has no parts."""
    try:
        names = placeholders(text)
    except ValueError as error:
        raise template.fault(str(error), *place) from None
    known = (*key.placeholders, *ABOUT)
    for name in names:
        if name in known:
            continue
        if name not in template.parts or place[0] == "parts":
            raise _unknown(template, name, key, *place)
        part = template.parts[name]
        if part.placeholder not in known:
            raise _unknown(template, part.placeholder, key, "parts", name, "if")
        _check_names(template, key, part.then, "parts", name, "then")
        _check_names(template, key, part.otherwise, "parts", name, "else")


def _unknown(template: Template, name: str, key: TextKey, *place: str) -> InputError:
    shown = " ".join(name.split())[:LONGEST_NAME]
    known = _in_braces((*key.placeholders, *ABOUT), ", ")
    return template.fault(f"has no placeholder {{{shown}}}; there are {known}", *place)


def _in_braces(names: Iterable[str], between: str) -> str:
    return between.join(f"{{{name}}}" for name in names)

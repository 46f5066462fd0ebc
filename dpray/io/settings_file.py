"""YAML files are read into pydantic models; errors are one line and name the key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from dpray.io.files import NOT_IN_URLS, holds_secret
from dpray.io.yaml_text import parse_yaml
from dpray.types import CONTROL, InputError, did_you_mean, first_line

M = TypeVar("M", bound=BaseModel)


SIGN_KEYS = ("data.delimiter", "data.quote", "data.escape")
"""After the file, a single character is the value of these keys as it is typed: YAML has a meaning
for most of those that divide cells, such as `|`, `~` and `#`."""


def read_tree(path: str | Path, overrides: Sequence[str]) -> object:
    """Read the plain tree of a YAML file with `key.sub=value` overrides. Raises InputError."""
    settings = [_setting(each) for each in overrides]
    try:
        tree = parse_yaml(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except ValueError as error:
        raise InputError(f"{path}: not a valid YAML file: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: not a YAML file of `key: value` lines")
    for key, value in settings:
        tree = _with(tree, key.split("."), value, key)
    return tree


def _setting(written: str) -> tuple[str, object]:
    """Return the key and the value of one `key.sub=value`."""
    key, sign, value = written.partition("=")
    if not sign:
        raise InputError(f"{written}: settings after the file are written key.sub=value")
    if key in SIGN_KEYS and (len(value) == 1 or (key, value) == ("data.quote", "")):
        return key, value
    try:
        return key, parse_yaml(value)
    except ValueError as error:
        why = f"not a valid value: {first_line(error)}"
        if key in SIGN_KEYS:
            why = "one character, as it is typed"
        elif value.startswith('"'):
            why = (
                f"not a valid value; a list is in brackets, as in '{key}=[\"A, with a comma\", B]'"
            )
        raise InputError(f"{key}: {why}") from None


def _with(tree: Any, place: list[str], value: Any, key: str) -> object:
    """Return the tree with a value at its place; an entry of a list is named by its number from 0.
    A mapping is merged into the old one, any other value replaces the old one."""
    if not place:
        both = isinstance(tree, dict) and isinstance(value, dict)
        return reduce(lambda t, k: _with(t, [k], value[k], key), value, tree) if both else value
    name, *rest = place
    if isinstance(tree, list):
        if not name.isdecimal() or int(name) >= len(tree):
            raise InputError(f"{key}: there is no entry {name} in a list of {len(tree)}")
        number = int(name)
        return [*tree[:number], _with(tree[number], rest, value, key), *tree[number + 1 :]]
    below = tree if isinstance(tree, dict) else {}
    return below | {name: _with(below.get(name), rest, value, key)}


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a plain tree with its full key; the keys of mappings are texts, too."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            place = f"{key}.{name}" if key else str(name)
            yield place, str(name)
            yield from _texts(below, place)
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _texts(below, key)
    elif isinstance(value, str):
        yield key, value


def parse(model: type[M], values: object) -> M:
    """Make a model from a plain tree. Raises InputError that names the first wrong key.

    Control characters except tabs and line feeds are refused: texts become paths, names and error
    messages, and file systems, databases and terminals disagree on what these characters mean.
    `${` is refused because nothing is interpolated; other tools would put an environment variable
    there.
    """
    for key, text in _texts(values):
        if "${" in text:
            raise InputError(f"{key}: `${{` has no meaning in a configuration; write the value")
        # Hive divides cells by the first of these characters.
        if key not in ("data.delimiter", "delimiter") and re.search(f"[{CONTROL}]", text):
            raise InputError(f"{key}: holds a control character or half a surrogate pair")
        # The ledger's URL is in no release, and is shown without its passwords.
        if key != "privacy.ledger" and holds_secret(text):
            section, _, name = key.partition(".")
            hint = f"; give {section}.api_key" if name == "base_url" else ""
            raise InputError(f"{key}: {NOT_IN_URLS}{hint}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InputError(_one_line(error, model, values)) from None


def _one_line(error: ValidationError, model: type[BaseModel], values: object) -> str:
    """Return the key and the message of an error, in one line: the first one of a key that does not
    exist, since another key may be missing for it, or the first of all. A key that `values` do not
    have may be their preset's."""
    found = error.errors(include_url=False, include_input=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    place = list(first["loc"])
    if place[:3] == ["method", "chain", "methods"]:
        place[:5] = ["methods", *place[3:4]]  # pydantic also puts the methods' names into a place
    elif place[:1] == ["method"] and len(place) > 1:
        del place[1]
    # pydantic also names the kind of a value that may have several.
    place = [
        each for each in place if not re.fullmatch(r"(dict|list|tuple|literal)\[.*\]", str(each))
    ]
    message = first["msg"].removeprefix("Value error, ")
    # A check of a whole section names the key in its message.
    if named := re.match(r"([a-z0-9_.]+): ", message):
        place.append(named[1])
        message = message[named.end() :]
    key = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        message = f"there is no such key{near_key(model, first['loc'])}"
    elif first["type"] == "tuple_type":
        message = f"is a list in brackets, as in {key}=[A, B]"
    elif first["type"] == "string_type":
        message = f"not a text; a number or null goes in quotes, as in '{key}=\"1\"'"
    elif first["type"] in ("model_type", "model_attributes_type"):
        message = "has keys of its own, and no value"
    elif first["type"].startswith("union_tag"):
        known = first.get("ctx", {}).get("expected_tags")
        key = f"{key}.name"
        message = f"one of {known}" if known else "has to name a method"
    elif first["type"] == "value_error":
        message += _of_preset(values, place, key)
    also = f" (and {len(found) - 1} more)" if found[1:] else ""
    return f"{key or 'config'}: {message}{also}"


def _of_preset(values: object, place: Sequence[str | int], key: str) -> str:
    """Return the part of an error about a key that only the preset of its section sets."""
    *above, last = place or [""]
    section: Any = values
    for part in above:
        is_there = isinstance(section, dict) and part in section
        section = section[part] if is_there or isinstance(section, list) else None
    if not isinstance(section, dict) or last in section or not section.get("preset"):
        return ""
    return f"; {last} is the preset's ({section['preset']}): give {key} too, or another preset"


KeyPath = Sequence[str | int]
"""The place of an error as pydantic states it: keys, numbers of entries, and names of methods."""

Models = list[type[BaseModel]]


def near_key(model: type[BaseModel], place: KeyPath) -> str:
    """Return the part of an error about a key that does not exist: a near one in its section, the
    methods that have it, or the section that does; "" without any."""
    *above, last = place
    key, there = str(last), _models_at([model], above)
    others = _models_at([model], above[:-1]) if above and there != [model] else []
    methods = sorted({name for each in others if key in _keys(each) for name in _names(each)})
    if methods:
        remedy = ""
        if above[:1] == ["method"] and len(above) == 2:  # with the name of the method
            remedy = (
                f"; `dpray init FILE --method {above[1]} -o OTHER.yaml` writes a configuration of "
                f"{above[1]}"
            )
        return f"; it is a key of {', '.join(methods)}{remedy}"
    if near := did_you_mean(key, (name for each in there for name in _keys(each))):
        return near
    sections = [f"{name}.{key}" for name in _keys(model) if key in _keys_in(model, name)]
    return f" (did you mean {' or '.join(sections)}?)" if sections else ""


def _models_at(models: Models, place: KeyPath) -> Models:
    """Return the models of the section at a place. The name of a method in it chooses among the
    methods' models."""
    for part in place:
        if isinstance(part, int):
            continue
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        inner = [found for field in fields for found in _models_in(field.annotation)]
        models = inner or [each for each in models if part in _names(each)]
    return models


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _keys_in(model: type[BaseModel], section: str) -> set[str]:
    inner = [each for each in _models_at([model], [section]) if not _names(each)]
    return {key for each in inner for key in _keys(each)}


def _names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names by which a section chooses this model, if it is a method's."""
    return get_args(model.model_fields["name"].annotation) if "name" in model.model_fields else ()

"""YAML files are read into pydantic models; errors are one line and name the key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from dpray.io.yaml_text import MOST_NODES, parse_yaml, read_yaml_text
from dpray.types import CONTROL, InputError, first_line

M = TypeVar("M", bound=BaseModel)


def read_tree(path: str | Path, overrides: list[str]) -> Any:
    """Read the plain tree of a YAML file with `key.sub=value` overrides. Raises InputError.

    Nothing is interpolated: OmegaConf's `${oc.env:NAME}` would put an environment variable into the
    files of a release, so `${` is refused before OmegaConf sees it.
    """
    settings = [_checked_override(each) for each in overrides]
    try:
        text = read_yaml_text(path)
        plain = parse_yaml(text)
        if not isinstance(plain, dict):
            raise InputError(f"{path}: not a YAML file of `key: value` lines")
        _refuse_interpolation(plain)
        loaded = OmegaConf.load(StringIO(text), max_yaml_expanded_nodes=MOST_NODES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a valid YAML file: {first_line(error)}") from None
    try:
        for setting in settings:
            loaded.merge_with_dotlist([setting])
        return OmegaConf.to_container(loaded, resolve=False)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise InputError(f"{path}, with what is set after it: {first_line(error)}") from None


def _checked_override(setting: str) -> str:
    """Return one `key.sub=value` setting, which can be read."""
    key, sign, value = setting.partition("=")
    if not sign or key.endswith("\\"):  # OmegaConf would read on to the next sign
        raise InputError(f"{setting}: settings after the file are written key.sub=value")
    try:
        _refuse_interpolation({key: parse_yaml(value)})
        OmegaConf.from_dotlist([setting])
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise InputError(f"{key}: not a valid value: {first_line(error)}") from None
    return setting


def _refuse_interpolation(tree: Any) -> None:
    """Refuse `${` in a text. Raises InputError that names the key."""
    for key, text in _texts(tree):
        if "${" in text:
            raise InputError(f"{key}: `${{` has no meaning in a configuration; write the value")


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a plain tree, the mappings' keys included, each with its full key."""
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


def parse(model: type[M], values: Any) -> M:
    """Make a model of a plain tree. Raises InputError that names the first wrong key.

    Control characters but tabs and line feeds are refused: texts become paths, names and error
    messages, and file systems, databases and terminals disagree on what these characters mean.
    """
    for key, text in _texts(values):
        if re.search(f"[{CONTROL}]", text):
            raise InputError(f"{key}: holds a control character or half a surrogate pair")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first, *more = error.errors(include_url=False, include_input=False)
        place = list(first["loc"])
        if place[:3] == ["method", "chain", "methods"]:
            place[:5] = ["methods", *place[3:4]]  # without names of methods, which are no keys
        elif place[:1] == ["method"] and len(place) > 2:
            del place[1]
        message = first["msg"].removeprefix("Value error, ")
        # What checks a whole section names the key itself.
        if named := re.match(r"([a-z0-9_.]+): ", message):
            place.append(named[1])
            message = message[named.end() :]
        key = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            message = "there is no such key"
        elif first["type"] in ("model_type", "model_attributes_type"):
            message = "has keys of its own, and no value"
        elif first["type"].startswith("union_tag"):
            known = first.get("ctx", {}).get("expected_tags")
            key = f"{key}.name"
            message = f"one of {known}" if known else "has to name a method"
        also = f" (and {len(more)} more)" if more else ""
        raise InputError(f"{key or 'config'}: {message}{also}") from None

"""From a YAML file to a checked model, with errors of one line that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from dpray.types import InputError

M = TypeVar("M", bound=BaseModel)


def read_tree(path: str | Path, overrides: list[str]) -> Any:
    """The plain tree of a YAML file with `key.sub=value` overrides; raises InputError."""
    for override in overrides:
        if "=" not in override:
            raise InputError(f"{override}: settings after the file are written key.sub=value")
    try:
        loaded = OmegaConf.load(path)
        if not OmegaConf.is_dict(loaded):
            raise InputError(f"{path}: not a YAML file of `key: value` lines")
        tree = OmegaConf.merge(loaded, OmegaConf.from_dotlist(overrides))
        return OmegaConf.to_container(tree, resolve=True)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: not a valid YAML file: {str(error).splitlines()[0]}") from None


def parse(model: type[M], values: Any) -> M:
    """A configuration from a plain tree; raises InputError that names the first wrong key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first, *more = error.errors(include_url=False, include_input=False)
        place = list(first["loc"])
        if place[:1] == ["method"] and len(place) > 2:
            del place[1]  # the method's name, which is no key
        key = ".".join(map(str, place))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "there is no such key"
        elif first["type"].startswith("union_tag"):
            known = first.get("ctx", {}).get("expected_tags")
            key, message = "method.name", f"one of {known}" if known else "has to name a method"
        also = f" (and {len(more)} more)" if more else ""
        raise InputError(f"{key or 'config'}: {message}{also}") from None

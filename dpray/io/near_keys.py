"""The key that a key of a configuration was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from dpray.types import did_you_mean

Place = Sequence[str | int]
"""The place of an error as pydantic states it: keys, numbers of entries, and names of methods."""

Models = list[type[BaseModel]]


def near_key(model: type[BaseModel], place: Place) -> str:
    """Return the part of an error about a key that does not exist: a near one in its section, the
    methods that have it, or the section that does; "" without any."""
    *above, last = place
    key, there = str(last), _models_at([model], above)
    others = _models_at([model], above[:-1]) if above and there != [model] else []
    methods = sorted({name for each in others if key in _keys(each) for name in _names(each)})
    if methods:
        return f"; it is a key of {', '.join(methods)}"
    if near := did_you_mean(key, (name for each in there for name in _keys(each))):
        return near
    sections = [f"{name}.{key}" for name in _keys(model) if key in _keys_in(model, name)]
    return f" (did you mean {' or '.join(sections)}?)" if sections else ""


def _models_at(models: Models, place: Place) -> Models:
    """Return the models of the section at a place. The name of a method in it chooses among the
    methods' models."""
    for part in place:
        if isinstance(part, int):
            continue
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        inner = [found for field in fields for found in _models_in(field.annotation)]
        models = inner or [each for each in models if part in _names(each)]
    return models


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
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

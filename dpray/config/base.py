"""Every section of the configuration is frozen, refuses unknown keys, and takes only numbers for
numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dpray.io.formats import known_encoding, one_sign

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Delimiter = Annotated[str | None, AfterValidator(one_sign)]
Encoding = Annotated[str | None, AfterValidator(known_encoding)]


class Section(BaseModel):
    """A number is finite, unless its field sets `allow_inf_nan`; a truth value or a text is no
    number: pydantic would take `true` for 1 and "inf" for infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            kinds = _kinds(cls.model_fields[name].annotation) if name in cls.model_fields else set()
            refused = {bool, str} - kinds if kinds & {int, float} else ()
            if any(type(leaf) in refused for leaf in _leaves(value)):
                raise ValueError(f"{name}: not a number in decimal digits, such as 4, 0.5 or 1e-6")
        return values


class MethodSettings(Section):
    """The keys of `method`. `dpray.methods.config` lists the settings of all methods."""

    name: str
    engines: ClassVar[frozenset[str]] = frozenset({"vllm", "transformers", "openai"})
    """The kinds of engines that the method can use."""
    can_run_without_noise: ClassVar[bool] = False
    actors_share_gpus: ClassVar[bool] = True

    @property
    def each(self) -> Sequence[MethodSettings]:
        """Return the settings of the methods that a run runs, several in a chain."""
        return (self,)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types of an annotation's values; those of a mapping are its values'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return set(map(type, arguments))
    if origin is Annotated:
        arguments = arguments[:1]
    elif origin is dict:
        arguments = arguments[1:]
    return set().union(*map(_kinds, arguments)) if arguments else {annotation}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value

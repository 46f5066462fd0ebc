"""`ChainSettings` are the keys of `method` for a chain: one method measures what the records are
about, and a second one writes texts about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from dpray.config.base import MethodSettings
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.topics.settings import TopicsSettings

First = Annotated[DpKpsSettings | TopicsSettings, Field(discriminator="name")]
"""The first method releases sequences of terms."""

Second = Annotated[
    PrivatePredictionSettings | AugPeSettings | DpSgdSettings, Field(discriminator="name")
]
"""The second method reads these sequences as its public `terms`."""


class ChainSettings(MethodSettings):
    name: Literal["chain"]
    methods: tuple[First, Second] = Field(
        description="two sections like `method`: dp_kps or topics, and then private_prediction, "
        "aug_pe or dp_sgd"
    )

    @field_validator("methods", mode="before")
    @classmethod
    def _are_two(cls, methods: Any) -> Any:
        if not isinstance(methods, list | tuple) or len(methods) != 2:
            raise ValueError(
                "a chain has two methods: dp_kps or topics, and then private_prediction, aug_pe or "
                "dp_sgd; one alone stands as `method`"
            )
        return methods

    @field_validator("methods")
    @classmethod
    def _terms_are_released(cls, methods: tuple[First, Second]) -> tuple[First, Second]:
        first, second = methods
        if second.terms is not None:
            raise ValueError(f"1.terms: is what {first.name} releases")
        return methods

    @property
    def each(self) -> Sequence[MethodSettings]:
        return self.methods

    @property
    def links(self) -> tuple[str, str]:
        """Return the names of the two parts of the run."""
        first, second = self.methods
        return f"1-{first.name}", f"2-{second.name}"

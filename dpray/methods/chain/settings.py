"""`ChainSettings` are the keys of `method` for a run of several methods, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from dpray.config.base import MethodSettings
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.topics.settings import TopicsSettings

Link = Annotated[
    PrivatePredictionSettings | AugPeSettings | DpKpsSettings | DpSgdSettings | TopicsSettings,
    Field(discriminator="name"),
]

INPUT_KEY = {"dp_kps": "terms", "topics": "terms", "private_prediction": "first_texts"}
"""The key of the next method that names the file of what each of these methods released. A method
without that key cannot follow."""

FOLLOWERS: dict[str, type[MethodSettings]] = {
    "private_prediction": PrivatePredictionSettings,
    "aug_pe": AugPeSettings,
    "dp_sgd": DpSgdSettings,
}


class ChainSettings(MethodSettings):
    name: Literal["chain"]
    methods: tuple[Link, ...] = Field(
        description="sections like `method`, in their order; what one releases is the public input "
        "of the next"
    )

    @property
    def each(self) -> Sequence[Link]:
        return self.methods

    @property
    def links(self) -> dict[str, Link]:
        """Return the methods by the names of their parts of the run."""
        return {f"{place}-{each.name}": each for place, each in enumerate(self.methods, start=1)}


def misplaced(names: Sequence[str]) -> str | None:
    """Return what is wrong with methods in this order, or None."""
    if names and names[-1] == "topics":
        return "topics writes no texts; another method has to follow it"
    if len(names) < 2:
        return "a chain has two methods or more; one alone stands as `method`"
    pairs = [
        (one, after)
        for one, key in INPUT_KEY.items()
        for after, settings in FOLLOWERS.items()
        if key in settings.model_fields
    ]
    for one, after in pairwise(names):
        if (one, after) not in pairs:
            known = ", ".join(f"{a} -> {b}" for a, b in pairs)
            return f"{after} cannot follow {one}; the pairs are {known}"
    return None

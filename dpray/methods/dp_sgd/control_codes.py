"""What stands before a text: its control columns, their names and their public values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpray.config.config import DataConfig
from dpray.mechanisms.shares import largest_remainder
from dpray.methods.dp_sgd.algorithm import control_code
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.types import InputError


@dataclass(frozen=True)
class ControlCodes:
    """`names`: what each column is called in the code, in the code's order. `values`: the public
    values of every column with their public shares; for the label, what is expected of them."""

    names: Mapping[str, str]
    values: Mapping[str, Mapping[str, float]]

    def code(self, values: Mapping[str, str]) -> str:
        """The code of one value for each column."""
        return control_code({name: values[column] for column, name in self.names.items()})

    def longest(self, length: Callable[[str], int]) -> str:
        """The code of each column's longest value."""
        return self.code({column: max(self.values[column], key=length) for column in self.names})

    def shares(
        self, label: str | None, proportions: Mapping[str, float]
    ) -> dict[str, Mapping[str, float]]:
        return {
            column: proportions if column == label else self.values[column] for column in self.names
        }


def control_codes(data: DataConfig, settings: DpSgdSettings) -> ControlCodes:
    """Raises InputError that names the key."""
    names = settings.control_columns or ({data.label: data.label} if data.label else {})
    others = set(names) - {data.label}
    for column in sorted(others ^ set(settings.control_values)):
        if column == data.label:
            raise InputError(
                f"method.control_values: {column} is data.label; its shares are "
                f"data.label_proportions"
            )
        if column in others:
            raise InputError(
                f"method.control_values: gives no shares of the values of {column}, which is in "
                f"method.control_columns"
            )
        raise InputError(f"method.control_values: {column} is not in method.control_columns")
    known = settings.control_values | ({data.label: data.proportions} if data.label else {})
    return ControlCodes(names, {column: known[column] for column in names})


def draw_values(
    shares: Mapping[str, Mapping[str, float]], number: int, rng: np.random.Generator
) -> Sequence[dict[str, str]]:
    """A value of every column for each of `number` texts: as many of each value as its share says,
    the columns independent of each other. `rng` is public."""
    drawn: list[dict[str, str]] = [{} for _ in range(number)]
    for column, of_column in shares.items():
        counts = largest_remainder(number, of_column)
        values = [value for value, count in counts.items() for _ in range(count)]
        for text, place in zip(drawn, rng.permutation(number), strict=True):
            text[column] = values[place]
    return drawn

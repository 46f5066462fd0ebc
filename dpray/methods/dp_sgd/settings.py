"""`DpSgdSettings` are the keys of `method` for DP-SGD (Yue et al. 2023).

`engine.model` is the base model, which is tuned; `engine.kind` runs the tuned one to write the
texts. `runtime.actors` is the number of ranks on Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from dpray.config.data import Column
from dpray.config.sections import (
    ENGINE_KEYS,
    LARGEST,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Section,
    TextSettings,
)
from dpray.io.columns import value_name
from dpray.mechanisms.attributes import Values, margins
from dpray.methods.dp_sgd.training.settings import TrainingSettings

Value = Annotated[str, BeforeValidator(value_name)]

PAPER: Mapping[str, object] = {
    "tuning": "full", "epochs": 50.0, "batch_size": 4096, "clip_norm": 1.0, "optimizer": "adamw",
    "learning_rate": 1e-4, "max_length": 128, "records": 100_000, "temperature": 1.0, "top_k": 50,
    "top_p": 0.9,
}  # fmt: skip
"""Section 4.1, and appendix A for GPT-2."""


class CombinationConfig(Section):
    share: NotNegative = Field(description="its share of the texts")
    values: dict[Column, Value] = Field(min_length=1, description="a value of each column")


class DpSgdSettings(TrainingSettings, TextSettings):
    name: Literal["dp_sgd"]
    engines: ClassVar[frozenset[str]] = frozenset({"vllm", "transformers"})
    can_run_without_noise: ClassVar[bool] = True
    actors_share_gpus: ClassVar[bool] = False
    call_keys: ClassVar[frozenset[str]] = ENGINE_KEYS - {"engine.model"} | {
        "method.records", "method.max_retries", "method.temperature", "method.top_k",
        "method.top_p", "method.schema",
    }  # fmt: skip
    calls_after: ClassVar[str | None] = "model"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper": PAPER,
        "paper_medium": {**PAPER, "epochs": 25.0},
        "paper_large": {**PAPER, "epochs": 20.0},
    }
    epochs: Positive = Field(50.0, description="expected passes over the data: steps = epochs / q")
    batch_size: Count = Field(
        4096, description="B, the expected number of units of a batch: q = B / data.public_size"
    )
    clip_norm: Positive = Field(1.0, description="C, the bound on the norm of a unit's gradient")
    noise_multiplier: Positive | None = Field(
        None, description="sigma, the noise over C; null: from epsilon"
    )
    checkpoint_steps: Count | None = Field(
        None,
        description="steps between two checkpoints, which an interrupted run may repeat; null: a "
        "hundredth of all steps",
    )
    spare_steps: CountOrZero | None = Field(
        None,
        description="repeated steps of an interrupted run that are charged beforehand; null: "
        "checkpoint_steps if the noise is from epsilon, none if it is given",
    )
    max_length: int = Field(
        128,
        ge=2,
        le=LARGEST,
        description="tokens of a code and its text together; a longer record is cut, and no longer "
        "one is written",
    )
    control_columns: dict[Column, str] = Field(
        {},
        description="column to the name it has in the control code, in order; {}: the label. "
        "data.attributes that are not there follow by their own names",
    )
    control_values: dict[Column, dict[Value, float]] = Field(
        {},
        description="public share of each value of a control column, for all but the label; no "
        "other value may stand in the data. 1 is 1.0 there too, and null is NaN too",
    )
    control_combinations: tuple[CombinationConfig, ...] = Field(
        (),
        description="public shares of combinations of several control columns' values, for columns "
        "that are not in control_values; they may have the label, in place of "
        "data.label_proportions",
    )
    terms: str | None = Field(
        None,
        description="a file of PUBLIC sequences, columns `terms` and `label`, such as a release of "
        "dp_kps: a control code names those that its text holds, and a written text is asked for "
        "with one of its label; null: none",
    )
    records: Count = Field(1000, description="texts written by the fine-tuned model; free")
    max_retries: CountOrZero = Field(2, description="how often an empty text is rewritten")
    temperature: Positive = Field(1.0, description="sampling temperature of the texts")
    top_k: CountOrZero = Field(50, description="top-k of the sampling; 0: off")
    top_p: float = Field(0.9, gt=0, le=1, description="top-p of the sampling; 1: off")

    @property
    def training_size(self) -> tuple[int, int]:
        # A full training has a gradient and two moments of each weight.
        copies = 4 if self.tuning == "full" else 1
        return copies, (self.micro_batch_size or 16) * self.max_length

    @model_validator(mode="after")
    def _shares_are_shares(self) -> DpSgdSettings:
        for column, shares in self.control_values.items():
            if (
                not shares
                or min(shares.values()) < 0
                or not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6)
            ):
                raise ValueError(
                    f"control_values: the shares of {column} are not negative and sum to 1"
                )
        return self

    @model_validator(mode="after")
    def _combinations_are_shares(self) -> DpSgdSettings:
        given = self.control_combinations
        columns = {tuple(sorted(each.values)) for each in given}
        if len(columns) > 1:
            raise ValueError("control_combinations: name the same columns in all of them")
        if len(set(self.combinations)) < len(given):
            raise ValueError("control_combinations: a combination is there twice")
        if given and not math.isclose(sum(each.share for each in given), 1.0, abs_tol=1e-6):
            raise ValueError("control_combinations: their shares sum to 1")
        if both := sorted({*chain(*columns)} & {*self.control_values}):
            raise ValueError(f"control_combinations: {both[0]} is in control_values, too")
        return self

    @property
    def combinations(self) -> dict[Values, float]:
        """Return the share of each of `control_combinations`."""
        return {
            tuple(sorted(each.values.items())): each.share for each in self.control_combinations
        }

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """Return the share of each value of the control columns that are given."""
        return {**self.control_values, **margins(self.combinations)}

"""`method` of DP-SGD fine-tuning (Yue et al. 2023).

`engine.model` is the base model, which is tuned; `engine.kind` runs the tuned one to write the
texts. `runtime.actors` is the number of ranks, where the run is on Ray.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dpray.config.base import Count, Positive, Section


class DpSgdSettings(Section):
    name: Literal["dp_sgd"]
    tuning: Literal["lora", "full"] = Field("lora", description="low-rank adapters, or all weights")
    lora_rank: Count = Field(8, description="rank of the adapters on every linear layer")
    lora_alpha: Positive = Field(16.0, description="adapters are scaled by lora_alpha / lora_rank")
    epochs: Positive = Field(50.0, description="expected passes over the data: steps = epochs / q")
    batch_size: Count = Field(
        4096, description="B, the expected number of units of a batch: q = B / data.public_size"
    )
    micro_batch_size: Count = Field(
        16, description="examples that go through the model together on a rank; for memory only"
    )
    clip_norm: Positive = Field(1.0, description="C, the longest a unit's gradient may be")
    noise_multiplier: Positive | None = Field(
        None, description="sigma, the noise over C; null: from epsilon"
    )
    checkpoint_steps: Count | None = Field(
        None,
        description="steps between two checkpoints: as many are made again by a run that was cut "
        "off; null: a hundredth of all",
    )
    spare_steps: int | None = Field(
        None,
        ge=0,
        description="steps charged beforehand that a run that was cut off may make again; null: "
        "checkpoint_steps where the noise is from epsilon, none where it is given",
    )
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="what the noisy mean is fed to")
    learning_rate: Positive = Field(1e-4, description="of the first step")
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="of the learning rate; linear falls to 0 after the last step"
    )
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="of adamw and sgd")
    max_length: int = Field(
        128,
        ge=2,
        description="tokens of a code and its text together; a longer record is cut, and no longer "
        "one is written",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the arithmetic; weights, gradients and noise are float32"
    )
    gradient_checkpointing: bool = Field(
        False,
        description="compute activations again in the backward pass: less memory, more time; "
        "not with zero_stage 3",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="what DeepSpeed partitions over ranks; 3 where memory asks for it"
    )
    control_columns: dict[str, str] = Field(
        {}, description="column to the name it has in the control code, in order; {}: the label"
    )
    control_values: dict[str, dict[str, float]] = Field(
        {},
        description="public share of each value of a control column, for all but the label; no "
        "other value may stand in the data",
    )
    records: Count = Field(1000, description="texts written by the fine-tuned model; free")
    max_retries: int = Field(2, ge=0, description="how often an empty text is written anew")
    temperature: Positive = Field(1.0, description="of the writing")
    top_k: int = Field(50, ge=0, description="of the writing; 0: off")
    top_p: float = Field(0.9, gt=0, le=1, description="of the writing; 1: off")

    @field_validator("control_values", mode="before")
    @classmethod
    def _values_are_names(cls, columns: Any) -> Any:
        if not isinstance(columns, dict):
            return columns
        return {
            column: {str(value): share for value, share in shares.items()}
            if isinstance(shares, dict)
            else shares
            for column, shares in columns.items()
        }

    @model_validator(mode="after")
    def _blocks_are_whole(self) -> DpSgdSettings:
        if self.gradient_checkpointing and self.zero_stage == 3:
            raise ValueError(
                "gradient_checkpointing: not with zero_stage 3, which takes a block's weights away "
                "between computing it again and its backward pass"
            )
        return self

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

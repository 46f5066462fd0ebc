"""`TrainingSettings` are the keys of any fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from dpray.config.sections import Count, Positive, Section

Precision = Literal["float32", "bfloat16"]
Tuning = Literal["lora", "full"]

RATES: Mapping[Tuning, float] = {"lora": 2e-3, "full": 1e-4}
"""AdamW's learning rates. Adapters are few weights that begin at 0: at the rate that the paper has
for all weights they hardly move (docs/dp_sgd.md)."""


class TrainingSettings(Section):
    tuning: Tuning = Field("lora", description="low-rank adapters, or all weights")
    lora_rank: Count = Field(8, description="rank of the adapters on every linear layer")
    lora_alpha: Positive = Field(16.0, description="adapters are scaled by lora_alpha / lora_rank")
    micro_batch_size: Count | None = Field(
        None,
        description="most examples that go through the model together on a rank; null: 16, and "
        "fewer where dummies have to fill up the rows; a GPU is busy from 32 on",
    )
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="what the noisy mean is fed to")
    learning_rate: Positive | None = Field(
        None,
        description="learning rate of every step; null: 0.002 for adapters and 0.0001 for all "
        "weights; sgd has no default",
    )
    precision: Precision = Field(
        "float32",
        description="of the arithmetic; weights, clipped sums and noise are float32",
    )
    zero_stage: Literal[2, 3] = Field(
        2, description="what DeepSpeed partitions over ranks; 3 if memory asks for it"
    )

    @model_validator(mode="after")
    def _sgd_has_a_rate(self) -> TrainingSettings:
        if self.optimizer == "sgd" and self.learning_rate is None:
            raise ValueError("learning_rate: sgd has no default; give one")
        return self

    @property
    def rate(self) -> float:
        return RATES[self.tuning] if self.learning_rate is None else self.learning_rate

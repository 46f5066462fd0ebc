"""`TrainingSettings` are the keys of any fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpray.config.sections import Count, Positive, Section

Precision = Literal["float32", "bfloat16"]


class TrainingSettings(Section):
    tuning: Literal["lora", "full"] = Field("lora", description="low-rank adapters, or all weights")
    lora_rank: Count = Field(8, description="rank of the adapters on every linear layer")
    lora_alpha: Positive = Field(16.0, description="adapters are scaled by lora_alpha / lora_rank")
    micro_batch_size: Count | None = Field(
        None,
        description="most examples that go through the model together on a rank; null: 16, and "
        "fewer where dummies have to fill up the rows; a GPU is busy from 32 on",
    )
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="what the noisy mean is fed to")
    learning_rate: Positive = Field(1e-4, description="learning rate of every step")
    precision: Precision = Field(
        "float32",
        description="of the arithmetic; weights, clipped sums and noise are float32",
    )
    zero_stage: Literal[2, 3] = Field(
        2, description="what DeepSpeed partitions over ranks; 3 if memory asks for it"
    )

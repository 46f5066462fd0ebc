"""`TrainingSettings` are the keys of any fine-tuning, whatever its loss and its guarantee."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dpray.config.base import Count, Positive, Section

Precision = Literal["float32", "bfloat16"]


class TrainingSettings(Section):
    tuning: Literal["lora", "full"] = Field("lora", description="low-rank adapters, or all weights")
    lora_rank: Count = Field(8, description="rank of the adapters on every linear layer")
    lora_alpha: Positive = Field(16.0, description="adapters are scaled by lora_alpha / lora_rank")
    micro_batch_size: Count = Field(
        16, description="examples that go through the model together on a rank; for memory only"
    )
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="what the noisy mean is fed to")
    learning_rate: Positive = Field(1e-4, description="learning rate of the first step")
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="the learning rate's course; linear falls to 0 after the last step"
    )
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="weight decay of adamw and sgd"
    )
    precision: Precision = Field(
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

    @model_validator(mode="after")
    def _blocks_are_whole(self) -> TrainingSettings:
        if self.gradient_checkpointing and self.zero_stage == 3:
            raise ValueError(
                "gradient_checkpointing: not with zero_stage 3, which takes a block's weights away "
                "between computing it again and its backward pass"
            )
        return self

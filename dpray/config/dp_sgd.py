"""`method` of DP-SGD fine-tuning (Yue et al. 2023)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpray.config.base import Count, Positive, Section


class DpSgdConfig(Section):
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
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="what the noisy mean is fed to")
    learning_rate: Positive = Field(1e-4, description="of the first step")
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="of the learning rate; linear falls to 0 after the last step"
    )
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="of adamw and sgd")
    max_length: int = Field(
        128, ge=2, description="tokens of a code and its text together; a longer record is cut"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the arithmetic; weights, gradients and noise are float32"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="what DeepSpeed partitions over ranks; 3 where memory asks for it"
    )
    control_columns: dict[str, str] = Field(
        {}, description="column to the name it has in the control code, in order; {}: the label"
    )
    records: Count = Field(1000, description="texts written by the fine-tuned model; free")
    max_tokens: Count = Field(128, description="the longest text that is written")
    temperature: Positive = Field(1.0, description="of the writing")
    top_k: int = Field(50, ge=0, description="of the writing; 0: off")
    top_p: float = Field(0.9, gt=0, le=1, description="of the writing; 1: off")

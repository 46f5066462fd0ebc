"""The configuration of all commands: YAML, with `key.sub=value` after the file.

All values are public; nothing is read from the data or from environment variables.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from pydantic import PrivateAttr, SerializeAsAny, model_validator

from dpray.config.data import DataConfig
from dpray.config.sections import (
    EmbedderConfig,
    EngineConfig,
    MethodSettings,
    OutputConfig,
    PrivacyConfig,
    RuntimeConfig,
    Section,
)

if TYPE_CHECKING:  # it loads numpy, which no configuration needs
    from dpray.accounting.event import Event

__all__ = ["Config", "DataConfig", "EngineConfig"]


class Config(Section):
    data: DataConfig
    privacy: PrivacyConfig
    method: SerializeAsAny[MethodSettings]
    engine: EngineConfig
    embedder: EmbedderConfig = EmbedderConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    output: OutputConfig = OutputConfig()

    _spent: Event | None = PrivateAttr(None)

    @property
    def spent(self) -> Event | None:
        """Return the event of the mechanisms before this method in the run, or None."""
        return self._spent

    def after(self, spent: Event | None) -> Self:
        """Return the configuration of a method that runs after `spent`: `privacy.epsilon` pays for
        both. No file can set this."""
        changed = self.model_copy()
        changed._spent = spent
        return changed

    @property
    def not_private(self) -> bool:
        """Return whether the run adds no noise: epsilon is infinite, only for measurements."""
        return math.isinf(self.privacy.epsilon)

    @property
    def method_names(self) -> set[str]:
        """Return the names of the run's methods; a chain has several."""
        return {method.name for method in self.method.each}

    @property
    def measured_epsilon(self) -> tuple[float, str]:
        """Return what measuring the labels and the attributes may cost by itself, and the key that
        sets it."""
        if self.data.attributes:
            return self.privacy.for_attributes, "epsilon_attributes"
        is_measured = self.data.label_proportions == "measured"
        return self.privacy.epsilon_labels if is_measured else 0.0, "epsilon_labels"

    @model_validator(mode="after")
    def _method_fits(self) -> Self:
        for method in self.method.each:
            if self.not_private and not method.can_run_without_noise:
                raise ValueError(f"privacy.epsilon: infinity is not for {method.name}")
            if self.engine.kind not in method.engines:
                kinds = ", ".join(sorted(method.engines))
                raise ValueError(
                    f"engine.kind: {self.engine.kind} is not for {method.name}, which takes {kinds}"
                )
        if self.not_private and self.output.copy_to is not None:
            raise ValueError("output.copy_to: nothing of a run without noise may leave its folder")
        if self.engine.kind != "none" and not self.engine.model:
            raise ValueError("engine.model: a folder, or a model's name")
        return self

    @model_validator(mode="after")
    def _labels_leave_epsilon(self) -> Self:
        measured, key = self.measured_epsilon
        if self.data.attributes:
            if self.engine.kind == "none":
                raise ValueError(
                    "data.attributes: are for texts, and engine.kind none writes none; name a "
                    "language model, or leave them out"
                )
            if not self.privacy.delta:
                raise ValueError(
                    "privacy.delta: data.attributes are measured with Gaussian noise, which takes "
                    "a delta above 0"
                )
        if measured >= self.privacy.epsilon:
            raise ValueError(f"privacy.{key}: leaves nothing of privacy.epsilon")
        return self

    @model_validator(mode="after")
    def _gpus_fit(self) -> Self:
        """Check that a given number of GPUs fits the engine; 0 is the CPU, which fits every
        engine."""
        gpus, engine = self.runtime.gpus_per_actor, self.engine
        if not gpus or not engine.is_local:
            return self
        if gpus < 1 == engine.gpus:
            if engine.kind == "vllm" and engine.gpu_memory_utilization > gpus:
                raise ValueError(
                    f"runtime.gpus_per_actor: {gpus:g} of a GPU is less than vLLM takes of its "
                    f"memory, engine.gpu_memory_utilization {engine.gpu_memory_utilization:g}"
                )
            shared = all(method.actors_share_gpus for method in self.method.each)
            if self.runtime.actors > 1 and not shared:
                raise ValueError(
                    f"runtime.gpus_per_actor: {gpus:g}: the ranks of a training cannot share a GPU"
                )
        elif gpus != engine.gpus:
            sizes = "engine.tensor_parallel_size times engine.pipeline_parallel_size"
            wanted = sizes if engine.kind == "vllm" else "transformers"
            raise ValueError(
                f"runtime.gpus_per_actor: {gpus:g} is not the number of GPUs that the engine uses, "
                f"{engine.gpus} ({wanted})"
            )
        return self

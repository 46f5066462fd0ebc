"""Every command has the same configuration: YAML, with `key.sub=value` after the file.

All keys are public numbers and names; none is read from the data or from environment variables.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from dpray.config.base import Section
from dpray.config.loading import parse, read_tree
from dpray.config.sections import (
    DataConfig,
    EmbedderConfig,
    EngineConfig,
    OutputConfig,
    PrivacyConfig,
    RuntimeConfig,
)
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.auto import AutoSettings
from dpray.methods.chain.settings import ChainSettings, misplaced
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings

__all__ = ["Config", "DataConfig", "EngineConfig", "load_config", "parse_config"]


class Config(Section):
    data: DataConfig
    privacy: PrivacyConfig
    method: Annotated[
        PrivatePredictionSettings
        | AugPeSettings
        | DpKpsSettings
        | DpSgdSettings
        | ChainSettings
        | AutoSettings,
        Field(discriminator="name"),
    ]
    engine: EngineConfig
    embedder: EmbedderConfig = EmbedderConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    output: OutputConfig = OutputConfig()

    @property
    def method_names(self) -> set[str]:
        """Return the names of the run's methods, several where they are chained."""
        method = self.method
        return {m.name for m in (method.methods if method.name == "chain" else [method])}

    @model_validator(mode="before")
    @classmethod
    def _methods_are_a_chain(cls, values: Any) -> Any:
        """Read `methods: [...]`, which is short for a `method` of the name chain."""
        if not isinstance(values, dict) or "methods" not in values:
            return values
        if "method" in values:
            raise ValueError("methods: stands in place of `method`; give one of the two")
        rest = {key: value for key, value in values.items() if key != "methods"}
        return rest | {"method": {"name": "chain", "methods": values["methods"]}}

    @model_validator(mode="after")
    def _methods_fit(self) -> Config:
        shares, method = self.privacy.shares, self.method
        for names in method.chains if method.name == "auto" else ():
            if wrong := misplaced(names):
                raise ValueError(f"method.chains: {wrong}")
        if method.name != "chain":
            if shares is not None:
                raise ValueError("privacy.shares: is for chained `methods`")
            return self
        if wrong := misplaced([each.name for each in method.methods]):
            raise ValueError(f"methods: {wrong}")
        if shares is not None and len(shares) != len(method.methods):
            raise ValueError("privacy.shares: give one share for each of methods")
        if shares is not None and not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise ValueError("privacy.shares: shares sum to 1")
        return self

    @model_validator(mode="after")
    def _noise_where_there_must_be(self) -> Config:
        if math.isinf(self.privacy.epsilon) and self.method_names - {"aug_pe", "dp_sgd"}:
            raise ValueError("privacy.epsilon: infinity is for aug_pe and dp_sgd only")
        if (
            self.data.label_proportions == "measured"
            and self.privacy.epsilon_labels >= self.privacy.epsilon
        ):
            raise ValueError("privacy.epsilon_labels: leaves nothing of privacy.epsilon")
        return self

    @model_validator(mode="after")
    def _engine_fits(self) -> Config:
        if "private_prediction" in self.method_names and self.engine.kind == "openai":
            raise ValueError("engine.kind: private prediction needs logits: vllm or transformers")
        if "dp_sgd" in self.method_names and self.engine.kind == "openai":
            raise ValueError("engine.kind: the model is tuned here: vllm or transformers")
        if self.engine.kind == "none" and self.method_names - {"dp_kps", "auto"}:
            raise ValueError("engine.kind: none is for dp_kps only")
        if self.engine.kind != "none" and not self.engine.model:
            raise ValueError("engine.model: a folder, or a model's name")
        return self

    @model_validator(mode="after")
    def _gpus_fit(self) -> Config:
        """Check that a given number of GPUs fits the engine; 0 is the CPU, which fits any."""
        gpus, engine = self.runtime.gpus_per_actor, self.engine
        if not gpus or not engine.is_local:
            return self
        if gpus < 1 == engine.gpus:
            if engine.kind == "vllm" and engine.gpu_memory_utilization > gpus:
                raise ValueError(
                    f"runtime.gpus_per_actor: {gpus:g} of a GPU is less than vLLM takes of its "
                    f"memory, engine.gpu_memory_utilization {engine.gpu_memory_utilization:g}"
                )
            if "dp_sgd" in self.method_names and self.runtime.actors > 1:
                raise ValueError(
                    f"runtime.gpus_per_actor: {gpus:g}: the ranks of a training cannot share a GPU"
                )
        elif gpus != engine.gpus:
            wanted = "engine.tensor_parallel_size" if engine.kind == "vllm" else "transformers"
            raise ValueError(
                f"runtime.gpus_per_actor: {gpus:g} is not the number of GPUs that the engine uses, "
                f"{engine.gpus} ({wanted})"
            )
        return self


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read the configuration of a YAML file with `key.sub=value` overrides. Raises InputError with
    one line that names the key."""
    return parse_config(read_tree(path, overrides or []))


def parse_config(values: Any) -> Config:
    """Make a configuration of a plain tree. Raises InputError that names the first wrong key."""
    return parse(Config, values)

"""An engine by its name in the configuration; a backend's library is loaded only when asked for."""

from __future__ import annotations

from typing import Any

from dpray.engines.base import Engine
from dpray.engines.model_path import check_model_path
from dpray.types import InputError


def make_engine(kind: str, model: str, **options: Any) -> Engine:
    """The engine `kind` ("vllm", "transformers" or "openai") of `model`, with the options of its
    class. Raises `InputError` for bad options or a model folder that is not there, `EngineError`
    where the model cannot be loaded."""
    if kind == "openai":
        from dpray.engines.openai import OpenAIEngine

        return OpenAIEngine(model, **options)
    check_model_path(model)
    if kind == "vllm":
        from dpray.engines.vllm import VllmEngine

        return VllmEngine(model, **options)
    if kind == "transformers":
        from dpray.engines.transformers import TransformersEngine

        return TransformersEngine(model, **options)
    raise InputError(f"engine.kind: unknown engine '{kind}' (vllm, transformers, openai)")

"""A run's engine: the GPUs that its actors get, and how it is built.

Ray leaves CUDA_VISIBLE_DEVICES alone if an actor asks for no GPU, so two such actors would share
the node's first one. Here an actor sees the GPUs that it asked for and no others: 0 is the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from dpray.config.config import Config, EngineConfig
from dpray.engines.base import EndpointBusy, Engine, EngineError, LoadFailed
from dpray.engines.kept_state import refuse_kept_state
from dpray.engines.model_path import absolute_model, resolve_model
from dpray.engines.row_variation import refuse_experts, refuse_shared_scales
from dpray.extras import Late, require
from dpray.types import DprayError, InputError, ReadOnlyJson, Resumable

if TYPE_CHECKING:
    import ray

    from dpray.engines import openai, transformers
    from dpray.engines.vllm import engine as vllm
else:  # A backend's library takes seconds, and may not be installed.
    ray = Late("ray")
    openai, transformers = Late("dpray.engines.openai"), Late("dpray.engines.transformers")
    vllm = Late("dpray.engines.vllm.engine")

T = TypeVar("T")

BuildEngine = Callable[..., Engine]
"""`build_engine` or a replacement for it."""

LoadError = InputError | LoadFailed | Resumable

NODE_GROUP = "ray.io/node-group"
"""A node that an autoscaler or KubeRay started has this label, whose value names its group."""

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""A process with this environment sees no GPU."""


# Building


def with_absolute_model(config: EngineConfig) -> EngineConfig:
    """Make the model's folder absolute, for actors with another working directory."""
    return config.model_copy(update={"model": absolute_model(config.model)})


def build_engine(
    config: EngineConfig,
    *,
    public_alone: bool | None = None,
    group: tuple[int, int] = (0, 0),
    tried: bool = False,
) -> Engine:
    """Build the engine of this section. An engine that decodes groups of private rows needs
    `public_alone`: whether a public row's logits restrict the tokens (see `VllmEngine`). `group`
    has the rows of a group of usual size and the tokens of each. If the same model was `tried`
    before the charge, vLLM reads no weight a second time to see whether it is finite.

    Raises InputError for a model folder that does not exist, and for a model whose rows depend on
    each other, by what they are quantised with, by a state that it keeps or by its experts;
    EngineError if the model cannot be loaded.
    """
    if config.kind == "openai":
        # The configuration's check allows an API only for methods that just generate.
        return cast(Engine, openai.OpenAIEngine(config))
    model = resolve_model(config.model)
    require(f"engine.kind {config.kind}", "torch")
    if public_alone is not None:
        refuse_shared_scales(model)
        if config.kind == "transformers":
            refuse_kept_state(model)  # vLLM computes the angles once, when it loads
            refuse_experts(model)  # vLLM may have kernels for them
    if config.kind == "vllm":
        in_actor = ray.is_initialized() and bool(ray.get_gpu_ids())
        private = public_alone is not None
        return vllm.VllmEngine(
            config,
            private_rows=private,
            public_alone=bool(public_alone),
            group=group,
            tried=tried,
            on_ray=config.pipeline_parallel_size > 1 and in_actor,
        )
    return transformers.TransformersEngine(config, group=group)


def after_trial(build: BuildEngine) -> BuildEngine:
    """Return the function that builds a run's engines after the first one was tried."""
    return partial(build, tried=True) if build is build_engine else build


def try_to_load(load: Callable[[], T]) -> T | LoadError:
    """Return what `load` returns, or as a value the error that it raised: dpray's own with its
    message, which holds no text, any other by the name of its class.

    When an actor's constructor raises, Ray ends the actor and reports only that it was lost; and
    with what a call raises it sends a traceback, whose causes may quote a prompt.
    """
    try:
        return load()
    except InputError as error:
        return InputError(str(error))
    except Resumable as error:
        return Resumable(str(error))
    except EndpointBusy as error:
        return Resumable(f"engine: {error}; try again later")
    except (DprayError, EngineError) as error:
        return LoadFailed(str(error))
    except Exception as error:
        return LoadFailed(f"it cannot be loaded ({type(error).__name__})")


# GPUs


def living_nodes() -> list[ReadOnlyJson]:
    return [node for node in ray.nodes() if node["Alive"]]


def may_grow(nodes: Sequence[ReadOnlyJson]) -> bool:
    """Return whether an autoscaler started one of these nodes, and so may start more."""
    return any(NODE_GROUP in node["Labels"] for node in nodes)


def resolve_gpus(config: Config, nodes: Sequence[ReadOnlyJson]) -> float:
    """Return the GPUs of each actor of a run on these nodes: `runtime.gpus_per_actor`, or a choice
    if that is null. Raises InputError if null is ambiguous: the cluster may grow and has no GPU
    yet."""
    gpus, engine = config.runtime.gpus_per_actor, config.engine
    if gpus is not None:
        return gpus
    if engine.is_local and any(node["Resources"].get("GPU") for node in nodes):
        return float(engine.gpus)
    if engine.is_local and may_grow(nodes):
        raise InputError(
            "runtime.gpus_per_actor: the cluster may grow and has no GPU now; say how many an "
            "actor gets, 0 for the CPU"
        )
    return 0.0


def gpus_of_rank(gpus: float) -> float:
    """Return the GPUs of a rank in training, which uses at most one of an engine's `gpus`."""
    return min(1.0, gpus)


def has_stages(config: Config) -> bool:
    """Return whether the engine's actors are several: vLLM starts one for each GPU."""
    engine = config.engine
    several = engine.kind == "vllm" and engine.pipeline_parallel_size > 1
    return several and bool(config.runtime.gpus_per_actor)


def hide_other_gpus() -> None:
    """Hide the node's GPUs from an actor that asked for none. Call it in the actor's constructor,
    before anything in the process looks at them. Without Ray there is no actor."""
    # The question would start a Ray of its own.
    if ray.is_initialized() and not ray.get_gpu_ids():
        os.environ.update(NO_GPU)

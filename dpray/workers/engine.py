"""The engine of a configuration is built here, and tried before a run is charged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from dpray.config.config import Config, EngineConfig
from dpray.engines.base import Engine, EngineError
from dpray.engines.model_path import absolute_model, resolve_model
from dpray.extras import require
from dpray.types import DprayError, InputError, OnProgress, Progress, Resumable
from dpray.workers.placement import hide_other_gpus

T = TypeVar("T")
BuildEngine = Callable[..., Engine]
"""A `BuildEngine` is `build_engine` or a replacement for it."""


def with_absolute_model(config: EngineConfig) -> EngineConfig:
    """Make the model's folder absolute, for actors with another working directory."""
    return config.model_copy(update={"model": absolute_model(config.model)})


def build_engine(
    config: EngineConfig, *, public_alone: bool | None = None, group: tuple[int, int] = (0, 0)
) -> Engine:
    """Build the engine of this section. `public_alone` is given where the engine decodes groups of
    private rows, and says whether a public row's logits restrict the tokens (see `VllmEngine`);
    `group` has the rows of a group of usual size and the tokens of each.

    Raises InputError for a model folder that does not exist, EngineError where the model cannot be
    loaded.
    """
    # Imported late: a backend's library takes seconds, and may not be installed.
    if config.kind == "openai":
        from dpray.engines.openai import OpenAIEngine

        # The configuration's check allows an API only for methods that just generate.
        return cast(Engine, OpenAIEngine(config))
    resolve_model(config.model)
    require(f"engine.kind {config.kind}", "torch")
    if config.kind == "vllm":
        from dpray.engines.vllm import VllmEngine

        private = public_alone is not None
        return VllmEngine(
            config, private_rows=private, public_alone=bool(public_alone), group=group
        )
    from dpray.engines.transformers import TransformersEngine

    return TransformersEngine(config, group=group)


@dataclass(frozen=True)
class WorkerError:
    """A `WorkerError` carries the reason why something could not be loaded, or failed, from an
    actor, as a value: when a constructor raises, Ray ends the actor and reports only that it was
    lost, and with what a call raises it sends a traceback, whose causes may quote a prompt."""

    reason: str
    bad_input: bool

    def error(self) -> InputError | EngineError:
        return InputError(self.reason) if self.bad_input else EngineError(self.reason)


def try_to_load(load: Callable[[], T]) -> T | WorkerError:
    """Return what `load` returns, or the reason why it raised: the message of dpray's own error,
    which holds no text, and only the class of any other."""
    try:
        return load()
    except (DprayError, EngineError) as error:
        return WorkerError(str(error), isinstance(error, InputError))
    except Exception as error:
        return WorkerError(f"it cannot be loaded ({type(error).__name__})", False)


def check_loads(config: Config, load: Callable[[], T], on_progress: OnProgress) -> T | None:
    """Load a model once, where the run will use it: one that cannot be loaded should cost nothing.

    Returns the loaded model to an in-process run, which can use it. On Ray, an actor with the
    resources of the run's actors loads it and is ended, and None is returned; where that actor is
    lost, another one loads it. It waits without end for a machine with room for that actor, which
    the cluster may have to start. Raises InputError that says why it cannot be loaded, Resumable
    where actors are lost again and again.
    """
    loaded: T | WorkerError | None
    if config.runtime.uses_ray:
        loaded = _try_on_ray(config, load, on_progress)
    else:
        on_progress(Progress("loading the model"))
        loaded = try_to_load(load)
    if isinstance(loaded, WorkerError):
        reason = loaded.reason if loaded.bad_input else f"engine: {loaded.reason}"
        raise InputError(reason)
    return loaded


def _try_on_ray(
    config: Config, load: Callable[[], Any], on_progress: OnProgress
) -> WorkerError | None:
    import ray

    from dpray.workers.cluster import never_repeated, was_lost

    cpus, gpus = config.runtime.cpus_per_actor, config.runtime.gpus_per_actor or 0.0
    room = f"{cpus:g} CPU(s)" + (f", {gpus:g} GPU(s)" if gpus else "")
    for _ in range(config.runtime.max_attempts):
        on_progress(Progress("waiting for a machine", detail=room))
        probe = never_repeated(_Probe, config, gpus).remote()
        try:
            ray.get(probe.begin.remote())
            on_progress(Progress("loading the model"))
            failed: WorkerError | None = ray.get(probe.load.remote(load))
            return failed
        except ray.exceptions.RayError as error:
            last = type(error).__name__
            if not was_lost(error):
                return WorkerError(f"the actor that loaded it failed ({last})", False)
        finally:
            ray.kill(probe)
    raise Resumable(
        f"engine: actors that loaded it were lost {config.runtime.max_attempts} times ({last})"
    )


class _Probe:
    """A `_Probe` is an actor that loads what it is given, and does nothing else."""

    def __init__(self) -> None:
        hide_other_gpus()

    def begin(self) -> None:
        """Return as soon as the actor has a machine."""

    def load(self, load: Callable[[], Any]) -> WorkerError | None:
        loaded = try_to_load(load)
        return loaded if isinstance(loaded, WorkerError) else None

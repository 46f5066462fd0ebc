"""Models in Ray actors do public work: they are tried, and write a run's texts.

The prompts are public and the texts post-processing, so nothing here is a mechanism: what was lost
with an actor is done again. Ray's own retries would ask again for the texts of a call that have
arrived, as it repeats whole calls, and `ray.util.ActorPool` waits without end for an actor that has
no room; the actor that tried the model may be a mechanism's, which Ray must not restart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from dpray.config.config import Config, EngineConfig
from dpray.engines.base import (
    Completion,
    EngineError,
    LoadFailed,
    OnCompletion,
    Prompts,
    Samplings,
    TextGenerator,
)
from dpray.engines.rates import Rates, rates_of
from dpray.types import DprayError, InputError, OnProgress, Progress, Resumable, in_parts
from dpray.workers.cluster import NeverRepeated
from dpray.workers.engine import (
    LoadError,
    build_engine,
    has_stages,
    try_to_load,
    with_absolute_model,
)
from dpray.workers.failures import LostTooOften, kind_of
from dpray.workers.memory import Role
from dpray.workers.placement import run_placement
from dpray.workers.pool import ActorPool, Part, RayActors
from dpray.workers.pool_actor import Emit, Parts, PoolActor

T = TypeVar("T")

PROMPTS_AT_ONCE = 1024
"""An actor is given at most this many prompts at once: enough that vLLM, which decodes some
hundreds side by side, spends little of its time on the last few of them."""


class EngineWorker:
    """Writes the texts of one part of the numbered prompts after the other."""

    worker_id = ""

    def __init__(self, engine: TextGenerator) -> None:
        self._engine = engine

    def accept(self, items: list[Any], left: Collection[int]) -> tuple[Collection[int], list[Any]]:
        return left, [item for item in items if item[0] in left]

    def work(self, parts: Parts, emit: Emit) -> None:
        for items in parts:
            self._write(items, emit)
            parts.ask()

    def _write(self, items: list[Any], emit: Emit) -> None:
        numbers, prompts, samplings = zip(*items, strict=True)
        try:
            self._engine.generate(prompts, samplings, lambda i, done: emit(numbers[i], done))
        except (DprayError, EngineError):
            raise
        except Exception as error:  # its message may quote a text
            raise DprayError(f"an engine actor failed: {type(error).__name__}") from None


# A run's texts


def on_pool(config: Config) -> bool:
    """Return whether actors write this run's texts."""
    return config.runtime.uses_ray and config.engine.is_local


class EngineActor(PoolActor):
    """An actor with a run's engine."""

    def attempt(self, trial: Callable[[Any], None]) -> LoadError | None:
        """Do this with the loaded engine. Return the reason if it fails."""
        return self._made(partial(trial, self._engine))

    def rates(self) -> Rates | None:
        return rates_of(self._engine)


def engine_actors(
    config: Config, load: Callable[[], object], *arguments: object
) -> tuple[RayActors, int]:
    """Return the actors of a pool that `load` engines, each with `runtime.cpus_per_actor` CPUs and
    `runtime.gpus_per_actor` GPUs, and how many there may be. Waits for the place of the first one,
    which is the actor that tried the engine if the run has it still."""
    placement, most = run_placement(), config.runtime.actors
    places, kept = placement.engines(most), placement.take_kept()
    size = len(places) if has_stages(config) else most
    return RayActors(_engine_actor(config), load, *arguments, places=places, kept=kept), size


def _engine_actor(config: Config) -> NeverRepeated:
    return NeverRepeated(EngineActor, config, config.runtime.gpus_per_actor or 0.0, Role.ENGINE)


class EnginePool:
    """A `TextGenerator` whose prompts go to `runtime.actors` actors.

    The actors start with the first call and stay until `close`. The unanswered prompts of a lost
    actor are sent again, until `runtime.max_attempts` actors were lost with them. `build` makes the
    engines.
    """

    def __init__(
        self, config: Config, build: Callable[[EngineConfig], TextGenerator] = build_engine
    ) -> None:
        runtime = config.runtime
        load = partial(build, with_absolute_model(config.engine))
        # All results that are there: the actor waits for no others.
        actors, self._size = engine_actors(config, load, EngineWorker, PROMPTS_AT_ONCE, 0.0)
        attempts, wait = runtime.max_attempts, runtime.wait
        self._pool = ActorPool(actors, attempts, self._size, wait, keeps_actors=True)

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        """Generate as `TextGenerator.generate` does. Raises what building or running an actor's
        engine raised, or EngineError if actors keep being lost; in that case the other actors
        first finish the prompts they have."""
        asked = list(zip(range(len(prompts)), prompts, samplings, strict=True))
        # Every actor gets a part.
        size = max(1, min(PROMPTS_AT_ONCE, -(-len(asked) // self._size)))
        work = [Part((part,), {number for number, *_ in part}) for part in in_parts(asked, size)]
        completions: dict[int, Completion] = {}
        try:
            with closing(self._pool.run(work)) as steps:
                for number, completion in chain.from_iterable(steps):
                    completions[number] = completion
                    if on_completion is not None:
                        on_completion(number, completion)
        except (RayError, LostTooOften) as lost:
            raise EngineError(f"engine: {kind_of(lost).sentence(lost)}") from None
        return [completions[number] for number in range(len(asked))]

    def close(self) -> None:
        self._pool.close()


# A run's model, tried before the charge


def check_loads(
    config: Config,
    load: Callable[[], T],
    on_progress: OnProgress,
    trials: Sequence[tuple[str, Callable[[Any], None]]] = (),
) -> tuple[T | None, Rates | None]:
    """Load a model once, on a machine of the run, and do the `trials` with it, each of which has a
    name in the progress: a model that cannot be loaded or used should cost nothing.

    Returns the loaded model, or the tried client of an endpoint, to a process that can use it, and
    the rates that were measured with it. On Ray, an actor with the resources of the run's actors
    loads a local model, which stays there; if that actor is lost, another one loads it. The run
    keeps the actor for its first pool, unless it will be another model's by then. Raises InputError
    that says why it cannot be loaded, Resumable if it writes nothing or if actors are lost again
    and again.
    """
    if config.engine.kind == "none":
        return None, None
    if not on_pool(config):
        detail = "" if config.engine.is_local else "one call"
        on_progress(Progress("loading the model", detail=detail))
        loaded: Any = _loaded(try_to_load(load))
        try:
            for activity, trial in trials:
                on_progress(Progress(activity, detail=detail))
                _loaded(try_to_load(partial(trial, loaded)))
        except BaseException:
            loaded.close()
            raise
        return loaded, rates_of(loaded)
    runtime = config.runtime
    gpus = runtime.gpus_per_actor or 0.0
    room = f"{runtime.cpus_per_actor:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
    on_progress(Progress("loading the model", detail=f"on a machine with {room} to spare"))
    placement, actor_class = run_placement(), _engine_actor(config)

    def ask(actor: Any) -> Rates | None:
        _loaded(ray.get(actor.tried.remote()))
        for activity, trial in trials:
            on_progress(Progress(activity))
            _loaded(ray.get(actor.attempt.remote(trial)))
        rates: Rates | None = ray.get(actor.rates.remote())
        return rates

    actor, rates = tried_actor(
        config, "engine", lambda: actor_class.remote(load, place=placement.engine()), ask
    )
    (ray.kill if "dp_sgd" in config.method_names else placement.keep)(actor)
    return None, rates


def tried_actor(
    config: Config, key: str, start: Callable[[], Any], ask: Callable[[Any], T]
) -> tuple[Any, T]:
    """Return an actor that has loaded a model before the charge, and what it answers to `ask`.
    Raises what `ask` raises, and Resumable if actors are lost again and again; they end then."""
    attempts = config.runtime.max_attempts
    for attempt in range(attempts):
        actor = start()
        try:
            return actor, ask(actor)
        except BaseException as error:
            ray.kill(actor)
            if not isinstance(error, RayError):
                raise
            if attempt == attempts - 1:
                raise Resumable(
                    f"{key}: actors that loaded it were lost {attempts} times "
                    f"({type(error).__name__})"
                ) from None
    raise AssertionError("runtime.max_attempts is at least 1")


def _loaded(found: T | LoadError) -> T:
    """Return what was loaded. Raises InputError for an error, and Resumable as it is."""
    if isinstance(found, LoadFailed):
        raise InputError(f"engine: {found}")
    if isinstance(found, InputError | Resumable):
        raise found
    return found

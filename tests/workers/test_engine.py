"""A run's engine: the GPUs that its actors get, and what an actor answers that cannot load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from dpray.config.config import Config
from dpray.engines.base import EngineError, LoadFailed
from dpray.methods.config import parse_config
from dpray.methods.dp_sgd.training.ranks import scaling
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.methods.registry import make_plan
from dpray.runs.plan import Plan
from dpray.types import InputError
from dpray.workers.engine import NODE_GROUP, gpus_of_rank, resolve_gpus
from dpray.workers.engine_pool import check_loads
from dpray.workers.gathering import PartWorker
from dpray.workers.needs import needs
from dpray.workers.placement import check_room
from dpray.workers.pool_actor import PoolActor
from dpray.workers.shards import ShardActor

DP_SGD = {"name": "dp_sgd", "batch_size": 20}
AUG_PE = {"name": "aug_pe"}
OPENAI = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
Nodes = list[dict[str, Any]]


def nodes(*gpus: float) -> Nodes:
    resources = ({"CPU": 64.0, "GPU": each, "memory": 2.0**42} for each in gpus)
    return [{"Resources": each, "Labels": {}} for each in resources]


NONE, ONE, TWO_NODES = nodes(0.0), nodes(0.0, 1.0), nodes(0.0, 2.0, 2.0)
GROWS = [each | {"Labels": {NODE_GROUP: "workers"}} for each in NONE]


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        return parse_config(settings(**({"runtime__ray_address": None} | changes)))

    return make


def given_room(config: Callable[..., Config], changes: dict[str, Any], cluster: Nodes) -> float:
    """Return the GPUs of an actor, as a run chooses them before it takes its place."""
    gpus = resolve_gpus(config(**changes), cluster)
    check_room(needs(config(**changes | {"runtime__gpus_per_actor": gpus})), cluster)
    return gpus


@pytest.mark.parametrize(
    ("changes", "cluster", "gpus"),
    [
        ({}, NONE, 0.0),
        ({}, ONE, 1.0),
        ({"engine__kind": "vllm", "engine__tensor_parallel_size": 2}, TWO_NODES, 2.0),
        ({"engine__kind": "vllm", "engine__tensor_parallel_size": 2}, NONE, 0.0),
        ({"engine__kind": "vllm", "engine__pipeline_parallel_size": 4}, TWO_NODES, 4.0),
        # It loads the whole model onto one GPU, whatever it is told.
        ({"engine__tensor_parallel_size": 2}, TWO_NODES, 1.0),
        ({"method": AUG_PE, "engine": OPENAI}, TWO_NODES, 0.0),
        ({"method": AUG_PE, "engine": OPENAI, "runtime__gpus_per_actor": 0.5}, ONE, 0.5),
        ({"runtime__gpus_per_actor": 0}, TWO_NODES, 0.0),
        ({"runtime__gpus_per_actor": 0}, GROWS, 0.0),
        ({"runtime__gpus_per_actor": 1}, GROWS, 1.0),
        ({"runtime__actors": 9}, TWO_NODES, 1.0),  # the pool has as many as fit
        # As many voters as fit count the votes.
        (
            {"method": AUG_PE, "engine": OPENAI, "runtime__gpus_per_actor": 0.4}
            | {"runtime__actors": 3},
            ONE,
            0.4,
        ),
        ({"method": DP_SGD, "runtime__actors": 4}, TWO_NODES, 1.0),
        ({"method": DP_SGD, "runtime__actors": 5, "runtime__min_ranks": 4}, TWO_NODES, 1.0),
    ],
)
def test_gpus_are_chosen(
    config: Callable[..., Config], changes: dict[str, Any], cluster: Nodes, gpus: float
) -> None:
    assert given_room(config, changes, cluster) == gpus


@pytest.mark.parametrize(
    ("changes", "cluster", "why"),
    [
        ({}, GROWS, "the cluster may grow and has no GPU now"),
        ({"runtime__gpus_per_actor": 1}, NONE, "1 actor, .*1 GPU"),
        (
            {"engine__kind": "vllm", "engine__tensor_parallel_size": 4},
            TWO_NODES,
            "1 actor, .*4 GPUs",
        ),
        (
            {"engine__kind": "vllm", "engine__tensor_parallel_size": 4}
            | {"engine__pipeline_parallel_size": 2},
            TWO_NODES,
            "8 actors, .*1 GPU",
        ),
        ({"method": DP_SGD, "runtime__actors": 5}, TWO_NODES, "5 actors, .*1 GPU"),
        (
            {"method": AUG_PE, "engine": OPENAI, "runtime__gpus_per_actor": 1},
            NONE,
            "1 actor, .*1 GPU",
        ),
    ],
)
def test_what_has_no_room_is_refused(
    config: Callable[..., Config], changes: dict[str, Any], cluster: Nodes, why: str
) -> None:
    with pytest.raises(InputError, match=rf"^runtime\.gpus_per_actor: .*{why}"):
        given_room(config, changes, cluster)


@pytest.mark.parametrize(("cpus", "has_room"), [(3.0, False), (4.0, True)])
def test_the_ranks_in_the_place_of_an_engine_have_room_too(
    config: Callable[..., Config], cpus: float, has_room: bool
) -> None:
    """An engine of four GPUs has the CPUs of one actor; the four ranks before it have those of
    four. Found out after the charge, the training would never begin."""
    changes = {"method": DP_SGD, "runtime__actors": 4, "engine__kind": "vllm"}
    cluster = [each | {"Resources": each["Resources"] | {"CPU": cpus}} for each in nodes(4.0)]
    changes |= {"engine__tensor_parallel_size": 4}
    if has_room:
        assert given_room(config, changes, cluster) == 4.0
    else:
        with pytest.raises(InputError, match=r"^runtime\.actors: .* its training 4 actors, 1 CPU"):
            given_room(config, changes, cluster)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"runtime__gpus_per_actor": 1.5}, "whole number"),
        ({"runtime__gpus_per_actor": -1}, "greater than or equal to 0"),
        ({"runtime__gpus_per_actor": 2}, "not the number of GPUs that the engine uses, 1"),
        (
            {"engine__kind": "vllm", "engine__tensor_parallel_size": 2}
            | {"runtime__gpus_per_actor": 1},
            "1 is not the number .* 2",
        ),
        (
            {"engine__kind": "vllm", "engine__tensor_parallel_size": 2}
            | {"runtime__gpus_per_actor": 0.5},
            "0.5 is not the number .* 2",
        ),
        ({"engine__kind": "vllm", "runtime__gpus_per_actor": 0.5}, "gpu_memory_utilization 0.9"),
        (
            {"method": DP_SGD, "runtime__actors": 2, "runtime__gpus_per_actor": 0.5},
            "cannot share a GPU",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_the_configuration(
    config: Callable[..., Config], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=rf"runtime\.gpus_per_actor: .*{why}"):
        config(**changes)


def test_a_rank_uses_one_gpu() -> None:
    assert [gpus_of_rank(gpus) for gpus in (0.0, 0.5, 1.0, 4.0)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("gpus", "asked"), [(0.0, {"CPU": 4.0}), (1.0, {"CPU": 4.0, "GPU": 1.0})])
def test_ranks_are_on_gpus_where_they_have_some(gpus: float, asked: dict[str, float]) -> None:
    made = scaling(2, gpus, 4.0, 0.0)
    assert (made.num_workers, made.use_gpu, made.resources_per_worker) == (2, gpus > 0, asked)


# Loading

CASES = [
    (InputError("engine.model: no such folder"), "engine.model: no such folder", InputError),
    (EngineError("vLLM cannot load m: no GPU"), "vLLM cannot load m: no GPU", LoadFailed),
    (OSError("Marlowe's disk"), "it cannot be loaded (OSError)", LoadFailed),
]


def here(config: Callable[..., Config]) -> Config:
    return config(runtime__ray_address="none")


def raising(error: Exception) -> Callable[..., Any]:
    def load(*_: Any, **__: Any) -> Any:
        raise error

    return load


@pytest.mark.parametrize(("error", "reason", "kind"), CASES)
def test_a_shard_that_cannot_be_made_is_answered_for_every_call(
    config: Callable[..., Config], error: Exception, reason: str, kind: type[Exception]
) -> None:
    actor = ShardActor(config(), raising(error))
    for answer in (actor.load(pa.table({"text": ["x"]})), actor.call(len)):
        assert type(answer) is kind and str(answer) == reason


@pytest.mark.parametrize(("error", "reason", "kind"), CASES)
def test_a_decoding_actor_without_an_engine_answers_with_the_reason_and_begins_nothing(
    config: Callable[..., Config], error: Exception, reason: str, kind: type[Exception]
) -> None:
    plan = replace(make_plan(here(config)), salt="0" * 32)
    ledger: Any = None  # whose absence would show
    decoder = partial(BatchDecoder, plan, ledger, "run", "attempt", "")
    error_of_load = PoolActor(raising(error)).load(partial(PartWorker, decoder, 8), 8).error
    assert type(error_of_load) is kind and str(error_of_load) == reason


def tried(plan: Plan, build: Callable[..., Any]) -> Any:
    return check_loads(plan.config, plan.loader(build), lambda progress: None)[0]


@pytest.mark.parametrize(("error", "reason", "kind"), CASES)
def test_an_engine_is_tried_before_the_charge_where_one_is_loaded(
    config: Callable[..., Config], error: Exception, reason: str, kind: type[Exception]
) -> None:
    with pytest.raises(InputError) as refused:
        tried(make_plan(here(config)), raising(error))
    asked = reason if kind is InputError else f"engine: {reason}"
    assert str(refused.value) == asked


def test_no_engine_is_tried_where_the_run_loads_none(config: Callable[..., Config]) -> None:
    ours = here(config)
    engine = ours.engine.model_copy(update={"kind": "none"})
    plan = replace(make_plan(ours), config=ours.model_copy(update={"engine": engine}))
    assert tried(plan, raising(AssertionError("never called"))) is None


def test_an_actor_whose_engine_ends_the_process_does_not_wait_for_it() -> None:
    with pytest.raises(SystemExit):
        PoolActor(raising(SystemExit(1)))  # type: ignore[arg-type]


def test_code_that_exits_loses_no_actor_and_its_words_are_kept_from_rays_logs() -> None:
    class Exits:
        worker_id = "exits"

        def accept(self, *piece: Any) -> tuple[list[str], Any]:
            return ["0/0"], piece

        def work(self, pieces: Any, emit: Any) -> None:
            for _ in pieces:
                raise SystemExit("Marlowe")

    actor = PoolActor(lambda: None)
    actor.load(lambda engine: Exits(), most=1)
    actor.take("a piece", None)
    with pytest.raises(RuntimeError, match=r"^SystemExit$"):
        actor.more()

"""The choice of an actor's GPUs, and its refusals, tested without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpray.config.config import Config, parse_config
from dpray.training.ray_train import scaling
from dpray.types import InputError
from dpray.workers.engine import (
    Gpus,
    describe_placement,
    gpus_of_rank,
    placement,
    resolve_gpus,
)

DP_SGD = {"name": "dp_sgd", "batch_size": 20}
AUG_PE = {"name": "aug_pe"}
OPENAI = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
NONE, ONE, TWO_NODES = Gpus([0.0], False), Gpus([0.0, 1.0], False), Gpus([0.0, 2.0, 2.0], False)
GROWS = Gpus([0.0], True)


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        return parse_config(settings(**({"runtime__ray_address": None} | changes)))

    return make


@pytest.mark.parametrize(
    ("changes", "cluster", "gpus"),
    [
        ({}, NONE, 0.0),
        ({}, ONE, 1.0),
        ({"engine__kind": "vllm", "engine__tensor_parallel_size": 2}, TWO_NODES, 2.0),
        ({"engine__kind": "vllm", "engine__tensor_parallel_size": 2}, NONE, 0.0),
        # It loads the whole model onto one GPU, whatever it is told.
        ({"engine__tensor_parallel_size": 2}, TWO_NODES, 1.0),
        ({"method": AUG_PE, "engine": OPENAI}, TWO_NODES, 0.0),
        ({"method": AUG_PE, "engine": OPENAI, "runtime__gpus_per_actor": 0.5}, ONE, 0.5),
        ({"runtime__gpus_per_actor": 0}, TWO_NODES, 0.0),
        ({"runtime__gpus_per_actor": 0}, GROWS, 0.0),
        ({"runtime__gpus_per_actor": 1}, GROWS, 1.0),
        ({"runtime__min_actors": 4, "runtime__actors": 4}, TWO_NODES, 1.0),
        ({"runtime__actors": 9}, TWO_NODES, 1.0),  # the pool has as many as fit
        ({"method": DP_SGD, "runtime__actors": 4}, TWO_NODES, 1.0),
    ],
)
def test_gpus_are_chosen(
    config: Callable[..., Config], changes: dict[str, Any], cluster: Gpus, gpus: float
) -> None:
    assert resolve_gpus(config(**changes), cluster) == gpus


@pytest.mark.parametrize(
    ("changes", "cluster", "why"),
    [
        ({}, GROWS, "the cluster may grow and has no GPU now"),
        ({"runtime__gpus_per_actor": 1}, NONE, "1 actor.* of 1 GPU.* room for 0"),
        (
            {"engine__kind": "vllm", "engine__tensor_parallel_size": 4},
            TWO_NODES,
            "1 actor.* of 4 GPU.* room for 0",
        ),
        ({"runtime__min_actors": 5}, TWO_NODES, "5 actor.* of 1 GPU.* room for 4"),
        ({"method": DP_SGD, "runtime__actors": 5}, TWO_NODES, "5 actor.* room for 4"),
        (
            {"method": AUG_PE, "engine": OPENAI, "runtime__gpus_per_actor": 0.4}
            | {"runtime__actors": 3},
            ONE,
            "3 actor.* of 0.4 GPU.* room for 2",
        ),
    ],
)
def test_what_has_no_room_is_refused(
    config: Callable[..., Config], changes: dict[str, Any], cluster: Gpus, why: str
) -> None:
    with pytest.raises(InputError, match=rf"^runtime\.gpus_per_actor: .*{why}"):
        resolve_gpus(config(**changes), cluster)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"engine__kind": "vllm", "engine__tensor_parallel_size": 2, "runtime__gpus_per_actor": 2},
        {"engine__kind": "vllm", "engine__tensor_parallel_size": 2, "runtime__gpus_per_actor": 0},
        {"runtime__gpus_per_actor": 0.5},
        {
            "engine__kind": "vllm",
            "engine__gpu_memory_utilization": 0.45,
            "runtime__gpus_per_actor": 0.5,
        },
    ],
)
def test_what_fits_is_taken(config: Callable[..., Config], changes: dict[str, Any]) -> None:
    assert config(**changes).runtime.gpus_per_actor == changes["runtime__gpus_per_actor"]


def test_a_rank_uses_one_gpu() -> None:
    assert [gpus_of_rank(gpus) for gpus in (0.0, 0.5, 1.0, 4.0)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("gpus", "asked"), [(0.0, {"CPU": 4.0}), (1.0, {"CPU": 4.0, "GPU": 1.0})])
def test_ranks_are_on_gpus_where_they_have_some(gpus: float, asked: dict[str, float]) -> None:
    made = scaling(2, gpus, 4.0)
    assert (made.num_workers, made.use_gpu, made.resources_per_worker) == (2, gpus > 0, asked)


@pytest.mark.parametrize(
    ("changes", "found", "words"),
    [
        ({"runtime__ray_address": "none"}, {"where": "process"}, "in this process"),
        (
            {"method": AUG_PE, "engine": OPENAI},
            {"where": "endpoint"},
            "at http://127.0.0.1:1/v1",
        ),
        (
            {"runtime__actors": 3},
            {"where": "actors", "actors": 3, "gpus_per_actor": None},
            "up to 3 actor(s) of Ray, 1 GPU(s) each if the cluster has GPUs, else on CPUs",
        ),
        (
            {"runtime__gpus_per_actor": 1},
            {"where": "actors", "actors": 1, "gpus_per_actor": 1.0},
            "up to 1 actor(s) of Ray, 1 GPU(s) each",
        ),
        (
            {"runtime__gpus_per_actor": 0},
            {"where": "actors", "actors": 1, "gpus_per_actor": 0.0},
            "up to 1 actor(s) of Ray, on CPUs",
        ),
    ],
)
def test_a_plan_says_where_the_model_will_run(
    config: Callable[..., Config], changes: dict[str, Any], found: dict[str, Any], words: str
) -> None:
    assert placement(config(**changes)) == found
    assert describe_placement(config(**changes)) == words

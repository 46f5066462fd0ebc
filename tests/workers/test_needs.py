"""The least that a run needs on a cluster, in numbers and in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpray.config.config import Config
from dpray.methods.config import parse_config
from dpray.workers.needs import actors_in_words, fits, missing, most_actors, needs

OPENAI = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
AUG_PE = {"name": "aug_pe"}
DP_SGD = {"name": "dp_sgd", "batch_size": 20}
VLLM = {"engine__kind": "vllm", "engine__tensor_parallel_size": 4}
STAGES = VLLM | {"engine__pipeline_parallel_size": 2}


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    ours = {
        "runtime__ray_address": None, "runtime__actors": 8, "runtime__memory_per_actor": 0,
    }  # fmt: skip
    return lambda **changes: parse_config(settings(**(ours | changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "1 actor, 1 CPU"),
        ({"runtime__cpus_per_actor": 4, "runtime__gpus_per_actor": 1}, "1 actor, 4 CPUs and 1 GPU"),
        ({"runtime__cpus_per_actor": 0}, ""),
        ({"runtime__memory_per_actor": 1.5}, "1 actor, 1 CPU and 1.5 GiB"),
        (
            {"method": DP_SGD, "runtime__memory_per_actor": 16, "runtime__gpus_per_actor": 1},
            "8 actors, 1 CPU and 1 GPU and 16 GiB each",
        ),
        ({"method": AUG_PE}, "2 actors, 0.5 CPU each"),
        ({"runtime__memory_per_actor": None}, "1 actor, 1 CPU and 0.875 GiB"),
        (
            {
                "method": AUG_PE,
                "runtime__memory_per_actor": None,
                "embedder": {"model": "a/hub"},
            },
            "2 actors: 1 of 0.5 CPU and 0.875 GiB, 1 of 0.5 CPU and 0.75 GiB",
        ),
        (
            {"method": AUG_PE, "runtime__gpus_per_actor": 1},
            "2 actors: 1 of 0.5 CPU and 1 GPU, 1 of 0.5 CPU",
        ),
        ({"method": AUG_PE, "engine": OPENAI}, "1 actor, 1 CPU"),
        (
            {"method": AUG_PE, "engine": OPENAI, "runtime__gpus_per_actor": 1},
            "1 actor, 1 CPU and 1 GPU",
        ),
        ({"method": DP_SGD}, "8 actors, 1 CPU each"),
        ({"method": DP_SGD, "runtime__gpus_per_actor": 1}, "8 actors, 1 CPU and 1 GPU each"),
        # An engine of four GPUs comes after the ranks, in the room of four of them.
        (
            {"method": DP_SGD, "runtime__gpus_per_actor": 4} | VLLM,
            "5 actors: 1 of 1 CPU and 4 GPUs, 4 of 1 CPU and 1 GPU",
        ),
        (
            {"method": DP_SGD, "runtime__gpus_per_actor": 4, "runtime__actors": 2} | VLLM,
            "1 actor, 1 CPU and 4 GPUs",
        ),
        ({"method": DP_SGD, "runtime__min_ranks": 3}, "3 actors, 1 CPU each"),
        ({"method": DP_SGD, "runtime__min_ranks": 9}, "8 actors, 1 CPU each"),
        # An engine of two stages has a bundle for each GPU.
        ({"runtime__gpus_per_actor": 8} | STAGES, "8 actors, 1 CPU and 1 GPU each"),
        (
            {"method": AUG_PE, "runtime__gpus_per_actor": 8} | STAGES,
            "9 actors: 8 of 0.5 CPU and 1 GPU, 1 of 0.5 CPU",
        ),
        (
            {"method": DP_SGD, "runtime__gpus_per_actor": 8, "runtime__actors": 10} | STAGES,
            "10 actors, 1 CPU and 1 GPU each",
        ),
        ({"runtime__gpus_per_actor": 0} | STAGES, "1 actor, 1 CPU"),
    ],
)
def test_what_a_run_needs_does_not_grow_with_actors_that_it_can_do_without(
    config: Callable[..., Config], changes: dict[str, Any], words: str
) -> None:
    assert str(needs(config(**changes))) == words


def test_voters_and_engines_are_actors_of_a_run(config: Callable[..., Config]) -> None:
    assert most_actors(config(method=AUG_PE)) == 16
    assert most_actors(config(method=AUG_PE, engine=OPENAI)) == 8
    assert most_actors(config(method=DP_SGD)) == most_actors(config()) == 8
    assert most_actors(config(runtime__cpus_per_actor=0)) == 8


def test_a_chain_needs_what_the_more_demanding_method_needs(
    settings: Callable[..., dict[str, Any]],
) -> None:
    tree = settings(runtime__ray_address=None, runtime__memory_per_actor=0)
    tree["methods"] = [{"name": "topics", "public": "public.jsonl"}, AUG_PE]
    del tree["method"]
    assert str(needs(parse_config(tree))) == "2 actors, 0.5 CPU each"


NODES = [{"CPU": 2.0, "memory": 8.0}, {"CPU": 2.0, "GPU": 1.0, "memory": 8.0}]


@pytest.mark.parametrize(
    ("bundles", "has_room"),
    [
        ([{"CPU": 2.0}] * 2, True),
        ([{"CPU": 2.0}] * 3, False),
        ([{"CPU": 4.0}], False),  # none has CPUs of two machines
        ([{"CPU": 0.1}] * 40, True),
        ([{"CPU": 0.1, "memory": 3.0}] * 4, True),
        ([{"CPU": 0.1, "memory": 3.0}] * 5, False),
        ([{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}], True),
        ([{"CPU": 1.0, "GPU": 1.0}] * 2, False),
        ([{"CPU": 1.0, "GPU": 0.5}] * 2, True),
        ([{"GPU": 0.4}] * 2, True),
        ([{"GPU": 0.4}] * 3, False),
        ([{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.5}, {"CPU": 1.0}], False),
    ],
)
def test_only_what_no_machines_of_this_kind_can_hold_does_not_fit(
    bundles: list[dict[str, float]], has_room: bool
) -> None:
    assert fits(bundles, NODES) is has_room


def test_what_a_run_waits_for_is_counted() -> None:
    bundles = [{"CPU": 0.5}] * 8
    assert missing(bundles, {"CPU": 2.5}) == 3
    assert missing(bundles, {}) == 8
    assert missing(bundles, {"CPU": 64.0}) == 1, "what is free is on several machines"
    assert actors_in_words(bundles) == "8 actors, 0.5 CPU each"

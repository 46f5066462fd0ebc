"""Engines of several stages on two machines that believe to have four GPUs each.

No model runs. An engine's actor asks Ray for the actors of vLLM by vLLM's own functions for a group
that it is placed in, as `vllm/v1/executor/ray_executor_v2.py` of vLLM 0.32 does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from dpray.config.config import Config
from dpray.config.sections import EngineConfig
from dpray.engines.base import Completion, OnCompletion, PlainPrompt, Prompts, Sampling, Samplings
from dpray.methods.config import parse_config
from dpray.types import InputError, Resumable
from dpray.workers.engine import living_nodes, resolve_gpus
from dpray.workers.engine_pool import EnginePool
from dpray.workers.placement import placed, run_placement
from tests.integration.processes import Cluster, ray_cluster, ray_node, short

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("driver")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options: dict[str, object] = {"num-cpus": 4, "num-gpus": 4}
    with (
        short() as folder,
        ray_cluster(folder, cpus=4, gpus=4) as cluster,
        ray_node(folder / "second.out", options | {"address": cluster.address}),
    ):
        yield cluster


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    def make(tensor: int, pipeline: int, actors: int = 1, wait: float = 600.0) -> Config:
        runtime = {"runtime__ray_address": None, "runtime__cpus_per_actor": 0.25}
        tree = settings(**runtime, runtime__actors=actors, runtime__wait=wait)
        tree["engine"] |= {"kind": "vllm", "tensor_parallel_size": tensor}
        tree["engine"] |= {"pipeline_parallel_size": pipeline}
        unresolved = parse_config(tree)
        tree["runtime"]["gpus_per_actor"] = resolve_gpus(unresolved, living_nodes())
        return parse_config(tree)

    return make


class Stages:
    """An engine that answers with where its actor and those of vLLM are, and their GPUs."""

    def __init__(self, section: EngineConfig) -> None:
        import ray
        import vllm.v1.executor.ray_utils as ray_utils
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        from vllm.platforms import current_platform

        def where() -> tuple[str, list[str], str]:
            """It travels as a value: eight workers would import this file otherwise."""
            level = os.environ["VLLM_LOGGING_LEVEL"]
            gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
            return ray.get_runtime_context().get_node_id(), gpus, level

        type(current_platform).ray_device_key = "GPU"
        parallel: Any = SimpleNamespace(
            world_size=section.gpus,
            tensor_parallel_size=section.tensor_parallel_size,
            placement_group=ray.util.get_current_placement_group(),
        )
        ray_utils.initialize_ray_cluster(parallel, require_gpu_on_driver=False)
        group = parallel.placement_group
        share = float(os.environ["VLLM_RAY_PER_WORKER_GPUS"])
        ranks = []
        for bundle, *_ in ray_utils.get_bundles_sorted_by_node(group)[: section.gpus]:
            place = PlacementGroupSchedulingStrategy(group, bundle)
            options: Any = {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": place}
            ranks.append(ray.remote(where).options(**options).remote())
        self.answer = json.dumps([where(), ray.get(ranks)])

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        completions = [Completion(self.answer, 0, 1) for _ in prompts]
        for number, completion in enumerate(completions):
            if on_completion is not None:
                on_completion(number, completion)
        return completions

    def close(self) -> None: ...


def engines_of(config: Config, prompts: int) -> list[Any]:
    """Return the different answers to so many prompts."""
    asked = [PlainPrompt("")] * prompts, [Sampling(1)] * prompts
    with (
        placed(config, lambda progress: None, is_new=True),
        closing(EnginePool(config, Stages)) as pool,
    ):
        found = pool.generate(*asked)
    return [json.loads(text) for text in dict.fromkeys(each.text for each in found)]


def test_one_engine_has_two_machines(config: Callable[..., Config]) -> None:
    """The second one that it may have has no room, and nothing waits for it."""
    [(actor, ranks)] = engines_of(config(4, 2, actors=2), 4)
    nodes = [node for node, *_ in ranks]
    assert nodes[0] == actor[0], "the actor and the first stage share shared memory"
    assert nodes == [nodes[0]] * 4 + [nodes[4]] * 4 and nodes[0] != nodes[4]
    assert len({(node, *gpus) for node, gpus, _ in ranks}) == 8
    assert all(len(gpus) == 1 for _, gpus, _ in ranks)
    assert len(actor[1]) == 1, "it sees the GPU that it shares with a rank of its own"
    assert {level for *_, level in [actor, *ranks]} == {"CRITICAL"}, "no log has a prompt"


def test_two_engines_have_a_machine_each(config: Callable[..., Config]) -> None:
    run = config(2, 2, actors=2)
    with placed(run, lambda progress: None, is_new=True):
        assert len(run_placement().engines(2)) == 2
        assert len(run_placement().engines(3)) == 2, "the places of the last pool were given back"


def test_a_stage_on_two_machines_is_not_taken(config: Callable[..., Config]) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def somebody(node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy=there)(Idle).remote()

    # Three and three GPUs are free.
    first, second = (somebody(node["NodeID"]) for node in living_nodes())
    ray.get([each.is_there.remote() for each in (first, second)])
    small = config(3, 2, wait=3.0)
    with placed(small, lambda progress: None, is_new=True):
        assert len(run_placement().engines(1)) == 1
    split = config(2, 3, wait=3.0)
    with (
        pytest.raises(Resumable, match="waits for 1 of 6 actors, "),
        placed(split, lambda progress: None, is_new=True),
    ):
        pass
    ray.kill(first)
    with placed(config(2, 3), lambda progress: None, is_new=True):
        assert len(run_placement().engines(1)) == 1
    ray.kill(second)


class Idle:
    def is_there(self) -> bool:
        return True


def test_a_stage_that_no_machine_can_hold_is_refused(config: Callable[..., Config]) -> None:
    with (
        pytest.raises(InputError, match=r"gpus_per_actor: the run needs .* no room"),
        placed(config(5, 2), lambda progress: None, is_new=True),
    ):
        pass

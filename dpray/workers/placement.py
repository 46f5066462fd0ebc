"""The GPUs of a run's actors are chosen and checked here, before anything is charged.

Ray leaves CUDA_VISIBLE_DEVICES alone where an actor asks for no GPU, so two such actors would share
the node's first one. Here an actor sees the GPUs that it asked for and no others: 0 is the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpray.config.config import Config
from dpray.types import InputError

NODE_GROUP = "ray.io/node-group"
"""A node that an autoscaler or KubeRay started has this label, whose value names its group."""

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""A process with this environment sees no GPU."""


@dataclass(frozen=True)
class Gpus:
    """`Gpus` are those of a cluster's living nodes. A cluster that `may_grow` can have more of them
    later: node groups without a running node are invisible."""

    of_nodes: Sequence[float]
    may_grow: bool

    def room(self, gpus: float) -> int:
        """Count the actors with this many GPUs each that fit. Several may share a GPU, and none has
        GPUs of two nodes."""
        if gpus < 1:
            return sum(int(node) * math.floor(1 / gpus + 1e-9) for node in self.of_nodes)
        return sum(int(node // gpus) for node in self.of_nodes)


def gpus_of_cluster() -> Gpus:
    """Return the GPUs of the cluster that this process is connected to."""
    import ray

    nodes: list[Mapping[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return Gpus(
        [node["Resources"].get("GPU", 0.0) for node in nodes],
        any(NODE_GROUP in node["Labels"] for node in nodes),
    )


def resolve_gpus(config: Config, cluster: Gpus) -> float:
    """Return the GPUs of each actor of a run on Ray: `runtime.gpus_per_actor`, or a choice where
    that is null.

    Raises InputError where a cluster that cannot grow has no room for the run's actors, and where
    null is ambiguous: the cluster may grow and has no GPU yet.
    """
    gpus, engine = config.runtime.gpus_per_actor, config.engine
    if gpus is None:
        if not engine.is_local:
            return 0.0
        if any(cluster.of_nodes):
            gpus = float(engine.gpus)
        elif cluster.may_grow:
            raise InputError(
                "runtime.gpus_per_actor: the cluster may grow and has no GPU now; say how many an "
                "actor gets, 0 for the CPU"
            )
    if not gpus:
        return 0.0
    for actors, each in _needed(config, gpus):
        if not cluster.may_grow and cluster.room(each) < actors:
            raise InputError(
                f"runtime.gpus_per_actor: the run needs {actors} actor(s) of {each:g} GPU(s) at a "
                f"time, and the cluster has room for {cluster.room(each)}"
            )
    return gpus


def gpus_of_rank(gpus: float) -> float:
    """Return the GPUs of a rank in training, which uses one at most where an engine has `gpus`."""
    return min(1.0, gpus)


def _needed(config: Config, gpus: float) -> list[tuple[int, float]]:
    """List how many actors the run cannot do without, and the GPUs of each."""
    runtime = config.runtime
    if "private_prediction" in config.method_names:
        return [(runtime.min_actors, gpus)]
    if "dp_sgd" in config.method_names:
        return [(runtime.actors, gpus_of_rank(gpus)), (1, gpus)]
    if config.engine.is_local:
        return [(1, gpus)]
    return [(runtime.actors, gpus)] if "aug_pe" in config.method_names else []


def hide_other_gpus() -> None:
    """Hide the node's GPUs from an actor that asked for none. Call it in the actor's constructor,
    before anything in the process looks at them. Where Ray does not run, there is no actor."""
    import ray

    # The question would start a Ray of its own.
    if ray.is_initialized() and not ray.get_gpu_ids():
        os.environ.update(HIDDEN)


def placement(config: Config) -> dict[str, Any]:
    """Say where the model will run, as far as that is known without a cluster: `where` is
    "nowhere", "endpoint", "process" or "actors"; a null `gpus_per_actor` is resolved when the run
    begins."""
    where = "actors" if config.runtime.uses_ray else "process"
    if not config.engine.is_local:
        where = "nowhere" if config.engine.kind == "none" else "endpoint"
    if where != "actors":
        return {"where": where}
    runtime = config.runtime
    return {
        "where": where,
        "actors": max(runtime.actors, runtime.min_actors),
        "gpus_per_actor": runtime.gpus_per_actor,
    }


def in_words(config: Config) -> str:
    """Say `placement` in words."""
    found = placement(config)
    if found["where"] != "actors":
        return {
            "nowhere": "no model",
            "endpoint": f"at {config.engine.base_url or 'its endpoint'}",
            "process": "in this process",
        }[found["where"]]
    gpus = found["gpus_per_actor"]
    each = f"{gpus:g} GPU(s) each" if gpus else "on CPUs"
    if gpus is None:
        each = f"{config.engine.gpus} GPU(s) each where the cluster has GPUs, on CPUs where not"
    return f"up to {found['actors']} actor(s) of Ray, {each}"

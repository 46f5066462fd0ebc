"""A run's place on a Ray cluster: one placement group with a bundle for each actor that the run
cannot do without. Ray places all bundles or none, before the charge and again when they were given
back, so no run holds what another one waits for.

All else is taken where it is free and never waited for: further engines, further shards. The tasks
that read records are placed by Ray Data, in no group: a run whose group leaves them no CPU gives
the group back while it reads. So a run that waits for CPUs holds none that a task needs, and of
runs that share a cluster one can always go on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from dpray.config.config import Config
from dpray.config.sections import RuntimeConfig
from dpray.extras import Late
from dpray.types import InputError, OnProgress, Progress, Resumable
from dpray.workers.engine import gpus_of_rank, may_grow

if TYPE_CHECKING:
    import ray
    from ray.util import placement_group, scheduling_strategies
    from ray.util.placement_group import PlacementGroup
else:
    ray = Late("ray")
    placement_group = Late("ray.util.placement_group")
    scheduling_strategies = Late("ray.util.scheduling_strategies")

Bundle = dict[str, float]
"""The resources of an actor, as Ray names them; memory is in bytes."""

GIB = 2.0**30

SETTLED = 5.0
"""Seconds after which a cluster that cannot grow has placed what it has room for."""

MACHINE_COMES = 300.0
"""Seconds after the last machine in which a cluster that grows has started the next one."""


@dataclass(frozen=True)
class Needs:
    """The least that a run needs at a time, in public numbers: the `actors`, of which the first one
    has the engine and the last one a shard, and the further `ranks` of a training."""

    actors: tuple[Bundle, ...]
    ranks: tuple[Bundle, ...] = ()

    def __str__(self) -> str:
        return in_words([*self.actors, *self.ranks]) if self.actors else ""


def needs(config: Config) -> Needs:
    """Return what a run on Ray needs at a time. The methods of a chain, which run one after the
    other, share its actors."""
    runtime, names = config.runtime, config.method_names
    cpus, gpus = runtime.cpus_per_actor, runtime.gpus_per_actor or 0.0
    memory = memory_of(runtime)
    if "aug_pe" in names and config.engine.is_local:
        # Both are there all the time, and take turns.
        return Needs(_bundles(memory, (cpus / 2, gpus), (cpus / 2, 0.0)))
    if "dp_sgd" in names:
        # A rank has one GPU. The engine, which comes later, may have those of several ranks.
        others = runtime.actors - max(1, int(gpus))
        ranks = _bundles(memory, (cpus, gpus_of_rank(gpus))) * others
        return Needs(_bundles(memory, (cpus, gpus)), ranks)
    uses_gpus = config.engine.is_local or "aug_pe" in names
    return Needs(_bundles(memory, (cpus, gpus if uses_gpus else 0.0)))


def memory_of(runtime: RuntimeConfig) -> float:
    """Return the bytes of memory of an actor."""
    return runtime.memory_per_actor * GIB


def _bundles(memory: float, *sizes: tuple[float, float]) -> tuple[Bundle, ...]:
    """Return the bundles of so many CPUs and GPUs each, and of so much memory. One of nothing needs
    no place."""
    named = ({"CPU": cpus, "GPU": gpus, "memory": memory} for cpus, gpus in sizes)
    found = ({name: amount for name, amount in each.items() if amount} for each in named)
    return tuple(bundle for bundle in found if bundle)


def in_words(bundles: Sequence[Bundle]) -> str:
    """Describe actors, such as "8 actors, 0.5 CPU each"."""
    number, sizes = len(bundles), Counter(map(_size, bundles))
    actors = f"{number} actor" + ("s" if number > 1 else "")
    if len(sizes) > 1:
        return f"{actors}: " + ", ".join(f"{count} of {size}" for size, count in sizes.items())
    each = " each" if number > 1 else ""
    return f"{actors}, {''.join(sizes)}{each}"


def _size(bundle: Bundle) -> str:
    return " and ".join(
        f"{amount / GIB:,.10g} GiB"
        if name == "memory"
        else f"{amount:g} {name}" + ("s" if amount > 1 else "")
        for name, amount in bundle.items()
    )


def fits(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Return False if machines with these resources cannot hold all bundles at a time, whatever
    else they do."""
    for bundle in bundles:
        room = sum(
            math.floor(min(node.get(name, 0.0) / amount for name, amount in bundle.items()) + 1e-9)
            for node in nodes
        )
        if room < bundles.count(bundle):
            return False
    return all(
        sum(bundle.get(name, 0.0) for bundle in bundles)
        <= sum(node.get(name, 0.0) for node in nodes) + 1e-9
        for name in ("CPU", "GPU", "memory")
    )


def missing(bundles: Iterable[Bundle], free: Mapping[str, float]) -> int:
    """Count the bundles for which a cluster with so much that is free has no room; at least one, as
    what is free may be on several machines."""
    left, without = dict(free), 0
    for bundle in bundles:
        if any(left.get(name, 0.0) < amount - 1e-9 for name, amount in bundle.items()):
            without += 1
            continue
        left |= {name: left[name] - amount for name, amount in bundle.items()}
    return max(1, without)


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group, which one actor takes."""

    group: PlacementGroup
    bundle: int
    cpus: float
    memory: float

    def options(self, cpus: float) -> dict[str, object]:
        """Return Ray's options of an actor that would have so many CPUs anywhere else."""
        strategy = scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, self.bundle)
        cpus = min(cpus, self.cpus)
        return {"num_cpus": cpus, "memory": self.memory, "scheduling_strategy": strategy}


class Placement:
    """The group of one run, and the bundles of its further shards."""

    def __init__(self, needs: Needs, wait: float, on_progress: OnProgress) -> None:
        self._needs, self._wait, self._on_progress = needs, wait, on_progress
        self._group: PlacementGroup | None = None
        self._more: list[PlacementGroup] = []

    def check(self) -> None:
        """Raise InputError if the cluster, whole and empty, has no room for the run and cannot
        grow."""
        nodes = _nodes()
        bundles = [*self._needs.actors, *self._needs.ranks]
        if may_grow(nodes) or fits(bundles, [node["Resources"] for node in nodes]):
            return
        key = "actors" if self._needs.ranks else "cpus_per_actor"
        raise InputError(
            f"runtime.{key}: the run needs {self._needs} at a time, which the cluster has no room "
            "for; lower runtime.actors, runtime.cpus_per_actor or runtime.memory_per_actor, or add "
            "machines"
        )

    def hold(self, and_ranks: bool = False) -> None:
        """Return once the run has its place, at once if it has it still. Tell what it waits for.
        Raises Resumable after `runtime.wait` seconds."""
        bundles = [*self._needs.actors, *(self._needs.ranks if and_ranks else ())]
        if not bundles:
            return
        if self._group is None:
            self._group = _new_group(bundles)
        deadline = monotonic() + self._wait
        # Ray places a group that lost a machine again.
        while not self._group.wait(1):
            if monotonic() < deadline:
                self._on_progress(Progress("waiting for room", detail=self._waits_for(bundles)))
                continue
            waited = self._waits_for(bundles)
            self.give_back()
            raise Resumable(
                f"the cluster has no room: the run {waited}, and did so for {self._wait:g} s "
                "(runtime.wait); make room, or wait longer"
            )

    def _waits_for(self, bundles: Sequence[Bundle]) -> str:
        return f"waits for {missing(bundles, _free())} of {in_words(bundles)}"

    def give_back(self) -> None:
        """Leave the place to others; what is in it ends."""
        group, self._group = self._group, None
        _remove([] if group is None else [group])

    def leave(self, place: Place) -> bool:
        """Give the run's place back if it is this one and no other actor is in it; return whether
        it was."""
        is_whole = place.group == self._group and len(self._needs.actors) == 1
        if is_whole:
            self.give_back()
        return is_whole

    def close(self) -> None:
        self.give_back()
        self.give_back_shards()

    def make_room(self) -> None:
        """Give the place back if no machine has a CPU outside all groups: tasks begin now."""
        if self._group is None:
            return
        left = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in _nodes()}
        for group in _groups().values():
            if group["state"] == "CREATED":
                for number, node in group["bundles_to_node_id"].items():
                    left[node] = left.get(node, 0.0) - group["bundles"][number].get("CPU", 0.0)
        # The first of the two knows of all groups, but only of groups; the second one is late.
        if max(left.values()) < 1.0 or _free().get("CPU", 0.0) < 1.0:
            self.give_back()

    # Actors

    def engine(self) -> Place | None:
        """Return the place of an actor with the engine; waits for it."""
        self.hold()
        return self._place(0)

    def shard(self) -> Place | None:
        """Return the place of a shard; waits for it."""
        self.hold()
        return self._place(len(self._needs.actors) - 1)

    def _place(self, number: int) -> Place | None:
        if self._group is None:
            return None
        bundle = self._needs.actors[number]
        return Place(self._group, number, bundle.get("CPU", 0.0), bundle.get("memory", 0.0))

    def engines(self) -> list[Place]:
        """Return the places of actors with the engine; waits for the first one."""
        first = self.engine()
        if first is None:
            return []
        others = self._more if self._in_pairs else []
        return [first, *(Place(group, 1, first.cpus, first.memory) for group in others)]

    @property
    def _in_pairs(self) -> bool:
        """Return whether each further shard brings room for an engine, with which it shares its
        CPUs and takes turns."""
        return len(self._needs.actors) > 1 and "GPU" not in self._needs.actors[0]

    def shards(self, most: int, cpus: float, gpus: float) -> list[Place | None]:
        """Return the places of at most `most` shards. Waits for the first one, and takes of the
        others what the cluster places: sums over any number of shards are exact."""
        first = self.shard()
        self.give_back_shards()
        memory = 0.0 if first is None else first.memory
        bundles = _bundles(memory, (cpus, gpus))
        if first is None or not bundles:
            return [first] * most
        if self._in_pairs:
            bundles = (*bundles, self._needs.actors[0])
        self._more = _placed([_new_group(bundles) for _ in range(most - 1)], self._wait)
        return [first, *(Place(group, 0, cpus, memory) for group in self._more)]

    def give_back_shards(self) -> None:
        """Leave the places of all shards but the first one to others."""
        _remove(self._more)
        self._more = []


def _placed(groups: list[PlacementGroup], most: float) -> list[PlacementGroup]:
    """Return the groups that the cluster has placed when no further one comes, and remove the
    others."""
    patience = min(most, MACHINE_COMES if may_grow(_nodes()) else SETTLED)
    placed: list[PlacementGroup] = []
    began = last = monotonic()
    while len(placed) < len(groups):
        states = _groups()
        now = [group for group in groups if states[group.id.hex()]["state"] == "CREATED"]
        if len(now) > len(placed):
            placed, last = now, monotonic()
        elif monotonic() - last >= patience or monotonic() - began >= most:
            break
        else:
            sleep(0.05)
    _remove([group for group in groups if group not in placed])
    return placed


def _new_group(bundles: Sequence[Bundle]) -> PlacementGroup:
    """Ask for a group, which ends with this program."""
    asked = [dict(bundle) for bundle in bundles]
    group: PlacementGroup = placement_group.placement_group(asked, strategy="PACK")
    return group


def _remove(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        placement_group.remove_placement_group(group)


def groups_of(bundles: Sequence[Bundle]) -> set[str]:
    """Return the ids of the groups of these bundles that this program has on the cluster."""
    job = ray.get_runtime_context().get_job_id()
    asked = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    return {
        group
        for group, stands in _groups().items()
        if group.endswith(job)  # the last bytes of a group's id are its job's
        and stands["state"] != "REMOVED"
        and [*stands["bundles"].values()] == asked
    }


def remove_groups(groups: Iterable[str]) -> None:
    """Remove groups by their ids; what is in them ends."""
    ids = (ray.PlacementGroupID(bytes.fromhex(group)) for group in groups)
    _remove(map(placement_group.PlacementGroup, ids))


def _groups() -> dict[str, dict[str, Any]]:
    return dict(placement_group.placement_group_table())


def _free() -> dict[str, float]:
    return dict(ray.available_resources())


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


# The run under way

_NOWHERE = Placement(Needs(()), 0.0, lambda progress: None)

_RUN: ContextVar[Placement] = ContextVar("placement", default=_NOWHERE)


def run_placement() -> Placement:
    """Return the placement of the run under way in this thread. Without one, actors have no places,
    and Ray starts each where it likes."""
    return _RUN.get()


@contextmanager
def placed(config: Config, on_progress: OnProgress, is_new: bool) -> Iterator[None]:
    """Place a run on the cluster that this process is connected to, until the end of the block. A
    new one has room for everything before the block begins; one that is charged waits when it
    starts an actor. Raises what `check` and `hold` raise."""
    placement = Placement(needs(config), config.runtime.wait, on_progress)
    token = _RUN.set(placement)
    try:
        placement.check()
        if is_new:
            placement.hold(and_ranks=True)
        yield
    finally:
        _RUN.reset(token)
        with suppress(Exception):  # a cluster that is gone; groups end with the driver, too
            placement.close()

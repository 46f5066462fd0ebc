"""A run's place on a Ray cluster: one placement group with a bundle for each actor that the run
cannot do without (`dpray.workers.needs`). Ray places all bundles or none, before the charge and
again when they were given back, so no run holds what another one waits for.

All else is taken where it is free and never waited for: further engines, further shards. The tasks
that read records are placed by Ray Data, in no group: a run whose group leaves them no CPU gives
the group back while it reads. So a run that waits for CPUs holds none that a task needs, and of
runs that share a cluster one can always go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from dpray.config.config import Config
from dpray.extras import Late
from dpray.types import InputError, OnProgress, Progress, ReadOnlyJson, Resumable
from dpray.workers.engine import living_nodes, may_grow
from dpray.workers.needs import (
    Bundle,
    Needs,
    actors_in_words,
    bundles_of,
    fits,
    missing,
    needs,
    rank_bundle,
)
from dpray.workers.ray_groups import (
    SETTLED,
    free_resources,
    group_table,
    in_stages,
    new_group,
    remove_groups,
    split,
    wait_for_groups,
)

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle
    from ray.util import scheduling_strategies
    from ray.util.placement_group import PlacementGroup
else:
    ray = Late("ray")
    scheduling_strategies = Late("ray.util.scheduling_strategies")

GPU_OF_DRIVER = 0.01
"""The share of its first GPU that the actor of an engine with stages has, so that it sees one. The
actors of vLLM have the rest (`dpray.engines.vllm.model.OF_GPU`), and all of the others."""


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group, which one actor takes."""

    group: PlacementGroup
    bundle: int
    cpus: float
    memory: float
    gpus: float | None = None
    """None: those that the actor would have anywhere else."""

    def options(self, cpus: float) -> dict[str, object]:
        """Return Ray's options of an actor that would have so many CPUs anywhere else."""
        strategy = scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, self.bundle)
        cpus = min(cpus, self.cpus)
        options = {"num_cpus": cpus, "memory": self.memory, "scheduling_strategy": strategy}
        return options | ({} if self.gpus is None else {"num_gpus": self.gpus})


class Placement:
    """The group of one run, and those of its further shards and of its further engines with
    stages."""

    def __init__(self, needs: Needs, wait: float, on_progress: OnProgress) -> None:
        self._needs, self._wait, self._on_progress = needs, wait, on_progress
        self._group: PlacementGroup | None = None
        self._whole: PlacementGroup | None = None
        """The group with a bundle for each stage, until it is placed and split."""
        self._more: list[PlacementGroup] = []
        self._kept: ActorHandle[object] | None = None
        self._engines: list[PlacementGroup] = []

    def hold(self, and_ranks: bool = False) -> None:
        """Return once the run has its place, at once if it has it still. Tell what it waits for.
        Raises Resumable after `runtime.wait` seconds."""
        bundles = [*self._needs.actors, *(self._needs.ranks if and_ranks else ())]
        if not bundles:
            return
        deadline = monotonic() + self._wait
        # Ray places a group that lost a machine again.
        while not self._has_place(bundles):
            if monotonic() < deadline:
                self._on_progress(Progress("waiting for room", detail=self._waits_for(bundles)))
                continue
            waited = self._waits_for(bundles)
            self.give_back()
            raise Resumable(
                f"the cluster has no room: the run {waited}, and did so for {self._wait:g} s "
                "(runtime.wait); make room, or wait longer"
            )

    def _has_place(self, bundles: Sequence[Bundle]) -> bool:
        """Wait a second for the run's group, and return whether it is placed."""
        if self._needs.stage == 1:
            self._group = self._group or new_group(bundles)
            return bool(self._group.wait(1))
        if self._group is None:
            whole = self._whole or new_group(in_stages(self._needs, bundles))
            self._whole = None if whole.wait(1) else whole
            if self._whole is None:
                self._group = split(self._needs, whole, bundles)
        if self._group is None or self._group.wait(SETTLED):
            return self._group is not None
        self.give_back()  # others took the machines, or one is lost
        return False

    def _waits_for(self, bundles: Sequence[Bundle]) -> str:
        return f"waits for {missing(bundles, free_resources())} of {actors_in_words(bundles)}"

    def give_back(self) -> None:
        """Leave the place to others; what is in it ends."""
        self._end_kept()
        remove_groups(group for group in (self._group, self._whole) if group is not None)
        self._group = self._whole = None

    def leave(self, place: Place) -> bool:
        """Give the run's place back if it is this one and no other actor is in it; return whether
        it was."""
        is_whole = place.group == self._group and len(self._needs.actors) == self._needs.engine
        if is_whole:
            self.give_back()
        return is_whole

    def close(self) -> None:
        self.give_back()
        self.give_back_shards()
        remove_groups(self._engines)

    def make_room(self, for_shards: bool = False) -> None:
        """See to it that a machine has a CPU outside all groups: tasks begin now. Give the place
        back for that; but if an engine is kept there, and the cluster grows, first wait for a
        machine that comes. An engine is not kept if the tasks read `for_shards` in its place."""
        if for_shards:
            self._give_way()
        if self._group is None:
            return
        left = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in living_nodes()}
        for group in group_table().values():
            if group["state"] == "CREATED":
                for number, node in group["bundles_to_node_id"].items():
                    left[node] = left.get(node, 0.0) - group["bundles"][number].get("CPU", 0.0)
        # The first of the two knows of all groups, but only of groups; the second one is late.
        if max(left.values()) >= 1.0 and free_resources().get("CPU", 0.0) >= 1.0:
            return
        if self._kept is not None and may_grow(living_nodes()):
            self._on_progress(Progress("waiting for room", detail="a CPU to read records with"))
            came = wait_for_groups([new_group([{"CPU": 1.0}])], self._wait)
            remove_groups(came)
            if came:
                return
        self.give_back()

    # Actors

    def engine(self) -> Place | None:
        """Return the place of an actor with the engine; waits for it."""
        self.hold()
        return self._place(0)

    def keep(self, actor: ActorHandle[object]) -> None:
        """Keep the actor that tried the engine in its place, until a pool takes it or something
        else needs the place. Without a place it ends."""
        self._kept = actor
        if self._group is None:
            self._end_kept()

    def take_kept(self) -> ActorHandle[object] | None:
        """Return the actor that tried the engine; None if it is not kept, or lost."""
        kept, self._kept = self._kept, None
        try:
            if kept is not None:
                ray.get(kept.tried.remote())
        except ray.exceptions.RayError:
            return None
        return kept

    def _give_way(self) -> None:
        """End the kept actor if a shard has its place."""
        if len(self._needs.actors) == self._needs.engine:
            self._end_kept()

    def _end_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            ray.kill(kept)

    def shard(self) -> Place | None:
        """Return the place of a shard; waits for it."""
        self._give_way()
        self.hold()
        return self._place(len(self._needs.actors) - 1)

    def _place(self, number: int) -> Place | None:
        if self._group is None:
            return None
        bundle = self._needs.actors[number]
        gpus = GPU_OF_DRIVER if number < self._needs.engine > 1 else None
        return Place(self._group, number, bundle.get("CPU", 0.0), bundle.get("memory", 0.0), gpus)

    def engines(self, most: int) -> list[Place]:
        """Return the places of at most `most` actors with the engine; waits for the first one. The
        engines without one are actors that Ray starts anywhere. An engine with stages needs a
        place: of these the cluster's are all."""
        first = self.engine()
        if first is None:
            return []
        if (bundles := self._needs.engine) > 1:
            remove_groups(self._engines)
            of_engine = self._needs.actors[:bundles]
            stages = in_stages(self._needs, of_engine)
            asked = [new_group(stages) for _ in range(most - 1)]
            whole = wait_for_groups(asked, self._wait)
            parted = [split(self._needs, group, of_engine) for group in whole]
            self._engines = wait_for_groups(parted, self._wait)
            return [first, *(replace(first, group=group) for group in self._engines)]
        others = self._more if self._in_pairs else []
        return [first, *(Place(group, 1, first.cpus, first.memory) for group in others)]

    @property
    def _in_pairs(self) -> bool:
        """Return whether each further shard brings room for an engine, with which it shares its
        CPUs and takes turns."""
        return len(self._needs.actors) > 1 and "GPU" not in self._needs.actors[0]

    def shards(self, most: int, cpus: float, gpus: float, memory: float) -> list[Place | None]:
        """Return the places of at most `most` shards. Waits for the first one, and takes of the
        others what the cluster places: sums over any number of shards are exact."""
        first = self.shard()
        self.give_back_shards()
        bundles = bundles_of((cpus, gpus, memory))
        if first is None or not bundles:
            return [first] * most
        if self._in_pairs:
            bundles = (*bundles, self._needs.actors[0])
        self._more = wait_for_groups([new_group(bundles) for _ in range(most - 1)], self._wait)
        return [first, *(Place(group, 0, cpus, memory) for group in self._more)]

    def ranks(self, config: Config) -> int:
        """Return how many ranks a training begins with, as many as the cluster has room for now;
        waits for the fewest. Gives the place back: Ray Train makes a group of its own."""
        least, most = config.runtime.ranks
        if least < most and (bundle := rank_bundle(config)):
            self.hold(and_ranks=True)
            more = wait_for_groups([new_group(bundle) for _ in range(most - least)], self._wait)
            remove_groups(more)
            most = least + len(more)
        self.give_back()
        return most

    def give_back_shards(self) -> None:
        """Leave the places of all shards but the first one to others."""
        remove_groups(self._more)
        self._more = []


def check_room(needs: Needs, nodes: Sequence[ReadOnlyJson]) -> None:
    """Raise InputError if a cluster of these nodes, whole and empty, has no room for a run and
    cannot grow."""
    bundles = [*needs.actors, *needs.ranks]
    if not bundles or may_grow(nodes):
        return
    machines = [node["Resources"] for node in nodes]
    # One engine of several GPUs may need fewer CPUs and less memory than the ranks before it.
    training = f"for its training {actors_in_words(needs.training)}"
    for whole, words, key in (
        (in_stages(needs, bundles), str(needs), "actors" if needs.ranks else "cpus_per_actor"),
        (needs.training, training, "actors"),
    ):
        if fits(whole, machines):
            continue
        gpus = [{"GPU": each["GPU"]} for each in whole if "GPU" in each]
        raise InputError(
            f"runtime.{key if fits(gpus, machines) else 'gpus_per_actor'}: the run needs {words} "
            "at a time, which the cluster has no room for; lower runtime.actors, "
            "runtime.cpus_per_actor, runtime.gpus_per_actor or runtime.memory_per_actor, or add "
            "machines"
        )


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
    starts an actor. Raises what `check_room` and `hold` raise."""
    least = needs(config)
    check_room(least, living_nodes())
    placement = Placement(least, config.runtime.wait, on_progress)
    token = _RUN.set(placement)
    try:
        if is_new:
            placement.hold(and_ranks=True)
        yield
    finally:
        _RUN.reset(token)
        with suppress(Exception):  # a cluster that is gone; groups end with the driver, too
            placement.close()

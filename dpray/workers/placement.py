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
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from dpray.config.config import Config
from dpray.engines.kv_cache import GIB
from dpray.extras import Late
from dpray.types import InputError, OnProgress, Progress, Resumable
from dpray.workers.engine import gpus_of_rank, has_stages, may_grow
from dpray.workers.memory import Role, reserved

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

SETTLED = 5.0
"""Seconds after which a cluster that cannot grow has placed what it has room for."""

MACHINE_COMES = 300.0
"""Seconds after the last machine in which a cluster that grows has started the next one."""


NODE_ID = "ray.io/node-id"
"""Every node has this label."""

GPU_OF_DRIVER = 0.01
"""The share of its first GPU that the actor of an engine with stages has, so that it sees one. The
actors of vLLM have the rest (`dpray.engines.vllm.model.OF_GPU`), and all of the others."""


@dataclass(frozen=True)
class Needs:
    """The least that a run needs at a time, in public numbers: the `actors`, of which the first one
    has the engine and the last one a shard, and the further `ranks` of a training. An engine of
    several stages has the first `engine` bundles, one for each GPU, and the `stage` bundles of each
    of its stages are on one machine."""

    actors: tuple[Bundle, ...]
    ranks: tuple[Bundle, ...] = ()
    engine: int = 1
    stage: int = 1

    def __str__(self) -> str:
        return in_words([*self.actors, *self.ranks]) if self.actors else ""


def needs(config: Config) -> Needs:
    """Return what a run on Ray needs at a time. The methods of a chain, which run one after the
    other, share its actors."""
    runtime, names = config.runtime, config.method_names
    cpus, gpus = runtime.cpus_per_actor, runtime.gpus_per_actor or 0.0
    shard = Role.VOTER if names & {"aug_pe", "topics"} else Role.COUNTER
    memory = max(reserved(config, role) for role in _roles(config, shard))
    bundles, stage = 1, 1
    if has_stages(config):
        bundles, stage = int(gpus), config.engine.tensor_parallel_size
    of_bundle = gpus / bundles
    if "aug_pe" in names and config.engine.is_local:
        # Both are there all the time, and take turns.
        engine, voter = reserved(config, Role.ENGINE), reserved(config, shard)
        both = [(cpus / 2, of_bundle, engine)] * bundles + [(cpus / 2, 0.0, voter)]
        return Needs(_bundles(*both), (), bundles, stage)
    whole = _bundles((cpus, of_bundle, memory)) * bundles
    if "dp_sgd" in names:
        # A rank has one GPU. The engine, which comes later, may have those of several ranks.
        others = runtime.ranks[0] - max(1, int(gpus))
        return Needs(whole, rank_bundle(config) * others, bundles, stage)
    uses_gpus = config.engine.is_local or "aug_pe" in names
    return Needs(whole if uses_gpus else _bundles((cpus, 0.0, memory)), (), bundles, stage)


def rank_bundle(config: Config) -> tuple[Bundle, ...]:
    """Return the bundle of a rank of a training, if it needs one."""
    runtime = config.runtime
    gpus = gpus_of_rank(runtime.gpus_per_actor or 0.0)
    return _bundles((runtime.cpus_per_actor, gpus, reserved(config, Role.RANK)))


def most_actors(config: Config) -> int:
    """Return the most actors that a run has at a time: `runtime.actors`, or twice as many where
    voters and engines take turns."""
    found = needs(config)
    return max(1, len(found.actors) - found.engine + 1) * config.runtime.actors


def _roles(config: Config, shard: Role) -> set[Role]:
    """Return the roles of the actors that take the same place, one after the other."""
    roles = {shard}
    if config.engine.is_local:
        roles.add(Role.ENGINE)
    if "dp_sgd" in config.method_names:
        roles.add(Role.RANK)
    return roles


def _bundles(*sizes: tuple[float, float, float]) -> tuple[Bundle, ...]:
    """Return the bundles of so many CPUs, GPUs and bytes of memory each. One of nothing needs
    no place."""
    named = (dict(zip(("CPU", "GPU", "memory"), each, strict=True)) for each in sizes)
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
        self._kept: Any = None
        self._engines: list[PlacementGroup] = []

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
            self._group = self._group or _new_group(bundles)
            return bool(self._group.wait(1))
        if self._group is None:
            whole = self._whole or _new_group(self._in_stages(bundles))
            self._whole = None if whole.wait(1) else whole
            if self._whole is None:
                self._group = self._split(whole, bundles)
        if self._group is None or self._group.wait(SETTLED):
            return self._group is not None
        self.give_back()  # others took the machines, or one is lost
        return False

    def _in_stages(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        """Return the bundles with those of each stage of the engine in one: Ray would pack those of
        one GPU as it can, and a stage is on one machine."""
        engine, stage = self._needs.engine, self._needs.stage
        first = {name: amount * stage for name, amount in bundles[0].items()}
        return [first] * (engine // stage) + [*bundles[engine:]]

    def _split(self, whole: PlacementGroup, bundles: Sequence[Bundle]) -> PlacementGroup:
        """Return a group with a bundle for each GPU, as vLLM wants it, in the place of `whole`."""
        engine, stage = self._needs.engine, self._needs.stage
        nodes = _groups()[whole.id.hex()]["bundles_to_node_id"]
        machines = [{NODE_ID: nodes[number // stage]} for number in range(engine)]
        others: list[dict[str, str]] = [{}] * (len(bundles) - engine)
        group = _new_group(bundles, [*machines, *others])
        _remove([whole])
        return group

    def _waits_for(self, bundles: Sequence[Bundle]) -> str:
        return f"waits for {missing(bundles, _free())} of {in_words(bundles)}"

    def give_back(self) -> None:
        """Leave the place to others; what is in it ends."""
        self._end_kept()
        _remove(group for group in (self._group, self._whole) if group is not None)
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
        _remove(self._engines)

    def make_room(self, for_shards: bool = False) -> None:
        """See to it that a machine has a CPU outside all groups: tasks begin now. Give the place
        back for that; but if an engine is kept there, and the cluster grows, first wait for a
        machine that comes. An engine is not kept if the tasks read `for_shards` in its place."""
        if for_shards:
            self._give_way()
        if self._group is None:
            return
        left = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in _nodes()}
        for group in _groups().values():
            if group["state"] == "CREATED":
                for number, node in group["bundles_to_node_id"].items():
                    left[node] = left.get(node, 0.0) - group["bundles"][number].get("CPU", 0.0)
        # The first of the two knows of all groups, but only of groups; the second one is late.
        if max(left.values()) >= 1.0 and _free().get("CPU", 0.0) >= 1.0:
            return
        if self._kept is not None and may_grow(_nodes()):
            self._on_progress(Progress("waiting for room", detail="a CPU to read records with"))
            came = _placed([_new_group([{"CPU": 1.0}])], self._wait)
            _remove(came)
            if came:
                return
        self.give_back()

    # Actors

    def engine(self) -> Place | None:
        """Return the place of an actor with the engine; waits for it."""
        self.hold()
        return self._place(0)

    def keep(self, actor: Any) -> None:
        """Keep the actor that tried the engine in its place, until a pool takes it or something
        else needs the place. Without a place it ends."""
        self._kept = actor
        if self._group is None:
            self._end_kept()

    def take_kept(self) -> Any:
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
            _remove(self._engines)
            of_engine = self._needs.actors[:bundles]
            stages = self._in_stages(of_engine)
            asked = [_new_group(stages) for _ in range(most - 1)]
            split = [self._split(group, of_engine) for group in _placed(asked, self._wait)]
            self._engines = _placed(split, self._wait)
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
        bundles = _bundles((cpus, gpus, memory))
        if first is None or not bundles:
            return [first] * most
        if self._in_pairs:
            bundles = (*bundles, self._needs.actors[0])
        self._more = _placed([_new_group(bundles) for _ in range(most - 1)], self._wait)
        return [first, *(Place(group, 0, cpus, memory) for group in self._more)]

    def ranks(self, config: Config) -> int:
        """Return how many ranks a training begins with, as many as the cluster has room for now;
        waits for the fewest. Gives the place back: Ray Train makes a group of its own."""
        least, most = config.runtime.ranks
        if least < most and (bundle := rank_bundle(config)):
            self.hold(and_ranks=True)
            more = _placed([_new_group(bundle) for _ in range(most - least)], self._wait)
            _remove(more)
            most = least + len(more)
        self.give_back()
        return most

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


def _new_group(bundles: Sequence[Bundle], labels: Sequence[dict[str, str]] = ()) -> PlacementGroup:
    """Ask for a group, which ends with this program, on nodes with these labels, one of each
    bundle."""
    asked, selector = [dict(bundle) for bundle in bundles], [*labels] or None
    group: PlacementGroup = placement_group.placement_group(
        asked, strategy="PACK", bundle_label_selector=selector
    )
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

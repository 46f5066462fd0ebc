"""The least that a run on Ray needs at a time, in public numbers: a bundle of resources for each
actor that it cannot do without. Nothing here asks a cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dpray.config.config import Config
from dpray.engines.kv_cache import GIB
from dpray.workers.engine import gpus_of_rank, has_stages
from dpray.workers.memory import Role, reserved

Bundle = dict[str, float]
"""The resources of an actor, as Ray names them; memory is in bytes."""


@dataclass(frozen=True)
class Needs:
    """The least that a run needs at a time, in public numbers: the `actors`, of which the first one
    has the engine and the last one a shard, and the further `ranks` of a training. An engine of
    several stages has the first `engine` bundles, one for each GPU, and the `stage` bundles of each
    of its stages are on one machine. The `training` has all of its ranks, also those that have the
    GPUs of the engine."""

    actors: tuple[Bundle, ...]
    ranks: tuple[Bundle, ...] = ()
    engine: int = 1
    stage: int = 1
    training: tuple[Bundle, ...] = ()

    def __str__(self) -> str:
        return actors_in_words([*self.actors, *self.ranks]) if self.actors else ""


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
        return Needs(bundles_of(*both), (), bundles, stage)
    whole = bundles_of((cpus, of_bundle, memory)) * bundles
    if "dp_sgd" in names:
        # A rank has one GPU. The engine, which comes later, may have those of several ranks.
        rank, least = rank_bundle(config), runtime.ranks[0]
        return Needs(whole, rank * (least - max(1, int(gpus))), bundles, stage, rank * least)
    uses_gpus = config.engine.is_local or "aug_pe" in names
    return Needs(whole if uses_gpus else bundles_of((cpus, 0.0, memory)), (), bundles, stage)


def rank_bundle(config: Config) -> tuple[Bundle, ...]:
    """Return the bundle of a rank of a training, if it needs one."""
    runtime = config.runtime
    gpus = gpus_of_rank(runtime.gpus_per_actor or 0.0)
    return bundles_of((runtime.cpus_per_actor, gpus, reserved(config, Role.RANK)))


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


def bundles_of(*sizes: tuple[float, float, float]) -> tuple[Bundle, ...]:
    """Return the bundles of so many CPUs, GPUs and bytes of memory each. One of nothing needs
    no place."""
    named = (dict(zip(("CPU", "GPU", "memory"), each, strict=True)) for each in sizes)
    found = ({name: amount for name, amount in each.items() if amount} for each in named)
    return tuple(bundle for bundle in found if bundle)


def actors_in_words(bundles: Sequence[Bundle]) -> str:
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

    def most(node: Mapping[str, float], name: str, amount: float) -> int:
        room = node.get(name, 0.0)
        if name == "GPU" and amount < 1:  # actors may share a GPU, and none has parts of two
            return int(room) * math.floor(1 / amount + 1e-9)
        return math.floor(room / amount + 1e-9)

    for bundle in bundles:
        room = sum(min(most(node, *each) for each in bundle.items()) for node in nodes)
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

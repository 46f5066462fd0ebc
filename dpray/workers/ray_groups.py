"""Placement groups of Ray: asked for, waited for, looked at and removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING

from dpray.extras import Late
from dpray.types import Json
from dpray.workers.engine import living_nodes, may_grow
from dpray.workers.needs import Bundle, Needs

if TYPE_CHECKING:
    import ray
    from ray.util import placement_group
    from ray.util.placement_group import PlacementGroup
else:
    ray = Late("ray")
    placement_group = Late("ray.util.placement_group")

SETTLED = 5.0
"""Seconds after which a cluster that cannot grow has placed what it has room for."""

MACHINE_COMES = 300.0
"""Seconds after the last machine in which a cluster that grows has started the next one."""

NODE_ID = "ray.io/node-id"
"""Every node has this label."""


def wait_for_groups(groups: list[PlacementGroup], most: float) -> list[PlacementGroup]:
    """Return the groups that the cluster has placed when no further one comes, and remove the
    others."""
    patience = min(most, MACHINE_COMES if may_grow(living_nodes()) else SETTLED)
    placed: list[PlacementGroup] = []
    began = last = monotonic()
    while len(placed) < len(groups):
        states = group_table()
        now = [group for group in groups if states[group.id.hex()]["state"] == "CREATED"]
        if len(now) > len(placed):
            placed, last = now, monotonic()
        elif monotonic() - last >= patience or monotonic() - began >= most:
            break
        else:
            sleep(0.05)
    remove_groups([group for group in groups if group not in placed])
    return placed


def new_group(bundles: Sequence[Bundle], labels: Sequence[dict[str, str]] = ()) -> PlacementGroup:
    """Ask for a group, which ends with this program, on nodes with these labels, one of each
    bundle."""
    asked, selector = [dict(bundle) for bundle in bundles], [*labels] or None
    group: PlacementGroup = placement_group.placement_group(
        asked, strategy="PACK", bundle_label_selector=selector
    )
    return group


def remove_groups(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        placement_group.remove_placement_group(group)


# An engine with stages


def in_stages(needs: Needs, bundles: Sequence[Bundle]) -> list[Bundle]:
    """Return the bundles with those of each stage of the engine in one: Ray would pack those of one
    GPU as it can, and a stage is on one machine."""
    first = {name: amount * needs.stage for name, amount in bundles[0].items()}
    return [first] * (needs.engine // needs.stage) + [*bundles[needs.engine :]]


def split(needs: Needs, whole: PlacementGroup, bundles: Sequence[Bundle]) -> PlacementGroup:
    """Return a group with a bundle for each GPU, as vLLM wants it, in the place of `whole`, which
    is placed and has one for each stage."""
    nodes = group_table()[whole.id.hex()]["bundles_to_node_id"]
    machines = [{NODE_ID: nodes[number // needs.stage]} for number in range(needs.engine)]
    others: list[dict[str, str]] = [{}] * (len(bundles) - needs.engine)
    group = new_group(bundles, [*machines, *others])
    remove_groups([whole])
    return group


# Groups of this program


def groups_of(bundles: Sequence[Bundle]) -> set[str]:
    """Return the ids of the groups of these bundles that this program has on the cluster."""
    job = ray.get_runtime_context().get_job_id()
    asked = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    return {
        group
        for group, stands in group_table().items()
        if group.endswith(job)  # the last bytes of a group's id are its job's
        and stands["state"] != "REMOVED"
        and [*stands["bundles"].values()] == asked
    }


def remove_by_id(ids: Iterable[str]) -> None:
    """Remove groups by their ids; what is in them ends."""
    found = (ray.PlacementGroupID(bytes.fromhex(each)) for each in ids)
    remove_groups(map(placement_group.PlacementGroup, found))


def group_table() -> dict[str, Json]:
    return dict(placement_group.placement_group_table())


def free_resources() -> dict[str, float]:
    return dict(ray.available_resources())

"""The counts of `benchmarks.bench_selection`."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_selection import WAYS, Counted, counts
from dpray.engines.kv_cache import choice_bytes

OPERATIONS = {
    "recentred": 40,
    "dclip": 62,
    "dclip, top_k_plus": 69,
    "public gate": 69,
    "sparse vector": 74,
    "gate and sparse vector": 84,
    "dclip, schema": 71,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_any_number_of_groups_waits_once_in_as_many_operations(way: str) -> None:
    two, many = (counts(way, groups, 3, 256) for groups in (2, 32))
    assert two.waits == many.waits == 1
    assert two.operations == many.operations == OPERATIONS[way]


@pytest.mark.parametrize("way", ["dclip", "gate and sparse vector", "dclip, schema"])
@pytest.mark.parametrize(("groups", "rows"), [(512, 0), (256, 1), (30, 16), (8, 63), (1, 511)])
@pytest.mark.parametrize("vocabulary", [49_152, 262_144])
def test_a_step_takes_no_more_memory_than_engines_keep_for_it(
    way: str, groups: int, rows: int, vocabulary: int
) -> None:
    """However private batches share the 512 rows: all of them may be empty."""
    found = counts(way, groups, rows, vocabulary)
    assert found.waits == 1
    together = groups * (rows + 1)
    gathered = 4 * together * vocabulary  # by the engine, if the rows of a group are scattered
    assert found.bytes + gathered <= choice_bytes(together, vocabulary)


def test_what_computes_is_counted_and_views_are_not() -> None:
    values = torch.ones(4, 8, device="meta")
    with Counted() as counted:
        values[1:].t().unsqueeze(0)
        assert counted.operations == 0
        torch.ones(3).exp_()  # on the host
        values.exp_().sum().cpu()
        (values + 1).view(8, 4).t()
        kept = values.double()
    assert (counted.operations, counted.waits) == (4, 1)
    assert counted.living == kept.nbytes == 256 == counted.bytes

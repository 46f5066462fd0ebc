"""The counts of `benchmarks.bench_selection`."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_selection import WAYS, Counted, counts


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_any_number_of_groups_waits_once_in_as_many_operations(way: str) -> None:
    two, many = (counts(way, groups, 3, 256) for groups in (2, 32))
    assert two.waits == many.waits == 1
    assert two.operations == many.operations < 120


def test_what_computes_is_counted_and_views_are_not() -> None:
    values = torch.ones(4, 8, device="meta")
    with Counted() as counted:
        values[1:].t().unsqueeze(0)
        assert counted.operations == 0
        torch.ones(3).exp_()  # on the host
        values.exp_().sum().cpu()
    assert (counted.operations, counted.waits) == (2, 1)

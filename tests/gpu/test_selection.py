"""The counts of `benchmarks.bench_selection`."""

from __future__ import annotations

import torch

from benchmarks.bench_selection import Counted, counts


def test_a_step_waits_once_for_all_groups_unless_candidates_are_cut_out() -> None:
    assert {counts("dclip", groups, 3, 64).waits for groups in (1, 4)} == {1}
    assert [counts("sparse vector", groups, 3, 64).waits for groups in (1, 4)] == [2, 2]
    assert [counts("dclip, top_k_plus", groups, 3, 256).waits for groups in (1, 4)] == [2, 5]
    one, four = (counts("recentred", groups, 3, 64).operations for groups in (1, 4))
    assert one < four <= 4 * one


def test_what_computes_is_counted_and_views_are_not() -> None:
    values = torch.ones(4, 8)
    with Counted() as counted:
        values[1:].t().unsqueeze(0)
        assert counted.operations == 0
        values.exp_().sum()
        (values > 0).nonzero()
    assert (counted.operations, counted.waits) == (4, 1)

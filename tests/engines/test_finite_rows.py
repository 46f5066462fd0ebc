"""A row is finite by its highest logit: both sides, for every type, and for any logit of a row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.engines.finite_rows import FiniteRows, highest, remember_together
from dpray.methods.private_prediction.logits import even_if_not_finite

TYPES = [torch.float32, torch.float16, torch.bfloat16]
V = 3000
"""More than the logits that one instruction, or a first look, covers."""

dtypes = st.sampled_from(TYPES)
seeds = st.integers(0, 2**31)


def drawn_rows(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return four rows whose numbers reach the ends of their type, each with tokens masked out."""
    random = torch.Generator().manual_seed(seed)
    z = (torch.rand(4, V, generator=random, dtype=torch.float64) * 2 - 1) * torch.finfo(dtype).max
    z[torch.rand(4, V, generator=random) < 0.3] = -math.inf
    return z.to(dtype)


@settings(deadline=None)
@given(dtype=dtypes, seed=seeds)
def test_a_row_with_masked_tokens_is_finite(dtype: torch.dtype, seed: int) -> None:
    z = drawn_rows(dtype, seed)
    assert highest(z).tolist() == z.max(dim=-1).values.tolist()


@settings(deadline=None)
@given(
    dtype=dtypes,
    seed=seeds,
    place=st.integers(0, V - 1),
    bad=st.sampled_from([math.nan, -math.nan, math.inf]),
    masked=st.booleans(),
    also=st.sampled_from([0.0, math.inf, -math.inf]),
)
def test_any_logit_makes_a_row_not_finite_and_no_other_row(
    dtype: torch.dtype, seed: int, place: int, bad: float, masked: bool, also: float
) -> None:
    z = drawn_rows(dtype, seed)
    if masked:
        z[2] = -math.inf
    z[2, seed % V] = also
    z[2, place] = bad
    finite = FiniteRows(4, torch.device("cpu"))
    assert finite.remember(highest(z)).isfinite().tolist() == [True, True, False, True]
    # It stays so in the positions after it.
    later = drawn_rows(dtype, seed + 1)
    assert finite.remember(highest(later)).isfinite().tolist() == [True, True, False, True]
    assert not even_if_not_finite(z[2]).any()


def test_groups_remember_together_what_each_remembers() -> None:
    sizes, cpu = [3, 0, 5, 1], torch.device("cpu")
    one_by_one, together = ([FiniteRows(size, cpu) for size in sizes] for _ in range(2))
    for bad in ([1, 8], [], [4]):
        top_N = torch.arange(9.0)
        top_N[bad] = math.nan
        found = remember_together(together, top_N.split(sizes))
        for rows, got_S, top_S in zip(one_by_one, found, top_N.split(sizes), strict=True):
            torch.testing.assert_close(got_S, rows.remember(top_S), equal_nan=True, rtol=0, atol=0)
    assert torch.cat([each.past_S for each in together]).isnan().nonzero()[:, 0].tolist() == [
        1,
        4,
        8,
    ]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_of_masked_tokens_alone_is_not_finite(dtype: torch.dtype) -> None:
    z = torch.full((2, V), -math.inf, dtype=dtype)
    z[0, -1] = torch.finfo(dtype).min
    assert highest(z).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_logit_that_overflows_16_bits_makes_its_row_not_finite(dtype: torch.dtype) -> None:
    z = torch.zeros(3, V)
    z[1, -1], z[2, -1] = 3.4e38, -3.4e38
    narrow = z.to(dtype)
    assert narrow[1].isinf().any() and narrow[2].isinf().any()
    assert highest(narrow).isfinite().tolist() == [True, False, True]
    assert highest(z).isfinite().all()


@settings(deadline=None)
@given(dtype=dtypes, seed=seeds)
def test_public_logits_that_are_finite_stay_as_they_are(dtype: torch.dtype, seed: int) -> None:
    z = drawn_rows(dtype, seed)[0]
    found, masked = even_if_not_finite(z), z == -math.inf
    assert found.dtype == dtype and torch.equal(found[~masked], z[~masked])
    assert (found[masked] == torch.finfo(dtype).min).all()

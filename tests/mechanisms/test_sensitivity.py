"""Neighbouring batches: adding one row moves no sum by more than the docstrings claim.

Proof: docs/privacy.md, sections 2.1, 2.2 and 2.5.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpray.engines.base import GroupLogits, select_token
from dpray.engines.finite_rows import FiniteRows, highest
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.logits import (
    GRID,
    PROBABILITY_GRID,
    Clip,
    candidates,
    distribution_distances,
    probability_sums,
)
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import Coins, Group, Step
from dpray.methods.private_prediction.token import PrivateTokenSelector

CLIPS = get_args(Clip)

V = 7
logit = st.floats(-1e4, 1e4, width=32)
row = arrays(np.float32, V, elements=logit)
bound = st.floats(0.01, 20.0)
size = st.integers(1, 300)
few = settings(max_examples=40)


def one_step(
    mechanism: PrivateToken, z: torch.Tensor, public: torch.Tensor, highest_S: Any = None
) -> Step:
    highest_S = highest(z) if highest_S is None else highest_S
    return Step(mechanism, [Group(z, highest_S, public, Coins())], looks=True)


def mean(
    clip: str, z: torch.Tensor, public: torch.Tensor, c: float, s: int, **changes: Any
) -> torch.Tensor:
    mechanism = PrivateToken(s, 1, clip, c, 1.0, 1.0, **changes)  # type: ignore[arg-type]
    [found] = one_step(mechanism, z, public).averages_GK
    return found


def recentred_mean(z: torch.Tensor, c: float, s: int) -> torch.Tensor:
    return mean("recentred", z, z.new_zeros(z.shape[1]), c, s)


def dclip_mean(z: torch.Tensor, public: torch.Tensor, c: float, s: int) -> torch.Tensor:
    return mean("dclip", z, public, c, s)


def distance(z: torch.Tensor, public: torch.Tensor, s: int) -> float:
    rows = one_step(PrivateToken(s, 1, "recentred", 1.0, 1.0, 1.0), z, public).rows
    return float(distribution_distances(probability_sums(rows), public[None], s))


def matrix(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(len(rows), V))


@few
@given(rows=st.lists(row, max_size=40), new=row, place=st.integers(0, 40), c=bound, s=size)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_mean_moves_by_at_most_c_over_s(rows, new, place, c, s, clip) -> None:  # type: ignore[no-untyped-def]
    """This holds to the last bit: there is no slack for rounding."""
    zeros = torch.zeros(V)  # public logits are added to both means alike
    without = mean(clip, matrix(rows), zeros, c, s)
    with_new = mean(clip, matrix([*rows[:place], new, *rows[place:]]), zeros, c, s)
    # The difference of two quotients may round up by one unit in their last place.
    assert ((with_new - without) * s).abs().max() <= c * (1 + 1e-12)


@few
@given(rows=st.lists(row, max_size=40), new=row, public=row, s=size)
def test_distance_moves_by_at_most_one_over_s(rows, new, public, s) -> None:  # type: ignore[no-untyped-def]
    z = torch.from_numpy(public)
    without = distance(matrix(rows), z, s)
    # Whole numbers are compared: only their quotients by s are rounded.
    assert abs(distance(matrix([*rows, new]), z, s) - without) <= 1 / s + 1e-15


def test_no_row_has_more_than_the_whole_of_a_probability() -> None:
    """Equal shares are all rounded in one direction, for some numbers of tokens upwards."""
    for tokens in range(2, 100):
        z, elsewhere = torch.zeros(tokens + 1), torch.full((tokens + 1,), -torch.inf)
        z[0], elsewhere[0] = -torch.inf, 0.0
        share = distance(z[None], elsewhere, 1) - 1.0
        assert 1 - 1e-6 < share <= 1, tokens


@few
@given(data=st.data(), count=st.integers(2, 70), c=bound)
def test_the_order_of_rows_changes_no_bit(data, count, c) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(0, 30, (count, 611)).astype(np.float32)
    public = torch.from_numpy(rng.normal(0, 5, 611).astype(np.float32))
    z, shuffled = torch.from_numpy(logits), torch.from_numpy(rng.permutation(logits))
    assert torch.equal(recentred_mean(z, c, 9), recentred_mean(shuffled, c, 9))
    assert torch.equal(dclip_mean(z, public, c, 9), dclip_mean(shuffled, public, c, 9))
    assert distance(z, public, 9) == distance(shuffled, public, 9)


def test_a_row_gives_the_same_bits_whatever_rows_are_beside_it() -> None:
    """A vocabulary large enough for a single row to be reduced by several threads."""
    fixed = torch.Generator().manual_seed(3)
    z = torch.randn(20, 50_021, generator=fixed) * 10
    public = torch.randn(50_021, generator=fixed)
    zero = dclip_mean(z[:0], public, 3.0, 1)
    alone = torch.stack([dclip_mean(row[None], public, 3.0, 1) - zero for row in z])
    together = dclip_mean(z, public, 3.0, 1) - zero
    # What each row gives is a whole number of steps, so these float64 sums are exact.
    steps = torch.round(alone * 2.0**24)
    assert torch.equal(steps.sum(0), torch.round(together * 2.0**24))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [slice(2, 3), slice(None)])
def test_a_row_that_overflowed_moves_no_more_than_another(bad: float, places: slice) -> None:
    """Not a number in one row would end the whole batch, or always say "near": a loss without
    bound, for which a model in 16 bits and one long text suffice."""
    z, c, s = torch.randn(5, V), 3.0, 4
    public, others = torch.randn(V), z[1:]
    z[0, places] = bad
    for with_row, without in (
        (recentred_mean(z, c, s), recentred_mean(others, c, s)),
        (dclip_mean(z, public, c, s), dclip_mean(others, public, c, s)),
    ):
        assert ((with_row - without) * s).abs().max() <= c * (1 + 1e-12)
    moved = distance(z, public, s) - distance(others, public, s)
    assert abs(moved) <= 1 / s + 1e-12


def test_a_token_that_no_prompt_allows_is_never_drawn() -> None:
    z, public = torch.randn(5, V), torch.randn(V)
    z[:, 1] = public[1] = -torch.inf
    mean = dclip_mean(z, public, 3.0, 4)
    assert mean[1] < -1e38
    assert (mean[[0, *range(2, V)]].abs() < 100).all()


@few
@given(new=row, constant=st.floats(-100, 100, width=32), c=bound)
def test_a_constant_on_a_row_changes_nothing(new, constant, c) -> None:  # type: ignore[no-untyped-def]
    z, shifted = matrix([new]), matrix([new + np.float32(constant)])
    rounding = 2e4 * 2**-20
    public = torch.zeros(V)
    assert torch.allclose(recentred_mean(z, c, 1), recentred_mean(shifted, c, 1), atol=rounding)
    assert torch.allclose(
        dclip_mean(z, public, c, 1), dclip_mean(shifted, public, c, 1), atol=rounding
    )


def test_recentred_is_equation_1() -> None:
    z = torch.tensor([[1.0, 4.0, -9.0]])
    assert recentred_mean(z, 2.0, 1).tolist() == [-1.0, 2.0, -2.0]


def test_the_mean_divides_by_the_public_size() -> None:
    z = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert recentred_mean(z, 1.0, 4).tolist() == [0.0, 0.5]


def test_an_empty_batch_is_the_public_prediction_under_dclip() -> None:
    public = torch.tensor([0.0, 1.0, 2.0])
    mean = dclip_mean(torch.empty(0, 3), public, 1.0, 8)
    torch.testing.assert_close(mean, torch.log_softmax(public, -1).double())


def test_distance_of_an_empty_batch_is_the_public_mass() -> None:
    assert distance(torch.empty(0, 3), torch.zeros(3), 8) == pytest.approx(1.0)


@pytest.mark.parametrize("clip", CLIPS)
def test_candidates_only_select(clip: str) -> None:
    """The other tokens are left out of the sums, which moves no bit of the candidates'."""
    fixed = torch.Generator().manual_seed(1)
    z, public = torch.randn(5, V, generator=fixed), torch.randn(V, generator=fixed)
    chosen = public.topk(3).indices.sort().values
    few = mean(clip, z, public, 2.0, 5, candidates="top_k", k=3)
    assert torch.equal(few, mean(clip, z, public, 2.0, 5)[chosen])


def test_candidate_sets() -> None:
    public = torch.tensor([0.0, 3.0, 2.9, 1.0, -1.0, 1.0])

    def chosen(rule: str, k: int, margin: float) -> list[int]:
        found = candidates(public[None], rule, k, margin)  # type: ignore[arg-type]
        return found[0].nonzero()[:, 0].tolist()

    assert chosen("all", 2, 0.5) == [0, 1, 2, 3, 4, 5]
    assert chosen("top_k", 2, 0.5) == [1, 2]
    assert chosen("top_k", 3, 0.5) == [1, 2, 3]  # the first one of equals
    assert chosen("top_k", 4, 0.5) == [1, 2, 3, 5]
    assert chosen("top_k", 9, 0.5) == [0, 1, 2, 3, 4, 5]
    assert chosen("top_k_plus", 1, 0.2) == [1, 2]
    assert chosen("top_k_plus", 2, 2.0) == [1, 2, 3, 5]


@few
@given(
    data=st.data(),
    clip=st.sampled_from(CLIPS),
    rule=st.sampled_from(["all", "top_k", "top_k_plus"]),
    sparse=st.booleans(),
)
def test_a_batch_that_comes_in_parts_gives_the_tokens_that_it_gives_whole(
    data: Any, clip: Any, rule: Any, sparse: bool
) -> None:
    """Sums are exact, so no cut and no order of the parts moves a bit of them."""
    V, positions, key = 61, 5, new_key()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vector = {"threshold": 0.8, "noise": 0.05} if sparse else {}
    fields = asdict(
        PrivateToken(4, positions, clip, 3.0, 1.0, 1.0, candidates=rule, k=20, **vector)
    )
    whole, in_parts = PrivateTokenSelector(fields, key), PrivateTokenSelector(fields, key)
    for _ in range(positions):
        z = torch.from_numpy(rng.normal(0, 4, (int(rng.integers(0, 40)), V)).astype(np.float32))
        public = torch.from_numpy(rng.normal(0, 2, V).astype(np.float32))
        cuts = sorted(rng.integers(0, len(z) + 1, size=3))
        *parts, last = torch.from_numpy(rng.permutation(z.numpy())).tensor_split(
            [int(cut) for cut in cuts]
        )
        for part in parts:
            in_parts.add(GroupLogits(part, highest(part), public))
        assert select_token(in_parts, last, public) == select_token(whole, z, public)
        assert in_parts.state() == whole.state()


anything = arrays(np.float32, V, elements=st.floats(width=32))


def sums(z: torch.Tensor, highest_S: torch.Tensor) -> torch.Tensor:
    """Return what is computed from private rows, in the units of their bounds: shape (3, V)."""
    public = torch.linspace(-1, 1, V)
    steps = [
        one_step(PrivateToken(1, 1, clip, 1.0, 1.0, 1.0), z, public, highest_S)  # type: ignore[arg-type]
        for clip in CLIPS
    ]
    clipped = [step.clipped_sums_GK / GRID for step in steps]
    return torch.cat([*clipped, probability_sums(steps[0].rows) / PROBABILITY_GRID])


@few
@given(rows=st.lists(anything, max_size=6), new=anything, place=st.integers(0, 6))
def test_any_numbers_at_all_add_a_bounded_row(
    rows: list[np.ndarray], new: np.ndarray, place: int
) -> None:
    """A row that is not finite adds 0, to the bit; the others' sums are as they were."""
    without, joined = matrix(rows), matrix([*rows[:place], new, *rows[place:]])
    added = sums(joined, highest(joined)) - sums(without, highest(without))
    assert torch.isfinite(added).all() and (added.abs() <= 1).all()
    assert added[2].sum() <= 1
    if not np.isfinite(new.max()):
        assert not added.any()


@few
@given(
    steps=st.lists(st.lists(anything, min_size=5, max_size=5), min_size=1, max_size=4),
    cut=st.integers(0, 5),
)
def test_a_row_that_was_not_finite_once_adds_0_from_there_on(
    steps: list[list[np.ndarray]], cut: int
) -> None:
    whole, parts = (FiniteRows(5, torch.device("cpu")) for _ in range(2))
    alive = set(range(5))
    for rows in steps:
        z = matrix(rows)
        alive -= {row for row in range(5) if not np.isfinite(rows[row].max())}
        kept = z[sorted(alive)]
        expected = sums(kept, highest(kept))
        assert torch.equal(sums(z, whole.remember(highest(z))), expected)
        later, first = list(range(cut, 5))[::-1], slice(0, cut)
        in_parts = sums(z[later], parts.remember(highest(z[later]), later))
        in_parts += sums(z[first], parts.remember(highest(z[first]), first))
        assert torch.equal(in_parts, expected)


@few
@given(
    rows=st.lists(row, max_size=4),
    new=anything,
    place=st.integers(0, V - 1),
    value=st.sampled_from([math.nan, math.inf]),
)
def test_a_schema_does_not_hide_a_number_that_is_none(
    rows: list[np.ndarray], new: np.ndarray, place: int, value: float
) -> None:
    """All logits of a row are looked at, also those of tokens that the schema forbids."""
    new = new.copy()
    new[place] = value
    key, tokens = new_key(), []
    for z in (matrix([*rows, new]), matrix(rows)):
        selector = PrivateTokenSelector(
            PrivateToken(2, 9, "recentred", 5.0, 1.0, 1.0, threshold=0.1, noise=0.1).values, key
        )
        selector.mask = FewTokens()  # type: ignore[assignment]
        tokens.append([select_token(selector, z, torch.zeros(V)) for _ in range(4)])
    assert tokens[0] == tokens[1]


class FewTokens:
    """Stands in for a mask that allows three tokens."""

    allowed = np.arange(V) < 3
    was_closed = False

    def forced(self, must_end: bool = False) -> None: ...

    def take(self, token: int) -> int:
        return token

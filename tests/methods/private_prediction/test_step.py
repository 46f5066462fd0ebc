"""All groups of a step in one call: the tokens of one group after the other, and of no other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from dpray.engines.base import Failed, GroupLogits, HostSync, Selected, select_tokens
from dpray.engines.finite_rows import highest
from dpray.mechanisms.randomness import named_key
from dpray.methods.private_prediction import token
from dpray.methods.private_prediction.logits import Rows, distribution_distances
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import Coins, Group, Step
from dpray.methods.private_prediction.token import PrivateTokenSelector
from tests.methods.private_prediction.one_by_one import KINDS, OneByOne, mechanism

POSITIONS = 6

Input = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, list[int]]
"""Private rows, their highest logits, public logits, what a schema allows, and the copies."""


def inputs(V: int, groups: int, position: int, masked: bool) -> list[Input]:
    """Groups of uneven sizes, some empty, with ties, tokens of -inf, rows that are not finite."""
    rng, fixed = random.Random(f"{V} {groups} {position}"), torch.Generator().manual_seed(position)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    found: list[Input] = []
    for _ in range(groups):
        rows = rng.choice([0, 1, 3, 16, 33, 70])
        z = (torch.randn(rows + 1, V, generator=fixed) * 3).to(dtype)
        z[-1, rng.randrange(V)] += rng.choice([0.0, 0.0, 6.0])
        z[:, ::7] = z[:, :1]
        if rows > 2:
            z[0, rng.randrange(V)] = rng.choice([math.nan, math.inf, -math.inf, 0.0])
            z[1, ::2] = rng.choice([-math.inf, 1.0])
            z[2] = rng.choice([-math.inf, 2.0])
        if rng.random() < 0.2:
            z[-1, rng.randrange(V)] = rng.choice([math.inf, math.nan])
        allowed = np.array([rng.random() < 0.5 for _ in range(V)]) if masked else None
        excluded = rng.sample(range(V), 3) if masked and rng.random() < 0.5 else []
        if allowed is not None:
            allowed[0] = allowed[1] = True
            excluded = [token for token in excluded if token > 1]
        found.append((z[:-1], highest(z[:-1]), z[-1], allowed, excluded))
    return found


class Stub:
    """Stands in for the schema's mask and the copies of one position."""

    was_closed = False

    def __init__(self, allowed: Any, excluded: list[int]) -> None:
        self.allowed, self.excluded = allowed, excluded

    def forced(self, must_end: bool) -> None:
        """There is always a choice."""

    def take(self, token: int) -> int:
        return token

    def add(self, token: int) -> None:
        """Copies are made up for each position."""


@contextmanager
def together() -> Iterator[None]:
    """Draw as a GPU does: all groups in one call, at whose numbers nobody looks."""

    def draw(mechanism: PrivateToken, groups: list[Group]) -> torch.Tensor:
        return Step(mechanism, groups, looks=False).draw()

    draw_by = lru_cache(lambda mechanism: partial(draw, mechanism))
    with patch.object(token, "_draw_by", draw_by):
        yield


def texts_agree(
    kind: str, groups: int, V: int = 61, masked: bool = False, device: str = "cpu"
) -> bool:
    """Draw a text of each group, and the same from the reference; groups end one by one."""
    m = mechanism(kind)
    texts = [(named_key("5a" * 32, str(g)), g % 5) for g in range(groups)]
    drawn = [PrivateTokenSelector(m.values, key, t) for key, t in texts]
    reference = [OneByOne(m, key, t) for key, t in texts]
    for position in range(POSITIONS):
        step = inputs(V, groups, position, masked)
        selections = []
        for selector, (*logits, allowed, excluded) in zip(drawn, step, strict=True):
            stub: Any = Stub(allowed, excluded)
            selector.mask = stub if masked else None
            selector.copies = stub if masked else None
            selections.append(selector.select(GroupLogits(*(each.to(device) for each in logits))))
        expected = [r.select(*given) for r, given in zip(reference, step, strict=True)]
        if select_tokens(selections) != [Selected(token) for token in expected]:
            return False
    assert groups == 1 or "gate" in kind or any(r.t >= m.private_tokens for r in reference)
    counts = [(s.t, s.public_tokens) for s in drawn]
    return counts == [(r.t, r.public_tokens) for r in reference]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_one_group_after_the_other(kind: str, device: str) -> None:
    """On a CPU each group is a step by itself, or all are one, as they are on a GPU."""
    for way in (together, nullcontext) if device == "cpu" else (nullcontext,):
        with way():
            for groups in (1, 12):
                assert texts_agree(kind, groups, device=device)
                assert texts_agree(kind, groups, masked=True, device=device)
            assert texts_agree(kind, 4, V=3001, device=device)


def test_a_selection_that_fails_ends_no_other() -> None:
    def breaks(value: torch.Tensor) -> Selected:
        raise ArithmeticError(f"{value.tolist()} of {value.dtype}")

    selector, z = PrivateTokenSelector(mechanism("dclip").values, "5a" * 32), torch.zeros(4, 9)
    good = selector.select(GroupLogits(z[1:], highest(z[1:]), z[0]))
    failed, other = select_tokens([HostSync(torch.ones(2).double(), torch.stack, breaks), good])
    assert isinstance(failed, Failed) and isinstance(failed.error, ArithmeticError)
    assert str(failed.error) == "[1.0, 1.0] of torch.float64"
    assert isinstance(other, Selected)


def a_uniform_is_used_twice() -> Any:
    right = PrivateTokenSelector._coins
    kept: dict[int, int] = {}

    def coins(self: PrivateTokenSelector) -> Coins:
        found = right(self)
        return found._replace(uniform=kept.setdefault(id(self), found.uniform))

    return patch.object(PrivateTokenSelector, "_coins", coins)


def noise_is_used_again_after_the_gate() -> Any:
    """The generator goes on behind the coins that an open gate did not use."""
    right = PrivateTokenSelector._coins

    def coins(self: PrivateTokenSelector) -> Coins:
        found = right(self)
        self.if_sure = None
        return found

    return patch.object(PrivateTokenSelector, "_coins", coins)


def a_row_spills_into_the_next_group() -> Any:
    def into(self: Rows) -> Any:
        assert self.group is not None
        moved = self.group.clone()
        moved[-1:] = 0
        return moved.masked_fill(self.highest[:, 0].isnan(), self.groups)

    return patch.object(Rows, "into", property(into))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("dclip", a_uniform_is_used_twice),
        ("gate and sparse vector", noise_is_used_again_after_the_gate),
        ("recentred", a_row_spills_into_the_next_group),
    ],
)
def test_a_fault_gives_other_tokens(kind: str, fault: Callable[[], Any]) -> None:
    with together(), fault():
        assert not all(texts_agree(kind, groups) for groups in (8, 24))


def results(step: Step) -> list[torch.Tensor]:
    """All that is computed for each group."""
    distances = distribution_distances(step.probability_sums_GA, step.public_GA, 16)
    sums = [step.clipped_sums_GK, step.probability_sums_GA, step.averages_GK, step.public()]
    return [step.draw(), distances, step.top_and_total[1], *sums]


def moved_by_others(V: int, dtype: torch.dtype) -> bool:
    """Whether a bit of a group's results moves with the other groups, their order or rows."""
    m = mechanism("gate and sparse vector", candidates="top_k", k=20)
    fixed = torch.Generator().manual_seed(V)

    def group(rows: int) -> Group:
        z = (torch.randn(rows + 1, V, generator=fixed) * 3).to(dtype)
        coins = Coins(*torch.randint(2**62, (2,), generator=fixed).tolist(), 0.01, 1.1)
        return Group(z[:-1], highest(z[:-1]), z[-1], coins)

    groups = [group(rows) for rows in (16, 0, 70, 1, 33)]
    broken = group(3)
    broken.private[1, 5] = math.nan
    extra = [Group(broken.private, highest(broken.private), broken.public, broken.coins), group(9)]
    alone = [results(Step(m, [one], looks=False)) for one in groups]
    for others in (groups, groups[::-1], [*extra, *groups], [*groups[:3], *extra, *groups[3:]]):
        found = results(Step(m, others, looks=False))
        for one, expected in zip(groups, alone, strict=True):
            place = others.index(one)
            if any(
                not torch.equal(all_G[place], own_1[0])
                for all_G, own_1 in zip(found, expected, strict=True)
            ):
                return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [7 * 31, 5003])
def test_no_bit_of_a_group_depends_on_the_other_groups(V: int, dtype: torch.dtype) -> None:
    assert not moved_by_others(V, dtype)


def test_a_row_in_the_next_groups_sum_is_seen() -> None:
    with a_row_spills_into_the_next_group():
        assert moved_by_others(217, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait_for_the_device(kind: str) -> None:
    """torch's "meta" device has no numbers: asking for one is an error."""
    m = mechanism(kind)

    def step(looks: bool, groups: int) -> torch.Tensor:
        z, public = torch.empty(4, 100, device="meta"), torch.empty(100, device="meta")
        given = [Group(z, highest(z), public, Coins()) for _ in range(groups)]
        return Step(m, given, looks).draw()

    assert step(looks=False, groups=3).shape == (3, 1)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        step(looks=True, groups=1)

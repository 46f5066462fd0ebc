"""Neighbouring data sets through the real selector: the lower bound on epsilon that the outputs
prove stays under what is charged, and exceeds it when clipping or noise is broken on purpose.

The two worlds differ in one private row, chosen to do the most. The event looked at is fixed
beforehand; Clopper-Pearson bounds at 99.9 % each turn counts into a bound that a right mechanism
exceeds in fewer than 1 of 500 runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from dpray.accounting.accountant import cost
from dpray.audit.bounds import epsilon_lower_bound
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction import clipping
from dpray.methods.private_prediction import token as private_token
from dpray.methods.private_prediction.exponential import SoftmaxSampler
from dpray.methods.private_prediction.sparse_vector import SparseVector
from dpray.methods.private_prediction.token import PrivateToken, PrivateTokenSelector

RUNS = 4000
CONFIDENCE = 0.999
DELTA = 1e-6
V = 6
TARGET = 0


pytestmark = pytest.mark.usefixtures("one_thread")


def lower_bound(with_row: int, without_row: int) -> float:
    """Epsilon that (epsilon, DELTA)-DP needs for these counts of the event in RUNS runs each."""
    return float(epsilon_lower_bound(with_row, without_row, RUNS, DELTA, 2 * (1 - CONFIDENCE)))


def rows(with_canary: bool) -> torch.Tensor:
    """Four rows that say nothing; the canary is sure of TARGET."""
    quiet = torch.zeros(4, V)
    canary = torch.full((1, V), -1000.0)
    canary[0, TARGET] = 1000.0
    return torch.cat([quiet, canary]) if with_canary else quiet


PUBLIC = torch.zeros(V)


def text(mechanism: PrivateToken, with_canary: bool) -> list[int]:
    """A batch's first tokens, until the r private ones are drawn."""
    selector = PrivateTokenSelector(asdict(mechanism), new_key())
    tokens: list[int] = []
    logits = rows(with_canary)
    while len(tokens) < 4 and (token := selector.select(logits, PUBLIC)) is not None:
        tokens.append(token)
    return tokens


def audited(mechanism: PrivateToken, event: Callable[[list[int]], bool]) -> float:
    counts = {
        canary: sum(event(text(mechanism, canary)) for _ in range(RUNS)) for canary in (True, False)
    }
    other_way = lower_bound(RUNS - counts[False], RUNS - counts[True])
    return max(lower_bound(counts[True], counts[False]), other_way)


def plain(clip: str) -> PrivateToken:
    return PrivateToken(
        batch_size=5,
        private_tokens=3,
        clip=clip,  # type: ignore[arg-type]
        clip_bound=3.0,
        temperature=1.5,
        public_temperature=1.0,
    )


def with_sparse_vector() -> PrivateToken:
    return PrivateToken(
        batch_size=5,
        private_tokens=1,
        clip="dclip",
        clip_bound=0.01,
        temperature=1.0,
        public_temperature=1.0,
        threshold=0.25,
        noise=0.6,
    )


def claimed(mechanism: PrivateToken) -> float:
    return cost(mechanism.dp_event, DELTA).epsilon


def says_target(tokens: list[int]) -> bool:
    return tokens.count(TARGET) >= 2


def says_only_target(tokens: list[int]) -> bool:
    return tokens == [TARGET] * 3


def is_short(tokens: list[int]) -> bool:
    """The first query was far: the canary lifts the distance from 0.2 over the threshold."""
    return len(tokens) == 1


@pytest.mark.parametrize("clip", ["recentred", "dclip"])
def test_claim_holds_for_tokens(clip: str) -> None:
    assert 0 < audited(plain(clip), says_target) < claimed(plain(clip))


def test_claim_holds_for_the_sparse_vector() -> None:
    assert audited(with_sparse_vector(), is_short) < claimed(with_sparse_vector())


def test_missing_clipping_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unclipped(
        z: torch.Tensor, candidates: torch.Tensor | None, c: float, s: int
    ) -> torch.Tensor:
        return z.sum(dim=0) / s

    monkeypatch.setattr(private_token, "recentred_mean", unclipped)
    assert audited(plain("recentred"), says_target) > claimed(plain("recentred"))


def test_division_by_the_real_size_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, and a clip bound that pays for s = 5: divided by 1 it is five times too strong."""

    def by_size(
        z: torch.Tensor, p: torch.Tensor, k: torch.Tensor | None, c: float, s: int
    ) -> torch.Tensor:
        last = z[-1:]
        return clipping.dclip_mean(last, p, k, c, len(last))

    monkeypatch.setattr(private_token, "dclip_mean", by_size)
    assert audited(plain("dclip"), says_only_target) > claimed(plain("dclip"))


def test_too_little_temperature_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SoftmaxSampler.sample

    def colder(self: SoftmaxSampler, utilities, rng):  # type: ignore[no-untyped-def]
        return right(SoftmaxSampler(self.sensitivity, self.temperature / 6), utilities, rng)

    monkeypatch.setattr(SoftmaxSampler, "sample", colder)
    assert audited(plain("dclip"), says_target) > claimed(plain("dclip"))


def test_missing_noise_of_the_sparse_vector_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = with_sparse_vector()
    monkeypatch.setattr(SparseVector, "draw_threshold", lambda self, rng: self.threshold)
    monkeypatch.setattr(SparseVector, "is_far", lambda self, d, threshold, rng: d >= threshold)
    assert audited(mechanism, is_short) > claimed(mechanism)

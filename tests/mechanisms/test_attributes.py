"""The claims of docs/privacy.md, section 1.7, and the table that fits noisy pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteGaussian
from dpray.mechanisms.attributes import PairHistograms, Values, margins, noise_for
from dpray.mechanisms.monte_carlo import attributes_target, audit_target
from dpray.types import no_progress
from tests.evaluation.cases import half_noise, noiseless

DOMAINS = {"kind": ("a", "b"), "stars": ("1", "3", "5"), "city": ("x", "other")}
PAIRS = PairHistograms(DOMAINS, 2.0)
SIZES = [6, 4, 6]
record = st.fixed_dictionaries({name: st.sampled_from(of) for name, of in DOMAINS.items()})
stray = st.fixed_dictionaries(dict.fromkeys(DOMAINS, st.sampled_from(["a", "5", "x", "secret"])))


@given(st.lists(record | stray, max_size=20), st.lists(record | stray, max_size=4))
def test_a_unit_moves_each_histogram_by_its_records(
    others: list[dict[str, str]], unit: list[dict[str, str]]
) -> None:
    moved = PAIRS.count([*unit, *others]) - PAIRS.count(others)
    assert moved.tolist() == PAIRS.count(unit).tolist() and moved.min(initial=0) >= 0
    for part in np.split(moved, np.cumsum(SIZES)[:-1]):
        assert np.abs(part).sum() <= len(unit)


def test_a_value_that_is_not_public_counts_nowhere() -> None:
    """The record still counts in the histogram of its other two columns."""
    counts = PAIRS.count([{"kind": "a", "stars": "secret", "city": "x"}])
    assert [part.sum() for part in np.split(counts, np.cumsum(SIZES)[:-1])] == [0, 1, 0]


@pytest.mark.parametrize(
    ("epsilon", "histograms", "k"), [(0.1, 1, 1), (0.4, 10, 1), (1.6, 15, 3), (4.0, 3, 1)]
)
def test_the_histograms_cost_what_they_may_and_little_less(
    epsilon: float, histograms: int, k: int
) -> None:
    sigma = noise_for(epsilon, 1e-6, histograms, k)
    event = SelfComposed(DiscreteGaussian(sigma, k), histograms)
    assert 0.6 * epsilon < cost(event, 1e-6).epsilon <= epsilon


def test_the_event_is_that_of_all_histograms() -> None:
    assert PAIRS.dp_event == SelfComposed(DiscreteGaussian(2.0, 1), 3)
    assert replace(PAIRS, records_per_unit=4).dp_event.event == DiscreteGaussian(2.0, 4)
    one = PairHistograms({"kind": ("a", "b")}, 2.0)
    assert one.pairs == [("kind",)] and one.dp_event.count == 1


@pytest.mark.parametrize(
    ("domains", "noise", "k"),
    [({}, 1.0, 1), ({"a": ()}, 1.0, 1), ({"a": ("x", "x")}, 1.0, 1), (DOMAINS, 0.0, 1),
     (DOMAINS, math.inf, 1), (DOMAINS, 1.0, 0)],
)  # fmt: skip
def test_bad_parameters(domains: dict[str, tuple[str, ...]], noise: float, k: int) -> None:
    with pytest.raises(ValueError):
        PairHistograms(domains, noise, k)


def law(weight: Callable[[str, str, str], float]) -> dict[Values, float]:
    cells = {each: weight(*each) for each in product(*DOMAINS.values())}
    total = sum(cells.values())
    return {tuple(zip(DOMAINS, k, strict=True)): v / total for k, v in cells.items()}


def dependent(kind: str, stars: str, city: str) -> float:
    return (9.0 if (kind == "a") == (stars == "5") else 1.0) * (3.0 if city == "x" else 1.0)


def distance(one: dict[Values, float], other: dict[Values, float]) -> float:
    return sum(abs(one[key] - other[key]) for key in one) / 2


def records_of(shares: dict[Values, float], number: int) -> list[dict[str, str]]:
    return [dict(key) for key, share in shares.items() for _ in range(round(share * number))]


def test_the_table_has_the_dependence_and_the_noise_does_not_drown_it() -> None:
    """A table of independent columns is 0.37 away."""
    true = law(dependent)
    alone = margins(true)
    product_of = {key: math.prod(alone[c][v] for c, v in key) for key in true}
    assert distance(true, product_of) > 0.3
    for sigma, near in ((1e-3, 0.01), (20.0, 0.08)):
        pairs = PairHistograms(DOMAINS, sigma)
        fitted = pairs.shares(pairs(pairs.count(records_of(true, 2000))))
        assert distance(true, fitted) < near


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=16, max_size=16))
@settings(max_examples=20, deadline=None)
def test_any_counts_give_shares(noisy: list[int]) -> None:
    shares = PAIRS.shares(noisy)
    assert len(shares) == 12 and min(shares.values()) >= 0
    assert math.fsum(shares.values()) == pytest.approx(1)


AUDITED = PairHistograms(DOMAINS, 1.5, 2)


def test_the_audit_finds_no_fault() -> None:
    found = audit_target(attributes_target(AUDITED), 4000, 1e-6, 0.01, no_progress)
    assert found.holds and found.lower_bound > 0.2 * found.claimed


@pytest.mark.parametrize("fault", ["no noise", "half the noise", "counted twice"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, planted = PairHistograms.count, nullcontext
    if fault == "no noise":
        planted = noiseless(PairHistograms)
    elif fault == "half the noise":
        planted = half_noise(PairHistograms, "noise_std")
    else:
        monkeypatch.setattr(PairHistograms, "count", lambda self, of: 2 * count(self, of))
    # A claim that few trials can exceed: mu 1.15 at a large delta.
    target = attributes_target(replace(AUDITED, noise_std=3.0))
    with planted():
        found = audit_target(target, 10_000, 0.05, 0.01, no_progress)
    assert not found.holds

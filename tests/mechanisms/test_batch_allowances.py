"""Once the labels' proportions are measured, a label gets no more Poisson batches than were charged
before."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed, Parallel, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import DiscreteLaplace, ExponentialMechanism, PoissonSubsampledDraws
from dpray.mechanisms.batch_allowances import Allowance, BatchAllowances, probability
from dpray.methods.private_prediction.allowances import calibrated_allowances, shares
from dpray.types import Budget, InputError

SIZES = 2000, 40
DRAW, DRAWS = ExponentialMechanism(0.15), 8
HISTOGRAM = DiscreteLaplace(5.0, 1)
BUDGET = Budget(1.5, 1e-6)


@pytest.fixture(scope="module")
def calibrated() -> BatchAllowances:
    return calibrated_allowances(SIZES, 2, 0.1, HISTOGRAM, DRAW, DRAWS, BUDGET)


counts = st.lists(st.integers(0, 10**6), min_size=1, max_size=6).filter(any)


@given(counts, st.lists(st.integers(1, 10**5), min_size=1, max_size=8), st.integers(1, 10**6))
def test_no_label_gets_more_than_its_allowance(
    counted: list[int], batches: list[int], most: int
) -> None:
    total = sum(counted)
    proportions = {str(label): count / total for label, count in enumerate(counted)}
    rungs = [0.9 * 0.6**step for step in range(len(batches))]
    allowances = BatchAllowances(
        1000,
        20,
        tuple(
            Allowance(share, probability(1000, 20, share), number)
            for share, number in zip(rungs, sorted(batches, reverse=True), strict=True)
        ),
    )
    made = allowances.batches(proportions, most)
    for label, share in proportions.items():
        allowed = allowances.of_share(share)
        assert 1 <= made.batches_per_label[label] <= allowed.batches
        assert made.sampling_probabilities[label] <= allowed.sampling_probability
    assert made.num_batches <= most + len(counted)


def test_the_labels_keep_their_proportions(calibrated: BatchAllowances) -> None:
    for share in (0.5, 0.4, 0.25, 0.15):
        made = calibrated.batches({"a": share, "b": 1 - share}, 10**6)
        assert abs(made.batches_per_label["a"] - share * made.num_batches) < 1
        assert made.sampling_probabilities["a"] * 2000 * share == pytest.approx(40)
    assert calibrated.batches({"a": 0.5, "b": 0.5}, 7).num_batches == 7


def test_a_label_that_is_rarer_than_all_allowances_gets_smaller_batches(
    calibrated: BatchAllowances,
) -> None:
    made = calibrated.batches({"a": 0.01, "b": 0.99, "c": 0.0}, 10**6)
    assert made.batches_per_label["a"] >= 1 == made.batches_per_label["c"]
    assert made.sampling_probabilities["a"] == made.sampling_probabilities["c"] == 40 / 200


def test_the_worst_of_all_allowances_uses_up_the_budget(calibrated: BatchAllowances) -> None:
    event = Composed((HISTOGRAM, calibrated.dp_event(DRAW, DRAWS)))
    assert 0.97 * BUDGET.epsilon < cost(event, BUDGET.delta).epsilon <= BUDGET.epsilon
    rungs = [allowance.share for allowance in reversed(calibrated.allowances)]
    assert rungs == shares(2, 0.1) and 0.475 in rungs
    for allowance in calibrated.allowances:
        each = Composed((HISTOGRAM, allowance.dp_event(DRAW, DRAWS)))
        assert cost(each, BUDGET.delta).epsilon <= BUDGET.epsilon
        if allowance.batches > 20:
            more = replace(allowance, batches=math.ceil(1.1 * allowance.batches))
            each = Composed((HISTOGRAM, more.dp_event(DRAW, DRAWS)))
            assert cost(each, BUDGET.delta).epsilon > BUDGET.epsilon


def curves(event: Event, epsilons: np.ndarray) -> np.ndarray:
    (term, count), *_ = event.terms().items()
    found: np.ndarray = term.pld(2.0**-11, count).get_delta_for_epsilon(epsilons)
    return found


EPSILONS = np.arange(0, 4, 2.0**-5)


@pytest.mark.parametrize("share", [0.5, 0.44, 0.3, 0.2, 0.11, 0.03])
def test_every_choice_is_below_what_was_charged_and_a_larger_probability_is_not(
    calibrated: BatchAllowances, share: float
) -> None:
    claimed = curves(calibrated.dp_event(DRAW, DRAWS), EPSILONS)
    made = calibrated.batches({"a": share, "b": 1 - share}, 10**6)
    for label, count in made.batches_per_label.items():
        q = made.sampling_probabilities[label]
        chosen = curves(SelfComposed(PoissonSubsampledDraws(q, DRAW.range, DRAWS), count), EPSILONS)
        assert (chosen <= claimed + 1e-12).all()
    allowed = calibrated.of_share(share)
    q = min(1.0, 1.5 * allowed.sampling_probability)
    wrong = SelfComposed(PoissonSubsampledDraws(q, DRAW.range, DRAWS), allowed.batches)
    assert (curves(wrong, EPSILONS) > claimed * 1.01).any()


def joined_law(q: float, batches: int, up: float) -> tuple[np.ndarray, np.ndarray]:
    """The number of ones in so many batches of one draw each, randomised response, of a unit that
    says 1 in each batch that it joins; with it and without it."""
    with_unit = q * up + (1 - q) * (1 - up)
    laws = np.ones(1), np.ones(1)
    for _ in range(batches):
        laws = tuple(  # type: ignore[assignment]
            np.convolve(law, [1 - p, p]) for law, p in zip(laws, (with_unit, 1 - up), strict=True)
        )
    return laws


@pytest.mark.parametrize("mark", [-1, 0, 1])
@pytest.mark.parametrize("rich_first", [True, False])
def test_what_the_histogram_says_may_choose_the_batches(mark: int, rich_first: bool) -> None:
    """Every outcome of a game in which the noisy count of a label chooses between two allowances:
    neither direction exceeds the claim, and the choice matters."""
    scale, up = 1.5, 1 / (1 + math.exp(-0.4))
    options = [(0.5, 3), (0.25, 9)]
    x = np.arange(-80, 82)
    noise = [np.exp(-np.abs(x - shift) / scale) for shift in (1, 0)]
    noise = [law / law.sum() for law in noise]
    outcomes: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for n, value in enumerate(x):
        q, batches = options[int((value > mark) == rich_first)]
        for world, law in enumerate(joined_law(q, batches, up)):
            outcomes[world].append(noise[world][n] * law)
    with_unit, without = (np.concatenate(world) for world in outcomes)
    draw = ExponentialMechanism(0.4 * 2)
    batches_event = Parallel.of(
        SelfComposed(PoissonSubsampledDraws(q, draw.range, 1), number) for q, number in options
    )
    claim = Composed((DiscreteLaplace(scale, 1), batches_event))
    for delta in (1e-4, 1e-3, 1e-2, 5e-2):
        epsilon = cost(claim, delta).epsilon
        for p, r in ((with_unit, without), (without, with_unit)):
            assert np.maximum(p - math.exp(epsilon) * r, 0).sum() <= delta * (1 + 1e-9)
    half = cost(claim, 1e-2).epsilon / 2
    assert np.maximum(with_unit - math.exp(half) * without, 0).sum() > 1e-2


@pytest.mark.parametrize(("q", "times"), product([0.05, 0.3, 0.9], [0.3, 0.8]))
def test_a_smaller_probability_is_no_worse(q: float, times: float) -> None:
    larger, smaller = (
        curves(SelfComposed(PoissonSubsampledDraws(p, 0.3, 4), 5), EPSILONS) for p in (q, q * times)
    )
    assert (smaller <= larger + 1e-12).all() and (smaller < larger - 1e-6).any()


def test_a_budget_that_pays_for_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"^privacy\.epsilon: 0\.2 does not pay for one Poisson"):
        calibrated_allowances(SIZES, 2, 0.1, HISTOGRAM, DRAW, DRAWS, Budget(0.2, 1e-6))

"""Neighbouring data sets through real votes: the lower bound on epsilon that T noisy histograms
prove stays under what is charged, and exceeds it when noise or votes are broken on purpose.

The two worlds differ in one record (or one unit) that votes for text 0. The event, fixed
beforehand, is that the noisy counts of this text over T iterations sum to at least a threshold.
Clopper-Pearson bounds at 99.9999 % each, two ways: a right mechanism exceeds its claim in fewer
than 4 of a million runs.
Proof: docs/privacy.md, sections 3.2 and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.auditing.monte_carlo import epsilon_lower_bound
from dpray.mechanisms.votes import VoteHistogram, count_votes

RUNS = 8000
CONFIDENCE = 1 - 1e-6
DELTA = 0.05
T = 2
# mu = sqrt(T) times the sensitivity over sigma = 1 for all that is claimed here.
SIGMA = math.sqrt(T)

TEXTS = np.eye(3, dtype=np.float32)
OTHERS = np.array([[0.0, 1.0, 0.0], [0.6, 0.8, 0.0], [0.8, 0.6, 0.0]], dtype=np.float32)
CANARY = np.array([[0.9, 0.4, 0.1]], dtype=np.float32)

Votes = Callable[[np.ndarray, np.ndarray], np.ndarray]


def lower_bound(with_unit: int, without_unit: int) -> float:
    """Epsilon that (epsilon, DELTA)-DP needs for these counts of the event in RUNS runs each."""
    return float(epsilon_lower_bound(with_unit, without_unit, RUNS, DELTA, 2 * (1 - CONFIDENCE)))


def sums(mechanism: VoteHistogram, private: np.ndarray, votes: Votes) -> np.ndarray:
    """The first text's noisy counts summed over T iterations, for RUNS independent runs."""
    counts = votes(private, TEXTS)
    return mechanism(np.tile(counts[:1], RUNS * T)).reshape(RUNS, T).sum(axis=1)


def audited(
    mechanism: VoteHistogram, unit: np.ndarray = CANARY, votes: Votes = count_votes
) -> float:
    """The better bound of "the world without the unit is unlikely to say this much" and of its
    mirror image, at 2.25 deviations of the noise that runs."""
    both = np.concatenate([OTHERS, unit])
    reach = 2.25 * mechanism.sigma * math.sqrt(T)
    high = T * votes(OTHERS, TEXTS)[0] + reach
    low = T * votes(both, TEXTS)[0] - reach
    without, with_unit = sums(mechanism, OTHERS, votes), sums(mechanism, both, votes)
    return max(
        lower_bound(int((with_unit >= high).sum()), int((without >= high).sum())),
        lower_bound(int((without <= low).sum()), int((with_unit <= low).sum())),
    )


def claimed(mechanism: VoteHistogram) -> float:
    return cost(SelfComposed(mechanism.dp_event, T), DELTA).epsilon


def test_claim_holds_for_a_record() -> None:
    mechanism = VoteHistogram(SIGMA)
    assert 0 < audited(mechanism) < claimed(mechanism)


def test_claim_holds_for_a_unit_whose_votes_fall_on_one_text() -> None:
    mechanism = VoteHistogram(3 * SIGMA, records_per_unit=3)
    assert 0 < audited(mechanism, np.repeat(CANARY, 3, axis=0)) < claimed(mechanism)
    assert claimed(mechanism) == pytest.approx(claimed(VoteHistogram(SIGMA)), rel=0.05)


def test_half_the_noise_is_caught() -> None:
    assert audited(VoteHistogram(SIGMA / 2)) > claimed(VoteHistogram(SIGMA))


def test_several_votes_of_a_record_are_caught() -> None:
    mechanism = VoteHistogram(SIGMA)

    def three_each(private: np.ndarray, synthetic: np.ndarray) -> np.ndarray:
        return 3 * count_votes(private, synthetic)

    assert audited(mechanism, votes=three_each) > claimed(mechanism)


def test_a_unit_of_three_charged_as_one_is_caught() -> None:
    mechanism = VoteHistogram(SIGMA, records_per_unit=1)
    assert audited(mechanism, np.repeat(CANARY, 3, axis=0)) > claimed(mechanism)


def test_sensitivity_sqrt_k_would_be_too_little() -> None:
    """Noise for votes on distinct texts, votes on one."""
    mechanism = VoteHistogram(3 * SIGMA, records_per_unit=3)
    run = VoteHistogram(3**0.5 * SIGMA, records_per_unit=3)
    assert audited(run, np.repeat(CANARY, 3, axis=0)) > claimed(mechanism)

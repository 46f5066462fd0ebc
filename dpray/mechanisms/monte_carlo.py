"""Draws from a mechanism in two neighbouring worlds bound its epsilon from below (Ding et al. 2018;
Jagielski et al. 2020). A plan names its `Target`s; the audit returns a `Finding` for each.

Half of the draws choose an event; the other half bound its two probabilities. The halves are
independent, so the bound holds however the event was chosen. The targets of mechanisms that several
methods use, the label histogram and the votes, are here too.

>>> round(float(clopper_pearson_lower(90, 100, 0.05)), 3)
0.836
>>> round(float(epsilon_lower_bound(900, 100, 1000, delta=0.0, alpha=0.05)), 2)
1.99
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import scipy

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Event
from dpray.mechanisms.attributes import PairHistograms
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.labels import LabelHistogram
from dpray.mechanisms.votes import VoteHistogram, count_votes
from dpray.types import InputError, OnProgress, Progress

Scores = npt.NDArray[np.float64]
"""The statistics of each draw, shape (statistics, trials); the unit makes them larger."""

FEWEST_TRIALS = 200

OTHER_RECORDS = 20
"""Number of records in the world without the unit."""

MOST_THRESHOLDS = 400

CAUTION = 0.01
"""An event is chosen by its bound at this fraction of alpha. The best of hundreds of bounds at
alpha would often be that of a rare event that was seen by chance."""

Bounds = npt.NDArray[np.float64]
Draws = npt.NDArray[np.float64] | npt.NDArray[np.int64]


def clopper_pearson_lower(hits: npt.ArrayLike, trials: int, alpha: float) -> Bounds:
    """Return an exact lower confidence bound on a binomial probability (Clopper and Pearson 1934).

    The true probability is below it with probability at most `alpha`. Elementwise.
    """
    seen = np.asarray(hits)
    bounds = scipy.stats.beta.ppf(alpha, np.maximum(seen, 1), trials - seen + 1)
    return np.where(seen > 0, bounds, 0.0)


def clopper_pearson_upper(hits: npt.ArrayLike, trials: int, alpha: float) -> Bounds:
    """Return an exact upper confidence bound: the true probability is above it with probability at
    most `alpha`."""
    return 1.0 - clopper_pearson_lower(trials - np.asarray(hits), trials, alpha)


def epsilon_lower_bound(
    likely: npt.ArrayLike, rare: npt.ArrayLike, trials: int, delta: float, alpha: float
) -> Bounds:
    """Bound epsilon from below by the counts of one event in two neighbouring worlds: `likely` of
    `trials` draws in one world, `rare` of `trials` draws in the other.

    (epsilon, delta)-DP says P <= e^epsilon Q + delta, so epsilon >= log((P - delta) / Q). P is
    bounded from below and Q from above, each at alpha / 2. So the true epsilon is below the result
    with probability at most `alpha`. The result is 0 if nothing is proven. Elementwise.
    """
    p = clopper_pearson_lower(likely, trials, alpha / 2) - delta
    q = clopper_pearson_upper(rare, trials, alpha / 2)
    bounds: Bounds = np.log(np.maximum(p / q, 1.0))
    return bounds


@dataclass(frozen=True)
class SeenEvent:
    """The event that one statistic is at least `threshold`, or with `below`, at most. It is assumed
    to be likelier with the unit, or with `without`, without it. An array of thresholds stands for
    one event each."""

    statistic: int
    threshold: np.float64 | Bounds
    below: bool
    without: bool

    def bound(self, scores: tuple[Scores, Scores], delta: float, alpha: float) -> Bounds:
        """Bound epsilon by the scores of the worlds with and without the unit."""
        counts = []
        for side in scores:
            ordered = np.sort(side[self.statistic])
            if self.below:
                counts.append(np.searchsorted(ordered, self.threshold, side="right"))
            else:
                counts.append(len(ordered) - np.searchsorted(ordered, self.threshold, side="left"))
        likely, rare = reversed(counts) if self.without else counts
        return epsilon_lower_bound(likely, rare, scores[0].shape[1], delta, alpha)


@dataclass(frozen=True)
class Target:
    """A mechanism to audit: its real code, and the privacy event that it claims for one draw.

    `inputs` describes the neighbouring inputs. `draw(with_unit, trials)` runs the mechanism
    independently for each of at most `at_once` trials.
    """

    name: str
    inputs: str
    event: Event
    draw: Callable[[bool, int], Scores]
    at_once: int = 500

    def most(self, trials: int, delta: float, alpha: float) -> float:
        """Return the largest bound that `trials` draws can prove: that of a mechanism that hides
        nothing."""
        half = trials - trials // 2
        return float(epsilon_lower_bound(half, 0, half, delta, alpha))

    def lower_bound(
        self, trials: int, delta: float, alpha: float, on_progress: OnProgress
    ) -> float:
        """Draw, and return a lower bound: the true epsilon is below it with probability at most
        `alpha`."""
        drawn = 0

        def scores(with_unit: bool, number: int) -> Scores:
            nonlocal drawn
            parts = []
            for start in range(0, number, self.at_once):
                on_progress(Progress(self.name, drawn, 2 * trials))
                parts.append(self.draw(with_unit, min(self.at_once, number - start)))
                drawn += parts[-1].shape[1]
            return np.concatenate(parts, axis=1)

        half = trials // 2
        chosen = best_event((scores(True, half), scores(False, half)), delta, alpha * CAUTION)
        rest = trials - half
        bound = float(chosen.bound((scores(True, rest), scores(False, rest)), delta, alpha))
        on_progress(Progress(self.name, drawn, 2 * trials))
        return bound


@dataclass(frozen=True)
class Finding:
    """A target's claimed epsilon, its lower bound, and the largest bound (`most`) that the trials
    could prove, all at the same delta."""

    name: str
    inputs: str
    claimed: float
    lower_bound: float
    most: float
    trials: int

    @property
    def holds(self) -> bool:
        return self.lower_bound <= self.claimed


def audit_target(
    target: Target,
    trials: int,
    delta: float,
    alpha: float,
    on_progress: OnProgress = lambda progress: None,
) -> Finding:
    """Bound one target's epsilon. A correct mechanism is reported as breaking its claim with
    probability at most `alpha`. Raises InputError for too few trials."""
    if trials < FEWEST_TRIALS:
        raise InputError(f"trials: {trials} prove nothing; at least {FEWEST_TRIALS} are needed")
    return Finding(
        name=target.name,
        inputs=target.inputs,
        claimed=cost(target.event, delta).epsilon,
        lower_bound=target.lower_bound(trials, delta, alpha, on_progress),
        most=target.most(trials, delta, alpha),
        trials=trials,
    )


def best_event(scores: tuple[Scores, Scores], delta: float, alpha: float) -> SeenEvent:
    """Return the event with the best bound on these draws, in either direction."""
    found: list[tuple[float, SeenEvent]] = []
    for statistic, sides in enumerate(zip(*scores, strict=True)):
        thresholds = np.unique(np.concatenate(sides))
        if len(thresholds) > MOST_THRESHOLDS:
            ranks = np.linspace(0, len(thresholds) - 1, MOST_THRESHOLDS).round().astype(int)
            thresholds = thresholds[ranks]
        for below, without in product((False, True), repeat=2):
            events = SeenEvent(statistic, thresholds, below, without)
            bounds = events.bound(scores, delta, alpha)
            best = int(bounds.argmax())
            found.append((float(bounds[best]), replace(events, threshold=thresholds[best])))
    return max(found, key=lambda pair: pair[0])[1]


def laplace_scores(x_RN: Draws, shift: float | Draws, scale: float) -> Scores:
    """Return three statistics of R draws of N values with noise of Laplace scale `scale`, shape
    (3, R).

    `x_RN` has the other records' part already subtracted. The first statistic is the log-likelihood
    ratio of noise around `shift` (one, or one for each of the N values) to noise around 0: for a
    correct mechanism no test of the same draws is more powerful (Neyman and Pearson 1933). The
    second is the ratio for twice the shift, the third the sum over the scale: these two show a unit
    that contributes more than it may.
    """
    x_RN = np.asarray(x_RN, dtype=np.float64)
    ratios = (np.abs(x_RN) - np.abs(x_RN - times * shift) for times in (1, 2))
    return np.stack([values_RN.sum(axis=1) / scale for values_RN in (*ratios, x_RN)])


def summed(released: Counts, trials: int) -> Scores:
    """Return each trial's sum, which is a sufficient statistic of Gaussian noise."""
    scores: Scores = released.reshape(trials, -1).sum(axis=1, dtype=np.float64)[None]
    return scores


def labels_target(histogram: LabelHistogram) -> Target:
    """Audit the label histogram; all records of the unit have the same label."""
    label, k = histogram.labels[0], histogram.records_per_unit

    def draw(with_unit: bool, trials: int) -> Scores:
        counts = histogram.count([label] * (OTHER_RECORDS + k * with_unit))
        released = histogram(np.tile(counts[:1], trials))
        return laplace_scores((released - OTHER_RECORDS)[:, None], k, histogram.scale)

    return Target("label histogram", f"{k} more of one label", histogram.dp_event, draw)


def attributes_target(histogram: PairHistograms) -> Target:
    """Audit the histograms of pairs; all records of the unit have the same values."""
    k, m = histogram.records_per_unit, len(histogram.pairs)
    record = {column: values[0] for column, values in histogram.domains.items()}
    touched_M = np.flatnonzero(histogram.count([record]))

    def draw(with_unit: bool, trials: int) -> Scores:
        counts_M = histogram.count([record] * (OTHER_RECORDS + k * with_unit))[touched_M]
        return summed(histogram(np.tile(counts_M, trials)), trials)

    what = f"{k} more record(s) of the same values in each of {m} histogram(s)"
    return Target("attribute histograms", what, histogram.dp_event, draw, max(1, 20_000 // m))


def votes_target(name: str, votes: VoteHistogram, iterations: int = 1) -> Target:
    """Audit the votes; all records of the unit vote for the same text, in every iteration."""
    k, texts = votes.records_per_unit, np.eye(2, dtype=np.float32)
    others, unit = np.tile(texts, (OTHER_RECORDS // 2, 1)), np.tile(texts[:1], (k, 1))

    def draw(with_unit: bool, trials: int) -> Scores:
        private = np.concatenate([others, unit]) if with_unit else others
        # The other text's count is the same in both worlds.
        count = count_votes(private, texts)[:1]
        return summed(votes(np.tile(count, iterations * trials)), trials)

    return Target(
        name,
        f"{k} more record(s) that vote for the same text in each",
        SelfComposed(votes.dp_event, iterations),
        draw,
        at_once=max(1, 20_000 // iterations),
    )

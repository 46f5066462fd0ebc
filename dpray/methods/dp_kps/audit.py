"""The audit of DP-KPS bounds the epsilon of the vocabulary's counts, of the densities, and of both
together, which a run is charged for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.mechanisms.monte_carlo import OTHER_RECORDS, Scores, Target, laplace_scores
from dpray.methods.dp_kps.algorithm import DpKps
from dpray.methods.dp_kps.mechanisms import GRID, LARGEST, FeatureSum, VocabularyHistogram

FAR_TOO_LONG = 1e3
"""Each feature of the unit's records; a record may contribute sqrt(2) at most."""

MOST_FEATURES = 4
"""The audit draws at most this many features of an estimator. Laplace noise reaches its pure
epsilon if all features are extreme at once, which is very rare for many features."""


def targets(method: DpKps) -> Iterator[Target]:
    """Yield the vocabulary, the densities of one class (classes are disjoint), and both."""
    vocabulary = vocabulary_target("vocabulary histogram", method.vocabulary)
    if isinstance(method.kde, VocabularyHistogram):
        densities = vocabulary_target("densities of a class", method.kde)
    else:
        estimators = max(1, len(method.estimators))
        densities = densities_target("densities of a class", method.kde, estimators)
    yield from (vocabulary, densities, joint_target(vocabulary, densities))


def joint_target(first: Target, second: Target) -> Target:
    """Audit two mechanisms to which the same unit contributes. Their noise is independent, so the
    log-likelihood ratios add up, and no test of both is more powerful than that of the sum."""

    def draw(with_unit: bool, trials: int) -> Scores:
        return first.draw(with_unit, trials) + second.draw(with_unit, trials)

    return Target(
        f"{first.name} and {second.name}",
        f"{first.inputs}; {second.inputs}",
        Composed((first.event, second.event)),
        draw,
        at_once=min(first.at_once, second.at_once),
    )


def vocabulary_target(name: str, histogram: VocabularyHistogram) -> Target:
    """Audit the counts. Every record of the unit has the same terms, more than S of them. The
    counts of all other terms are equal in both worlds, and are not drawn."""
    S, k = histogram.phrases_per_record, histogram.records_per_unit
    histogram = replace(histogram, size=min(histogram.size, 2 * S))
    terms = list(range(histogram.size))  # of which the mechanism counts the first S
    held_V = np.arange(histogram.size) < S

    def draw(with_unit: bool, trials: int) -> Scores:
        others_V = histogram.count([terms] * OTHER_RECORDS)
        counts_V = histogram.count([terms] * (OTHER_RECORDS + k * with_unit))
        # The scale does not depend on the size, so one long histogram holds all trials.
        long = replace(histogram, size=histogram.size * trials)
        drawn_RV = long(np.tile(counts_V, trials)).reshape(trials, -1)
        return laplace_scores(drawn_RV - others_V, k * held_V, histogram.scale)

    return Target(
        name,
        f"{k} more record(s) of {held_V.sum()} terms, and {(~held_V).sum()} beyond them",
        histogram.dp_event,
        draw,
        at_once=1000,
    )


def densities_target(name: str, kde: FeatureSum, estimators: int) -> Target:
    """Audit the sums of features. In every feature of every estimator of its class, the unit
    contributes more than it may, all in one direction. With fewer features, noise and sensitivity
    shrink in the same proportion; the claim is that of the features drawn."""
    kde = replace(kde, number=min(kde.number, MOST_FEATURES))
    k = kde.records_per_unit

    def draw(with_unit: bool, trials: int) -> Scores:
        others_I = np.zeros((OTHER_RECORDS, kde.number))
        unit_I = np.full((k, kde.number), FAR_TOO_LONG)
        total_I = kde.sum([others_I, unit_I] if with_unit else [others_I])
        # One sum of R I features holds all trials: its sensitivity is larger by R in L1, by sqrt(R)
        # in L2, its multiplier smaller by as much, and its noise the same.
        larger = trials if kde.noise == "laplace" else math.sqrt(trials)
        long = replace(
            kde, number=kde.number * trials, noise_multiplier=kde.noise_multiplier / larger
        )
        # The ratio of Gaussian noise grows with the sum: all statistics are one there.
        scores = np.zeros((3, trials))
        for _ in range(estimators):
            released_RI = long(np.tile(total_I, trials)).reshape(trials, -1)
            scores += laplace_scores(released_RI, k * LARGEST / GRID, kde.scale)
        return scores

    return Target(
        name,
        f"{k} more record(s) as large as the cut allows in all {kde.number} features",
        SelfComposed(kde.dp_event, estimators),
        draw,
        at_once=5000,
    )

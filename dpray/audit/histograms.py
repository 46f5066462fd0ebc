"""Audits of noisy counts and sums: votes, vocabularies, densities, labels.

The unit does the most that it may. One statistic is the log-likelihood ratio of the two worlds
under the claimed noise: of a right mechanism no test of the same draws tells more (Neyman and
Pearson 1933). The other is the plain sum, which sees a unit that does more than it may.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.accounting.events import SelfComposed
from dpray.audit.monte_carlo import MonteCarlo, Scores
from dpray.mechanisms.label_histogram import LabelHistogram
from dpray.methods.aug_pe.votes import VoteHistogram, count_votes
from dpray.methods.dp_kps.kde import GRID, LARGEST, FeatureSum
from dpray.methods.dp_kps.vocabulary import VocabularyHistogram

OTHERS = 20
"""Records of the world without the unit."""

FAR_TOO_LONG = 1e3
"""Of a feature, where the largest that a record may give is sqrt(2)."""


MOST_FEATURES = 20
"""Drawn of an estimator: exact noise takes some microseconds a feature."""


def labels_target(histogram: LabelHistogram) -> MonteCarlo:
    """All of the unit's records have one label."""
    label, k = histogram.labels[0], histogram.records_per_unit

    def draw(with_unit: bool, trials: int) -> Scores:
        records = [label] * (OTHERS + k * with_unit)
        counts = histogram.count(records)
        released = histogram.noisy(np.tile(counts[:1], trials))
        return _statistics((released - OTHERS)[:, None], k, histogram.scale)

    return MonteCarlo(
        "label histogram", f"{k} more of one label", histogram.dp_event, draw, at_once=500
    )


def votes_target(votes: VoteHistogram, iterations: int) -> MonteCarlo:
    """All of the unit's votes fall on one text, in every one of the iterations."""
    texts = np.eye(2, dtype=np.float32)
    others, unit = np.tile(texts, (OTHERS // 2, 1)), np.tile(texts[:1], (votes.votes_per_unit, 1))

    def draw(with_unit: bool, trials: int) -> Scores:
        counts = count_votes(np.concatenate([others, unit]) if with_unit else others, texts)
        # The other text's count says nothing: its noise is drawn in the mechanism's own tests.
        released = votes.noisy(np.tile(counts[:1], iterations * trials))
        # For Gaussian noise the sum holds all there is.
        return released.reshape(trials, iterations).sum(axis=1, dtype=np.float64)[None]

    return MonteCarlo(
        f"vote histogram, {iterations} iterations" if iterations > 1 else "vote histogram",
        f"{votes.votes_per_unit} more votes for one text in each",
        SelfComposed(votes.dp_event, iterations),
        draw,
        at_once=max(1, 20_000 // iterations),
    )


def vocabulary_target(name: str, histogram: VocabularyHistogram) -> MonteCarlo:
    """Every record of the unit holds the same S terms. Only their counts are drawn: the others'
    are the same in both worlds."""
    S, k = histogram.phrases_per_record, histogram.records_per_unit
    histogram = replace(histogram, size=min(histogram.size, 2 * S))
    terms = list(range(histogram.size))  # of which the mechanism counts the first S

    def draw(with_unit: bool, trials: int) -> Scores:
        counts_V = histogram.count([terms] * (OTHERS + k * with_unit))
        drawn = np.stack([histogram.noisy(counts_V) for _ in range(trials)])
        others_V = OTHERS * (np.arange(histogram.size) < S)
        return _statistics(drawn - others_V, k, histogram.dp_event.scale)

    return MonteCarlo(
        name,
        f"{k} more record(s) of {S} terms, and {len(terms) - S} beyond them",
        histogram.dp_event,
        draw,
        at_once=250,
    )


def densities_target(name: str, kde: FeatureSum, estimators: int) -> MonteCarlo:
    """The unit's records ask for more than they may give in every feature of every estimator of
    their class, all in one direction. The sensitivity and the noise of fewer features are smaller
    in the same proportion: what is claimed stays the same, and a unit hides less well."""
    kde = replace(kde, number=min(kde.number, MOST_FEATURES))
    k = kde.records_per_unit

    def draw(with_unit: bool, trials: int) -> Scores:
        others_I = np.zeros((OTHERS, kde.number))
        unit_I = np.full((k, kde.number), FAR_TOO_LONG)
        total_I = kde.sum([others_I, unit_I] if with_unit else [others_I])
        # The ratio of Gaussian noise grows with the sum: two statistics are one there.
        scores = np.zeros((2, trials))
        for _ in range(estimators):
            released_RI = np.stack([kde.noisy(total_I) for _ in range(trials)])
            scores += _statistics(released_RI, k * LARGEST / GRID, kde.scale)
        return scores

    return MonteCarlo(
        name,
        f"{k} more record(s) as large as the cut allows in all {kde.number} features",
        SelfComposed(kde.dp_event, estimators),
        draw,
        at_once=max(1, 500_000 // kde.number),
    )


def _statistics(x_RN: npt.NDArray[Any], shift: float, scale: float) -> Scores:
    """Of R draws, less what all but the unit gave: the log-likelihood ratio of Laplace noise of a
    scale around `shift` to the same around 0, and the sum; shape (2, R)."""
    x_RN = np.asarray(x_RN, dtype=np.float64)
    ratio_RN = (np.abs(x_RN) - np.abs(x_RN - shift)) / scale
    return np.stack([ratio_RN.sum(axis=1), x_RN.sum(axis=1)])

"""Audit targets of the mechanisms that several methods use: the label histogram and the votes."""

from __future__ import annotations

import numpy as np

from dpray.accounting.composed_events import SelfComposed
from dpray.auditing.monte_carlo import MonteCarlo, Scores, laplace_scores
from dpray.mechanisms.labels import LabelHistogram
from dpray.mechanisms.votes import VoteHistogram, count_votes

OTHERS = 20
"""Number of records in the world without the unit."""


def labels_target(histogram: LabelHistogram) -> MonteCarlo:
    """Audit the label histogram; all of the unit's records have one label."""
    label, k = histogram.labels[0], histogram.records_per_unit

    def draw(with_unit: bool, trials: int) -> Scores:
        counts = histogram.count([label] * (OTHERS + k * with_unit))
        released = histogram(np.tile(counts[:1], trials))
        return laplace_scores((released - OTHERS)[:, None], k, histogram.scale)

    return MonteCarlo("label histogram", f"{k} more of one label", histogram.dp_event, draw)


def votes_target(name: str, votes: VoteHistogram, iterations: int = 1) -> MonteCarlo:
    """Audit the votes; those of all the unit's records fall on the same text, in every
    iteration."""
    k, texts = votes.records_per_unit, np.eye(2, dtype=np.float32)
    others, unit = np.tile(texts, (OTHERS // 2, 1)), np.tile(texts[:1], (k, 1))

    def draw(with_unit: bool, trials: int) -> Scores:
        private = np.concatenate([others, unit]) if with_unit else others
        # The other text's count is the same in both worlds.
        count = count_votes(private, texts)[:1]
        released = votes(np.tile(count, iterations * trials))
        # This sum is a sufficient statistic of Gaussian noise.
        scores = released.reshape(trials, iterations)
        return scores.sum(axis=1, dtype=np.float64)[None]

    return MonteCarlo(
        name,
        f"{k} more record(s) that vote for the same text in each",
        SelfComposed(votes.dp_event, iterations),
        draw,
        at_once=max(1, 20_000 // iterations),
    )

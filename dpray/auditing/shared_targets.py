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
    """Audit the votes; those of all the unit's records fall on the same texts, in every
    iteration."""
    k, Q = votes.records_per_unit, votes.votes_per_record
    texts = np.eye(Q + 1, dtype=np.float32)
    # The unit is nearest to the first text, then to the second, and so on.
    one = np.linspace(1.0, 0.0, Q + 1, dtype=np.float32)[None]
    others, unit = np.tile(texts, (OTHERS // 2, 1)), np.tile(one / np.linalg.norm(one), (k, 1))

    def draw(with_unit: bool, trials: int) -> Scores:
        private = np.concatenate([others, unit]) if with_unit else others
        # The last text's count is the same in both worlds.
        counts_Q = count_votes(private, texts, votes.weights)[:Q]
        released = votes(np.tile(counts_Q, iterations * trials))
        # This sum is a sufficient statistic of Gaussian noise.
        scores = released.reshape(trials, iterations, Q) @ np.array(votes.weights)
        return scores.sum(axis=1, dtype=np.float64)[None]

    return MonteCarlo(
        name,
        f"{k} more record(s) that vote for the same {Q} text(s) in each",
        SelfComposed(votes.dp_event, iterations),
        draw,
        at_once=max(1, 20_000 // iterations),
    )

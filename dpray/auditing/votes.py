"""`votes_target` audits the noisy votes of private records for their nearest public candidates."""

from __future__ import annotations

import numpy as np

from dpray.accounting.composed_events import SelfComposed
from dpray.auditing.labels import OTHERS
from dpray.auditing.monte_carlo import MonteCarlo, Scores
from dpray.mechanisms.votes import VoteHistogram, count_votes


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

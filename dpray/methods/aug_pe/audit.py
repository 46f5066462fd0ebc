"""The audit of Aug-PE bounds the epsilon of its noisy votes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpray.accounting.composed_events import SelfComposed
from dpray.auditing.labels import OTHERS
from dpray.auditing.monte_carlo import MonteCarlo, Scores
from dpray.auditing.target import Target
from dpray.methods.aug_pe.algorithm import AugPe
from dpray.methods.aug_pe.votes import VoteHistogram, count_votes


def targets(plan: AugPe) -> Iterator[Target]:
    """Yield one vote histogram, and those of all iterations together."""
    assert plan.votes is not None
    for iterations in sorted({1, plan.settings.iterations}):
        yield votes_target(plan.votes, iterations)


def votes_target(votes: VoteHistogram, iterations: int) -> MonteCarlo:
    """Audit the votes; all of the unit's fall on one text, in every iteration."""
    texts = np.eye(2, dtype=np.float32)
    others, unit = np.tile(texts, (OTHERS // 2, 1)), np.tile(texts[:1], (votes.votes_per_unit, 1))

    def draw(with_unit: bool, trials: int) -> Scores:
        counts = count_votes(np.concatenate([others, unit]) if with_unit else others, texts)
        # The other text's count is the same in both worlds.
        released = votes.noisy(np.tile(counts[:1], iterations * trials))
        # The sum is a sufficient statistic of Gaussian noise.
        return released.reshape(trials, iterations).sum(axis=1, dtype=np.float64)[None]

    return MonteCarlo(
        f"vote histogram, {iterations} iterations" if iterations > 1 else "vote histogram",
        f"{votes.votes_per_unit} more votes for one text in each",
        SelfComposed(votes.dp_event, iterations),
        draw,
        at_once=max(1, 20_000 // iterations),
    )

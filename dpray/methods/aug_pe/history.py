"""An iteration's noisy votes and kept texts show the run's progress; all of it is public."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpray.methods.aug_pe.algorithm import Checkpoint, Population

QUANTILES = (0.1, 0.5, 0.9)


def iteration_history(checkpoint: Checkpoint, kept: Population) -> dict[str, Any]:
    """Return the concentration of the noisy votes and the lengths of the kept texts;
    post-processing.

    `top_tenth_share` is the share of the votes, cut at 0, that the tenth of texts with the most
    have: 0.1 where all have as many, more where the votes agree. `effective_texts` is the inverse
    of the sum of the squared shares.
    """
    votes_N = np.concatenate([np.array(v, dtype=np.float64) for v in checkpoint.votes.values()])
    shares_N = np.sort(np.maximum(votes_N, 0.0))[::-1]
    total = shares_N.sum()
    words = [len(text.split()) for texts in kept.values() for text in texts]
    tenth = max(1, round(len(shares_N) / 10))
    return {
        "iteration": checkpoint.iteration,
        "population": len(votes_N),
        "kept": len(words),
        "top_tenth_share": float(shares_N[:tenth].sum() / total) if total else None,
        "effective_texts": float(total**2 / (shares_N**2).sum()) if total else None,
        "words": {str(q): float(np.quantile(words, q)) for q in QUANTILES},
    }

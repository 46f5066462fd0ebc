"""Lengths of texts, in words: do synthetic texts have the lengths of real ones?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import wasserstein_distance

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 24


def compare_lengths(
    synthetic: Sequence[str], train: Sequence[str], test: Sequence[str], seeds: int
) -> dict[str, Any]:
    """Word counts of the real test texts and the synthetic ones, and the 1-Wasserstein distance
    between the two, in words (Villani 2009, Section 6).

    The yardstick is the same distance between the real test texts and other real ones. The distance
    of two samples shrinks with their size, so both are taken between samples of equal sizes: every
    seed draws (bootstrap) as many synthetic as other real texts, and the test texts anew. All
    sequences are non-empty.
    """
    synthetic_words, train_words, test_words = (_words(t) for t in (synthetic, train, test))
    size = min(len(synthetic_words), len(train_words))
    distances: list[float] = []
    yardsticks: list[float] = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        for words, found in ((synthetic_words, distances), (train_words, yardsticks)):
            sample, tested = rng.choice(words, size), rng.choice(test_words, len(test_words))
            found.append(float(wasserstein_distance(sample, tested)))
    return {
        "unit": "words",
        "real": _summary(test_words),
        "synthetic": _summary(synthetic_words),
        "histogram": _histogram(test_words, synthetic_words),
        "wasserstein": {
            "synthetic_to_real": mean_and_deviation(distances),
            "real_to_real": mean_and_deviation(yardsticks),
            "sample_size": size,
        },
    }


def mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation (of the sample; 0 for one value)."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "deviation": deviation}


def _words(texts: Sequence[str]) -> np.ndarray:
    return np.array([len(text.split()) for text in texts])


def _summary(words: np.ndarray) -> dict[str, Any]:
    quantiles = {str(q): float(np.quantile(words, q)) for q in QUANTILES}
    return {"mean": float(words.mean()), "quantiles": quantiles}


def _histogram(real: np.ndarray, synthetic: np.ndarray) -> dict[str, list[float]]:
    """Shares of the texts in bins of equal width; what is longer than the 99 % quantiles of both is
    in the last bin."""
    longest = max(np.quantile(real, 0.99), np.quantile(synthetic, 0.99))
    edges = np.arange(BINS + 1) * max(1, int(np.ceil(longest / BINS)))
    shares = [
        np.histogram(np.minimum(words, edges[-1]), bins=edges)[0] / len(words)
        for words in (real, synthetic)
    ]
    return {
        "edges": [int(edge) for edge in edges],
        "real": shares[0].tolist(),
        "synthetic": shares[1].tolist(),
    }

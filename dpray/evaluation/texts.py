"""Texts are measured by their words: how long they are and how varied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from scipy.stats import wasserstein_distance

from dpray.evaluation.scores import summaries

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 24
NGRAMS = (1, 2, 3)


def compare_lengths(
    synthetic: Sequence[str], train: Sequence[str], test: Sequence[str], seeds: int
) -> dict[str, Any]:
    """Compare the word counts of synthetic and of real test texts, and measure the 1-Wasserstein
    distance between the two, in words (Villani 2009, Section 6).

    The yardstick is the same distance between the real test texts and other real ones (`train`).
    The distance of two samples shrinks with their size, so every seed draws (bootstrap) as many
    synthetic as other real texts, and the test texts anew. No sequence is empty.
    """
    synthetic_words, train_words, test_words = (
        np.array([len(text.split()) for text in texts]) for texts in (synthetic, train, test)
    )
    size = min(len(synthetic), len(train))
    sides = {"synthetic_to_real": synthetic_words, "real_to_real": train_words}
    draws: list[dict[str, float]] = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        draws.append({})
        for side, words in sides.items():
            sample, tested = rng.choice(words, size), rng.choice(test_words, len(test_words))
            draws[-1][side] = float(wasserstein_distance(sample, tested))
    return {
        "unit": "words",
        "real": _summary(test_words),
        "synthetic": _summary(synthetic_words),
        "histogram": _histogram(test_words, synthetic_words),
        "wasserstein": {**summaries(draws), "sample_size": size},
    }


def _summary(words: np.ndarray) -> dict[str, Any]:
    quantiles = {str(q): float(np.quantile(words, q)) for q in QUANTILES}
    return {"mean": float(words.mean()), "quantiles": quantiles}


def _histogram(real: np.ndarray, synthetic: np.ndarray) -> dict[str, Any]:
    """Return the shares of the texts in bins of equal width; the last bin also holds all texts
    longer than the 99 % quantiles of both."""
    longest = max(np.quantile(real, 0.99), np.quantile(synthetic, 0.99))
    edges = np.arange(BINS + 1) * max(1, int(np.ceil(longest / BINS)))

    def shares(words: np.ndarray) -> list[float]:
        counts = np.histogram(np.minimum(words, edges[-1]), bins=edges)[0]
        return list((counts / len(words)).tolist())

    return {"edges": edges.tolist(), "real": shares(real), "synthetic": shares(synthetic)}


def compare_diversity(
    synthetic: Sequence[str], real: Sequence[str], other: Sequence[str], seeds: int
) -> dict[str, Any]:
    """Measure distinct-n of synthetic and real texts, over `seeds` draws of equally many of each,
    and the share of different texts in each whole set. `other` real texts are the yardstick."""
    sides = {"synthetic": synthetic, "real": real, "other_real": other}
    size = min(len(texts) for texts in sides.values())
    result: dict[str, Any] = {"records_a_side": size}
    for name, texts in sides.items():
        draws = []
        for seed in range(seeds):
            rows = np.random.default_rng(seed).choice(len(texts), size, replace=False)
            drawn = [texts[i] for i in rows]
            draws.append({f"distinct_{n}": distinct(drawn, n) for n in NGRAMS})
        result[name] = {**summaries(draws), "distinct_texts": len(set(texts)) / len(texts)}
    return result


def distinct(texts: Sequence[str], n: int) -> float:
    """Return distinct-n: the number of different n-grams of words over that of all (Li et al. 2016,
    Section 5.3), 0 where no text has n words. It falls with the amount of text: compare equal
    amounts only."""
    grams: set[tuple[str, ...]] = set()
    total = 0
    for text in texts:
        words = text.lower().split()
        found = list(zip(*(islice(words, start, None) for start in range(n)), strict=False))
        total += len(found)
        grams.update(found)
    return len(grams) / total if total else 0.0

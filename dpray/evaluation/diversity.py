"""How varied the texts are, within themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from dpray.evaluation.lengths import mean_and_deviation

NGRAMS = (1, 2, 3)


def distinct(texts: Sequence[str], n: int) -> float:
    """distinct-n: different n-grams of words out of all (Li et al. 2016, Section 5.3); 0 where no
    text has so many words. It falls with the amount of text: compare equal amounts only."""
    grams: set[tuple[str, ...]] = set()
    total = 0
    for text in texts:
        words = text.lower().split()
        found = list(zip(*(islice(words, start, None) for start in range(n)), strict=False))
        total += len(found)
        grams.update(found)
    return len(grams) / total if total else 0.0


def compare_diversity(
    synthetic: Sequence[str], real: Sequence[str], other: Sequence[str], seeds: int
) -> dict[str, Any]:
    """distinct-n of synthetic and real texts, over `seeds` draws of equally many of each, and the
    share of different texts in each whole set. `other` are more real texts: the yardstick."""
    sides = {"synthetic": synthetic, "real": real, "other_real": other}
    size = min(len(texts) for texts in sides.values())
    result: dict[str, Any] = {"records_a_side": size}
    for name, texts in sides.items():
        draws = []
        for seed in range(seeds):
            rows = np.random.default_rng(seed).choice(len(texts), size, replace=False)
            draws.append([texts[i] for i in rows])
        result[name] = {
            f"distinct_{n}": mean_and_deviation([distinct(draw, n) for draw in draws])
            for n in NGRAMS
        }
        result[name]["distinct_texts"] = len(set(texts)) / len(texts)
    return result

"""The noisy votes decide which texts survive an iteration of Aug-PE (Xie et al. 2024, step 3).

Post-processing: only noisy votes come in, so nothing here touches private data or costs privacy.
Draws take an explicit generator. The threshold H is the paper's 0: counts are cut at 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpray.mechanisms.discrete_noise import Counts


def cut_at_zero(noisy_N: Counts) -> Counts:
    """Return `max(noisy - H, 0)` with the paper's H = 0."""
    cut: Counts = np.maximum(noisy_N, 0)
    return cut


def select_by_rank(noisy_N: Counts, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the indices of the n most voted texts, each at most once, best first (Aug-PE).

    Ties, of which there are many at 0, are broken at random: by index they would favour whatever
    the population lists first. Raises ValueError unless 0 <= n <= N.
    """
    if not 0 <= n <= len(noisy_N):
        raise ValueError(f"cannot select {n} of {len(noisy_N)} texts")
    shuffled = rng.permutation(len(noisy_N))
    order = np.argsort(-cut_at_zero(noisy_N)[shuffled], kind="stable")
    return shuffled[order[:n]]


def select_by_probability(
    noisy_N: Counts, n: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw n indices with replacement in proportion to the counts cut at 0 (original PE).

    Uniform where no count is over 0. Raises ValueError for a negative n or an empty population.
    """
    if n < 0 or not len(noisy_N):
        raise ValueError(f"cannot draw {n} of {len(noisy_N)} texts")
    weights_N = cut_at_zero(noisy_N).astype(np.float64)
    if not weights_N.any():
        weights_N[:] = 1.0
    return rng.choice(len(noisy_N), size=n, replace=True, p=weights_N / weights_N.sum())

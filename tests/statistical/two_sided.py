"""Tests of samplers that accept the right noise and reject 2/3 and 3/2 of it.

False-alarm rate: with `ALPHA` a right sampler fails one test in a million runs of it; the sample
sizes are chosen so that the wrong scales are accepted even more rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

ALPHA = 1e-6
WRONG_SCALES = (2 / 3, 3 / 2)


def fits_distribution(sample: npt.NDArray[np.float64], cdf: Callable[..., object]) -> bool:
    """Kolmogorov-Smirnov at ALPHA."""
    return bool(stats.kstest(sample, cdf).pvalue > ALPHA)


def fits_probabilities(counts: Sequence[int], probabilities: Sequence[float]) -> bool:
    """Chi-square goodness of fit at ALPHA; cells below 5 expected are pooled."""
    observed, p = np.asarray(counts, float), np.asarray(probabilities, float)
    expected = p / p.sum() * observed.sum()
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] == 0:
            observed, expected = observed[:-1], expected[:-1]
    return bool(stats.chisquare(observed, expected).pvalue > ALPHA)

"""This module audits measured label proportions, and has the statistics of Laplace noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.auditing.monte_carlo import MonteCarlo, Scores
from dpray.mechanisms.labels import LabelHistogram

OTHERS = 20
"""The world without the unit has so many records."""


def labels_target(histogram: LabelHistogram) -> MonteCarlo:
    """Audit the label histogram; all of the unit's records have one label."""
    label, k = histogram.labels[0], histogram.records_per_unit

    def draw(with_unit: bool, trials: int) -> Scores:
        counts = histogram.count([label] * (OTHERS + k * with_unit))
        released = histogram(np.tile(counts[:1], trials))
        return laplace_scores((released - OTHERS)[:, None], k, histogram.scale)

    return MonteCarlo("label histogram", f"{k} more of one label", histogram.dp_event, draw)


def laplace_scores(x_RN: npt.NDArray[Any], shift: float | npt.NDArray[Any], scale: float) -> Scores:
    """Return three statistics of R draws from which the other records' part is subtracted, shape
    (3, R).

    The first is the log-likelihood ratio of Laplace noise around `shift` (one, or one for each of N
    values) to the same around 0: for a correct mechanism no test of the same draws is more powerful
    (Neyman and Pearson 1933). The second is that of twice the shift, and the third the plain sum in
    units of the scale: they show a unit that contributes more than it may.
    """
    x_RN = np.asarray(x_RN, dtype=np.float64)
    ratios = (np.abs(x_RN) - np.abs(x_RN - times * shift) for times in (1, 2))
    return np.stack([values_RN.sum(axis=1) / scale for values_RN in (*ratios, x_RN)])

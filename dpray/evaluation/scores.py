"""Scores that several measures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, f1_score


def mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the sample's standard deviation (0 for one value)."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "deviation": deviation}


def accuracy_and_f1(truth: Any, predicted: np.ndarray) -> dict[str, float]:
    """Return accuracy and macro F1; the F1 averages over the labels that occur in `truth`, because
    no record of another label could be found."""
    macro_f1 = f1_score(
        truth, predicted, labels=np.unique(truth), average="macro", zero_division=0.0
    )
    return {"accuracy": float(accuracy_score(truth, predicted)), "macro_f1": float(macro_f1)}


def summaries(scores: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the mean and deviation of each measure over the repetitions."""
    return {name: mean_and_deviation([one[name] for one in scores]) for name in scores[0]}

"""How well a classifier trained on synthetic records does on real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score

from dpray.evaluation.lengths import mean_and_deviation


@dataclass(frozen=True)
class Embedded:
    """Vectors of shape (records, dimension) and their labels, shape (records,), or None."""

    vectors: np.ndarray
    labels: Any


def majority_class(train: Embedded) -> DummyClassifier:
    """The classifier that always answers the most common label of `train`."""
    return DummyClassifier(strategy="most_frequent").fit(train.vectors, train.labels)


def logistic_regression(train: Embedded) -> LogisticRegression:
    """Multinomial logistic regression, scikit-learn's default penalty. Needs two labels."""
    return LogisticRegression(max_iter=1000).fit(train.vectors, train.labels)


def compare_downstream(
    synthetic: Embedded, train: Embedded, test: Embedded, floor: Embedded | None, seeds: int
) -> dict[str, Any]:
    """Accuracy and macro F1 on the real test records of a classifier trained on synthetic records,
    beside one trained on real records (ceiling) and one that never saw private data or what was
    made of it (floor: trained on `floor`, or the most common real label).

    Fitting has no randomness of its own, so each seed resamples both the training and the test
    records (bootstrap, label by label): the deviation covers the choice of either.
    """
    floor_kind, floor_set = ("file", floor) if floor is not None else ("majority class", train)
    fits = {
        "synthetic": (logistic_regression, synthetic),
        "ceiling": (logistic_regression, train),
        "floor": (majority_class if floor is None else logistic_regression, floor_set),
    }
    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in fits}
    for seed in range(seeds):
        tested = _bootstrap(test, np.random.default_rng([seed, 0]))
        for name, (fit, data) in fits.items():
            fitted = fit(_bootstrap(data, np.random.default_rng([seed, 1])))
            scores[name].append(_score(tested.labels, fitted.predict(tested.vectors)))
    result = {name: _summary(values, fits[name][1]) for name, values in scores.items()}
    result["floor"]["kind"] = floor_kind
    return {"classifier": "logistic regression on embeddings", "seeds": seeds, **result}


def label_counts(labels: Sequence[str]) -> dict[str, int]:
    """How often each label occurs, in the order of their names."""
    names, counts = np.unique(np.asarray(labels), return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def _bootstrap(data: Embedded, rng: np.random.Generator) -> Embedded:
    rows = np.concatenate(
        [
            rng.choice(members, len(members))
            for members in (np.flatnonzero(data.labels == name) for name in np.unique(data.labels))
        ]
    )
    return Embedded(data.vectors[rows], data.labels[rows])


def _score(truth: np.ndarray, predicted: np.ndarray) -> tuple[float, float]:
    macro_f1 = f1_score(
        truth, predicted, labels=np.unique(truth), average="macro", zero_division=0.0
    )
    return float(accuracy_score(truth, predicted)), float(macro_f1)


def _summary(scores: Sequence[tuple[float, float]], trained_on: Embedded) -> dict[str, Any]:
    accuracy, macro_f1 = zip(*scores, strict=True)
    return {
        "accuracy": mean_and_deviation(accuracy),
        "macro_f1": mean_and_deviation(macro_f1),
        "train_records": len(trained_on.labels),
    }

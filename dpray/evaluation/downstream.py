"""How well a classifier trained on synthetic records does on real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Predictor(Protocol):
    """A fitted classifier."""

    def predict(self, vectors: np.ndarray) -> np.ndarray:
        """A label for each row."""
        ...


Fit = Callable[[Embedded, np.ndarray, int], Predictor]
"""Trains on labelled vectors; may use the unlabelled target vectors and the seed."""


def majority_class(train: Embedded) -> DummyClassifier:
    """The classifier that always answers the most common label of `train`."""
    return DummyClassifier(strategy="most_frequent").fit(train.vectors, train.labels)


def logistic_regression(train: Embedded) -> LogisticRegression:
    """Multinomial logistic regression, scikit-learn's default penalty. Needs two labels."""
    return LogisticRegression(max_iter=1000).fit(train.vectors, train.labels)


def compare_downstream(
    synthetic: Embedded,
    train: Embedded,
    test: Embedded,
    floor: Embedded | None,
    seeds: int,
    networks: bool = False,
) -> dict[str, Any]:
    """Accuracy and macro F1 on the real test records of a classifier trained on synthetic records,
    beside one trained on real records (ceiling) and one that never saw private data or what was
    made of it (floor: trained on `floor`, or the most common real label).

    The classifier is a logistic regression. `networks` adds the DP-KPS paper's (Nagesh et al. 2025,
    Section 3.1), without and with Deep CORAL towards the test records, of which it sees no label.

    Each seed resamples both the training and the test records (bootstrap, label by label): the
    deviation covers the choice of either, and a network's initial weights.
    """
    data = {"synthetic": synthetic, "ceiling": train, "floor": train if floor is None else floor}

    def compare(name: str, fit: Fit) -> dict[str, Any]:
        fits = dict.fromkeys(data, fit)
        if floor is None:
            fits["floor"] = _majority
        scores: dict[str, list[tuple[float, float]]] = {key: [] for key in data}
        for seed in range(seeds):
            tested = _bootstrap(test, np.random.default_rng([seed, 0]))
            for key, trained_on in data.items():
                drawn = _bootstrap(trained_on, np.random.default_rng([seed, 1]))
                predicted = fits[key](drawn, tested.vectors, seed).predict(tested.vectors)
                scores[key].append(_score(tested.labels, predicted))
        result = {key: _summary(values, data[key]) for key, values in scores.items()}
        result["floor"]["kind"] = "majority class" if floor is None else "file"
        return {"classifier": name, "seeds": seeds, **result}

    result = compare(
        "logistic regression on embeddings", lambda drawn, *_: logistic_regression(drawn)
    )
    result["networks"] = [compare(name, fit) for name, fit in _network_fits()] if networks else []
    return result


def label_counts(labels: Sequence[str]) -> dict[str, int]:
    """How often each label occurs, in the order of their names."""
    names, counts = np.unique(np.asarray(labels), return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def _majority(train: Embedded, target_vectors: np.ndarray, seed: int) -> Predictor:
    return majority_class(train)


def _network_fits() -> list[tuple[str, Fit]]:
    from dpray.evaluation.network import three_layer_network

    return [
        (
            "3-layer network on embeddings",
            lambda drawn, _, seed: three_layer_network(drawn, None, seed),
        ),
        ("3-layer network with Deep CORAL", three_layer_network),
    ]


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

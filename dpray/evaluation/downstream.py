"""How well a classifier trained on synthetic records does on real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

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
    """`compare_classifier` for a logistic regression, with its figures for each label as `classes`
    (`_by_class`). `networks` adds the DP-KPS paper's (Nagesh et al. 2025, Section 3.1), without and
    with Deep CORAL towards the test records, of which it sees no label.
    """
    sides = (synthetic, train, test, floor, seeds)
    result, counts = _compare("logistic regression on embeddings", _logistic, *sides)
    result["classes"] = _by_class(test.labels, counts)
    fits = _network_fits() if networks else []
    result["networks"] = [compare_classifier(name, fit, *sides) for name, fit in fits]
    return result


def compare_classifier(
    name: str,
    fit: Fit,
    synthetic: Embedded,
    train: Embedded,
    test: Embedded,
    floor: Embedded | None,
    seeds: int,
) -> dict[str, Any]:
    """Accuracy and macro F1 on the real test records of a classifier trained on synthetic records,
    beside one trained on real records (ceiling) and one that never saw private data or what was
    made of it (floor: trained on `floor`, or the most common real label).

    Each seed resamples both the training and the test records (bootstrap, label by label): the
    deviation covers the choice of either, and the initial weights of what has some.
    """
    return _compare(name, fit, synthetic, train, test, floor, seeds)[0]


def _compare(
    name: str,
    fit: Fit,
    synthetic: Embedded,
    train: Embedded,
    test: Embedded,
    floor: Embedded | None,
    seeds: int,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`compare_classifier`'s answer, and how often each label of the test (rows) was predicted as
    which (columns), shape (seeds, labels, labels)."""
    data = {"synthetic": synthetic, "ceiling": train, "floor": train if floor is None else floor}
    fits = dict.fromkeys(data, fit)
    if floor is None:
        fits["floor"] = _majority
    scores: dict[str, list[tuple[float, float]]] = {key: [] for key in data}
    counts: dict[str, list[np.ndarray]] = {key: [] for key in data}
    classes = np.unique(test.labels)
    for seed in range(seeds):
        tested = _bootstrap(test, np.random.default_rng([seed, 0]))
        for key, trained_on in data.items():
            drawn = _bootstrap(trained_on, np.random.default_rng([seed, 1]))
            predicted = fits[key](drawn, tested.vectors, seed).predict(tested.vectors)
            scores[key].append(_score(tested.labels, predicted))
            counts[key].append(confusion_matrix(tested.labels, predicted, labels=classes))
    result = {key: _summary(values, data[key]) for key, values in scores.items()}
    result["floor"]["kind"] = "majority class" if floor is None else "file"
    stacked = {key: np.stack(of_seeds) for key, of_seeds in counts.items()}
    return {"classifier": name, "seeds": seeds, **result}, stacked


def _by_class(truth: np.ndarray, counts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Of classifiers trained on synthetic records and on real ones (ceiling): each label's accuracy
    (recall), and the shares of its test records that got which label (`confusion`, a row a label;
    what is left got labels that the test has not)."""
    names, records = np.unique(truth, return_counts=True)
    found: dict[str, Any] = {"labels": [str(name) for name in names], "records": records.tolist()}
    for key in ("synthetic", "ceiling"):
        # The bootstrap goes label by label: each label has as many test records in every seed.
        shares = counts[key] / records[:, None]
        recalls = np.diagonal(shares, axis1=1, axis2=2)
        found[key] = {
            "accuracy": [mean_and_deviation(of_label) for of_label in recalls.T.tolist()],
            "confusion": shares.mean(axis=0).round(4).tolist(),
        }
    return found


def label_counts(labels: Sequence[str]) -> dict[str, int]:
    """How often each label occurs, in the order of their names."""
    names, counts = np.unique(np.asarray(labels), return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def _logistic(train: Embedded, target_vectors: np.ndarray, seed: int) -> Predictor:
    return logistic_regression(train)


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

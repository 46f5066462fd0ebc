"""Classifiers are trained on synthetic records and tested on real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix

from dpray.evaluation.scores import accuracy_and_f1, mean_and_deviation, summaries


@dataclass(frozen=True)
class Embedded:
    """An `Embedded` set has `vectors` of shape (records, dimension), and `labels` of shape
    (records,) or None. For a fine-tuned encoder, `vectors` are the texts, shape (records,)."""

    vectors: np.ndarray
    labels: Any


class Predictor(Protocol):
    """A `Predictor` is a fitted classifier."""

    def predict(self, vectors: np.ndarray) -> np.ndarray:
        """Return a label for each row."""
        ...


Fit = Callable[[Embedded, np.ndarray, int], Predictor]
"""A `Fit` trains on labelled vectors; it may use the unlabelled target vectors and the seed."""


def logistic_regression(train: Embedded) -> LogisticRegression:
    """Fit multinomial logistic regression with scikit-learn's default penalty; needs two labels."""
    with warnings.catch_warnings():
        # Where labels are many and texts few, scikit-learn takes labels for numbers.
        warnings.filterwarnings("ignore", message="The number of unique classes is greater")
        return LogisticRegression(max_iter=1000).fit(train.vectors, train.labels)


def compare_downstream(sets: Mapping[str, Embedded], test: Embedded, seeds: int) -> dict[str, Any]:
    """Return `compare_classifier` of a logistic regression, with its figures for each label."""
    name = "logistic regression on embeddings"
    return compare_classifier(
        name, lambda train, *_: logistic_regression(train), sets, test, seeds, by_class=True
    )


def compare_classifier(
    name: str,
    fit: Fit,
    sets: Mapping[str, Embedded],
    test: Embedded,
    seeds: int,
    by_class: bool = False,
) -> dict[str, Any]:
    """Return accuracy and macro F1, on the real test records, of a classifier trained on each of
    `sets`: `synthetic` records; real records (`ceiling`); and `floor`, texts that owe nothing to
    the private data. Without a `floor` the answer is always the most common label of the ceiling.

    Each seed resamples both the training and the test records (bootstrap, label by label): the
    deviation covers the choice of either, and the random initial weights of classifiers that have
    some. `by_class` adds `classes` (`_by_class`).
    """
    baseline = {} if "floor" in sets else {"floor": sets["ceiling"]}
    result: dict[str, Any] = {"classifier": name, "seeds": seeds}
    counts: dict[str, list[np.ndarray]] = {}
    classes = np.unique(test.labels)
    for key, records in {**sets, **baseline}.items():
        fit_one = _majority_class if key in baseline else fit
        scores, counts[key] = [], []
        for seed in range(seeds):
            tested = _bootstrap(test, np.random.default_rng([seed, 0]))
            drawn = _bootstrap(records, np.random.default_rng([seed, 1]))
            predicted = fit_one(drawn, tested.vectors, seed).predict(tested.vectors)
            scores.append(accuracy_and_f1(tested.labels, predicted))
            counts[key].append(confusion_matrix(tested.labels, predicted, labels=classes))
        result[key] = {**summaries(scores), "train_records": len(records.labels)}
    result["floor"]["kind"] = "majority class" if baseline else "file"
    if by_class:
        result["classes"] = _by_class(test.labels, counts)
    return result


def _by_class(truth: np.ndarray, counts: Mapping[str, list[np.ndarray]]) -> dict[str, Any]:
    """Return, for classifiers trained on synthetic records and on real ones (ceiling), each label's
    accuracy (recall), and the shares of its test records (a row of `confusion`) that were given
    each label; a row's remainder was given labels that no test record has.

    `counts` are the confusion matrices of the seeds, shape (labels, labels) each.
    """
    names, records = np.unique(truth, return_counts=True)
    found: dict[str, Any] = {"labels": [*map(str, names)], "records": records.tolist()}
    for key in ("synthetic", "ceiling"):
        # The bootstrap goes label by label: each label has as many test records in every seed.
        shares = np.stack(counts[key]) / records[:, None]
        recalls = np.diagonal(shares, axis1=1, axis2=2)
        found[key] = {
            "accuracy": [mean_and_deviation(of_label) for of_label in recalls.T.tolist()],
            "confusion": shares.mean(axis=0).round(4).tolist(),
        }
    return found


def _majority_class(train: Embedded, target: np.ndarray, seed: int) -> DummyClassifier:
    return DummyClassifier(strategy="most_frequent").fit(train.vectors, train.labels)


def _bootstrap(data: Embedded, rng: np.random.Generator) -> Embedded:
    members = (np.flatnonzero(data.labels == name) for name in np.unique(data.labels))
    rows = np.concatenate([rng.choice(of_label, len(of_label)) for of_label in members])
    return Embedded(data.vectors[rows], data.labels[rows])

"""Classifiers are trained on synthetic records and tested on real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score

from dpray.types import Json


@dataclass(frozen=True)
class Embedded:
    """A set of records: `vectors`, shape (records, dimension), and `labels`, shape (records,), or
    None without labels. A fine-tuned model takes texts for `vectors`, shape (records,)."""

    vectors: np.ndarray
    labels: Any


Fit = Callable[[Embedded, np.ndarray, int], Any]
"""Trains on labelled vectors; may use the unlabelled target vectors and the seed. Returns a
classifier, whose `predict` returns a label for each vector."""


def logistic_regression(train: Embedded) -> LogisticRegression:
    """Fit multinomial logistic regression with scikit-learn's default penalty; needs two labels."""
    with warnings.catch_warnings():
        # With many labels and few texts, scikit-learn suspects that the labels are numbers.
        warnings.filterwarnings("ignore", message="The number of unique classes is greater")
        return LogisticRegression(max_iter=1000).fit(train.vectors, train.labels)


def compare_downstream(
    sets: Mapping[str, Embedded],
    test: Embedded,
    seeds: int,
    fit: Fit = lambda train, target, seed: logistic_regression(train),
    name: str = "logistic regression on embeddings",
) -> Json:
    """Return accuracy and macro F1, on the real test records, of a classifier trained on each of
    `sets`: `synthetic` records, real records (`ceiling`), and `floor`, texts made without the
    private data. Without a `floor`, the floor predicts the most common label of the ceiling.

    Each seed resamples the training and the test records (bootstrap, label by label). So the
    deviation covers the choice of both, and random initial weights.
    """
    baseline = {} if "floor" in sets else {"floor": sets["ceiling"]}
    result: Json = {"classifier": name, "seeds": seeds}
    majority = DummyClassifier(strategy="most_frequent")
    for key, records in {**sets, **baseline}.items():
        scores = []
        for seed in range(seeds):
            tested = _bootstrap(test, np.random.default_rng([seed, 0]))
            drawn = _bootstrap(records, np.random.default_rng([seed, 1]))
            if key in baseline:
                fitted = majority.fit(drawn.vectors, drawn.labels)
            else:
                fitted = fit(drawn, tested.vectors, seed)
            scores.append(accuracy_and_f1(tested.labels, fitted.predict(tested.vectors)))
        result[key] = {**summaries(scores), "train_records": len(records.labels)}
    result["floor"]["kind"] = "majority class" if baseline else "file"
    return result


def _bootstrap(data: Embedded, rng: np.random.Generator) -> Embedded:
    members = (np.flatnonzero(data.labels == name) for name in np.unique(data.labels))
    rows = np.concatenate([rng.choice(of_label, len(of_label)) for of_label in members])
    return Embedded(data.vectors[rows], data.labels[rows])


def mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the sample's standard deviation (0 for one value)."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "deviation": deviation}


def accuracy_and_f1(truth: Any, predicted: np.ndarray) -> dict[str, float]:
    """Return accuracy and macro F1, which averages over the labels that occur in `truth`."""
    macro_f1 = f1_score(
        truth, predicted, labels=np.unique(truth), average="macro", zero_division=0.0
    )
    return {"accuracy": float(accuracy_score(truth, predicted)), "macro_f1": float(macro_f1)}


def summaries(scores: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the mean and deviation of each measure over the repetitions."""
    return {name: mean_and_deviation([one[name] for one in scores]) for name in scores[0]}

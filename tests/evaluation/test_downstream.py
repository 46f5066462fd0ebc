"""Accuracy by label."""

import warnings

import numpy as np
import pytest

from dpray.evaluation.downstream import Embedded, compare_downstream, logistic_regression


def clusters(labels, places):
    """One-hot vectors: a label's records lie at its place, whatever the label is called."""
    noise = np.random.default_rng(len(labels)).normal(0, 0.01, (len(labels), 3))
    return Embedded((np.eye(3)[places] + noise).astype(np.float32), np.array(labels))


def test_accuracy_by_label():
    real = clusters(["a"] * 10 + ["b"] * 20 + ["c"] * 30, [0] * 10 + [1] * 20 + [2] * 30)
    # The synthetic records call half of the space by the wrong names, and do not know c.
    made = clusters(["a"] * 10 + ["x"] * 20 + ["a"] * 30, [0] * 10 + [1] * 20 + [2] * 30)

    classes = compare_downstream({"synthetic": made, "ceiling": real}, real, seeds=3)["classes"]

    assert classes["labels"] == ["a", "b", "c"] and classes["records"] == [10, 20, 30]
    assert [value["mean"] for value in classes["synthetic"]] == [1.0, 0.0, 0.0]
    assert classes["ceiling"] == [{"mean": 1.0, "deviation": 0.0}] * 3


def test_accuracy_by_label_averages_to_the_accuracy():
    rng = np.random.default_rng(0)
    labels = np.array(["a", "b", "c"])[rng.integers(0, 3, 120)]
    vectors = np.eye(3)[np.searchsorted(["a", "b", "c"], labels)] + rng.normal(0, 0.8, (120, 3))
    data = Embedded(vectors.astype(np.float32), labels)

    found = compare_downstream({"synthetic": data, "ceiling": data}, data, seeds=4)

    classes = found["classes"]
    by_label = [value["mean"] for value in classes["synthetic"]]
    average = np.average(by_label, weights=classes["records"])
    assert average == pytest.approx(found["synthetic"]["accuracy"]["mean"])
    assert 0.5 < average < 1.0


def test_many_labels_of_few_records_are_no_warning():
    some = clusters([f"label {n % 20}" for n in range(30)], [n % 3 for n in range(30)])
    with warnings.catch_warnings(action="error"):
        logistic_regression(some)

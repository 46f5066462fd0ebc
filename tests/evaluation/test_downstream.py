"""Classifiers on embeddings."""

import warnings

import numpy as np

from dpray.evaluation.downstream import Embedded, logistic_regression


def clusters(labels, places):
    """One-hot vectors: a label's records lie at its place, whatever the label is called."""
    noise = np.random.default_rng(len(labels)).normal(0, 0.01, (len(labels), 3))
    return Embedded((np.eye(3)[places] + noise).astype(np.float32), np.array(labels))


def test_many_labels_of_few_records_are_no_warning():
    some = clusters([f"label {n % 20}" for n in range(30)], [n % 3 for n in range(30)])
    with warnings.catch_warnings(action="error"):
        logistic_regression(some)

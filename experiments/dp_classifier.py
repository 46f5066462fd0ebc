"""A classifier that is trained with DP on the private records, in place of synthetic texts: the
baseline of Yue et al. (2023), Table 2, and Xie et al. (2024), DP-FT-Downstream.

`python experiments/dp_classifier.py` trains a softmax layer on frozen embeddings by DP-SGD, and
keeps its accuracies on real test texts in experiments/measured/dp_classifier. Its noise is of
floating-point numbers, so it is a figure to compare with and no mechanism of dpray.
"""

from __future__ import annotations

import json
from math import log

import numpy as np
import numpy.typing as npt
from embedding import embedded
from figures import mean_recall
from runs import DATA, HERE, accuracy

from dpray.accounting.accountant import calibrate
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.evaluation.downstream import Embedded
from dpray.io.files import write_durably

SETS, EPSILONS, RUNS_OF_EACH = ("agnews", "trec", "yelp", "banking77"), (1.0, 4.0), 3
BATCH, STEPS, CLIP, RATE = 500, 100, 0.5, 4.0
"""B, T, C and the learning rate, the same for all sets: chosen on AG News' public records."""

KEPT = HERE / "measured" / "dp_classifier"
Array = npt.NDArray[np.float64]


def noise_multiplier(records: int, epsilon: float) -> float:
    q, delta = BATCH / records, 1 / (records * log(records))
    return calibrate(
        lambda sigma: SelfComposed(PoissonSubsampledGaussian(q, sigma), STEPS),
        epsilon, delta, bracket=(0.2, 100.0), increasing=False,
    )  # fmt: skip


def train(private: Embedded, epsilon: float, seed: int) -> Array:
    """Return the weights of a softmax layer, shape (D + 1, labels)."""
    rng = np.random.default_rng(seed)
    names, y_N = np.unique(private.labels, return_inverse=True)
    x_ND = np.column_stack([private.vectors, np.ones(len(y_N))])
    W_DK = np.zeros((x_ND.shape[1], len(names)))
    sigma = noise_multiplier(len(y_N), epsilon)
    for _ in range(STEPS):
        batch = rng.random(len(y_N)) < BATCH / len(y_N)
        x_BD, logits_BK = x_ND[batch], x_ND[batch] @ W_DK
        p_BK = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
        error_BK = p_BK / p_BK.sum(axis=1, keepdims=True) - np.eye(len(names))[y_N[batch]]
        # A record's gradient is the outer product of its row and its error.
        norms_B = np.linalg.norm(x_BD, axis=1) * np.linalg.norm(error_BK, axis=1)
        clipped_BK = error_BK * np.minimum(1.0, CLIP / np.maximum(norms_B, 1e-12))[:, None]
        noisy_DK = x_BD.T @ clipped_BK + rng.normal(0.0, sigma * CLIP, W_DK.shape)
        W_DK -= RATE * noisy_DK / BATCH
    return W_DK


def scores(private: Embedded, test: Embedded, W_DK: Array) -> dict[str, float]:
    """Return the accuracy, and the mean of the labels' accuracies."""
    names = np.unique(private.labels)
    found = names[
        (np.column_stack([test.vectors, np.ones(len(test.labels))]) @ W_DK).argmax(axis=1)
    ]
    right = found == test.labels
    by_label = [right[test.labels == name].mean() for name in np.unique(test.labels)]
    return {
        "accuracy": round(float(right.mean()), 4),
        "by_label": round(float(np.mean(by_label)), 4),
    }


def main() -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        private, test = (embedded(DATA / name / f"{part}.jsonl") for part in ("private", "test"))
        found: dict[str, object] = {
            "without noise": {
                "accuracy": round(accuracy(private, test), 4),
                "by_label": round(mean_recall(private, test), 4),
            }
        }
        for epsilon in EPSILONS:
            runs = [scores(private, test, train(private, epsilon, n)) for n in range(RUNS_OF_EACH)]
            found[f"{epsilon:g}"] = runs
        write_durably(KEPT / f"{name}.json", json.dumps(found, indent=1) + "\n")
        print(name, found, flush=True)


if __name__ == "__main__":
    main()

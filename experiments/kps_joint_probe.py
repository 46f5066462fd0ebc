"""Do key phrase sequences of terms that belong together beat independent draws?

    python experiments/kps_joint_probe.py [--sequences N] [--seed K]

The setting of kps_probe.py on its validation split, with DP-KPS's defaults: a logistic regression
on MiniLM embeddings of the sequences, no LLM. Beside independent draws:

- co-occurrence: half of eps_kde pays for a noisy histogram of the pairs among a class's most common
  terms (a record's pairs share weight 1, so the L1 sensitivity is 1); each term is drawn by how
  often it stood with the terms before it;
- similar terms: weights times exp(beta * mean cosine with the terms before); public, free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import typer
from kps_probe import HALVES, OURS, data, embed, public_side, settings, vocabulary

from dpray.evaluation.downstream import Embedded, logistic_regression
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sequences

VOCABULARY = ("unigrams", "english")
BUDGETS = ((1.0, 5.0), HALVES[0], (5.0, 10.0))
SHARE = 0.8
"""Of a draw that follows the pairs; the rest follows the class's density."""

Weigh = Callable[[np.ndarray], np.ndarray]
"""From prefixes (R, l) to weights of the next term (R, N)."""


class Setting:
    """The noisy densities of one budget; `spent` is the share of eps_kde that they get."""

    def __init__(self, eps: tuple[float, float], seed: int, spent: float = 1.0) -> None:
        self.private, self.test = data("validation")
        self.epsilon_pairs = eps[1] * (1 - spent)
        plan = DpKps(
            settings(**OURS),
            labels=tuple(sorted(self.private)),
            public_terms=len(public_side(*VOCABULARY)[1]),
            dimension=384,
            epsilon_vocabulary=eps[0],
            epsilon_kde=eps[1] * spent,
        )
        S, N = plan.settings.phrases_per_record, plan.settings.vocabulary_size
        self.terms, self.vectors = vocabulary(*VOCABULARY, "validation", S, N, eps[0], seed)
        self.plan, self.rng = plan, generator(new_key())
        self.density_pass = DensityPass(plan, self.terms, self.vectors)
        sums = {
            label: plan.noisy_sums(self.density_pass.sums(texts))
            for label, texts in self.private.items()
        }
        self.sequences = Sequences(plan, self.vectors, sums)

    def density(self, label: str) -> np.ndarray:
        """The class's weights of all terms, shape (N,)."""
        weights_N: np.ndarray = self.sequences._weights(label, None)[0]
        return weights_N

    def pairs(self, label: str, top: int) -> tuple[np.ndarray, np.ndarray]:
        """The class's `top` terms, and the noisy weights of their pairs, shape (top, top)."""
        order = np.argsort(-self.density(label))[:top]
        place = {int(term): i for i, term in enumerate(order)}
        M, S = np.zeros((top, top)), self.plan.settings.phrases_per_record
        for text in self.private[label]:
            found = self.density_pass.matcher.first_terms(text, S)
            together = list(combinations(sorted(place[i] for i in found if i in place), 2))
            for a, b in together:
                M[a, b] += 1 / len(together)
        scale = 1 / self.epsilon_pairs
        noisy = np.triu(M + self.rng.laplace(0, scale, M.shape), 1)
        kept = np.maximum(noisy - np.sqrt(2) * scale, 0.0)
        return order, kept + kept.T

    def accuracy(self, weigh_of: Callable[[str], Weigh], number: int) -> float:
        texts, labels = [], []
        for label in self.plan.labels:
            for ids in self.draw(label, weigh_of(label), number):
                texts.append(" ".join(self.terms[i] for i in ids))
                labels.append(label)
        fitted = logistic_regression(Embedded(embed(texts), np.array(labels)))
        return float((fitted.predict(self.test.vectors) == self.test.labels).mean())

    def draw(self, label: str, weigh: Weigh, number: int) -> np.ndarray:
        density_N = self.density(label)
        P = self.rng.choice(len(density_N), size=(number, 1), p=density_N)
        for _ in range(self.plan.settings.sequence_length - 1):
            cumulative_RN = weigh(P).cumsum(axis=1)
            thresholds_R = self.rng.random(number) * cumulative_RN[:, -1]
            P = np.column_stack([P, (cumulative_RN <= thresholds_R[:, None]).sum(axis=1)])
        return P


def independent(setting: Setting, label: str) -> Weigh:
    density_N = setting.density(label)
    return lambda P: np.tile(density_N, (len(P), 1))


def similar(setting: Setting, label: str, beta: float) -> Weigh:
    density_N, cosines_NN = setting.density(label), setting.vectors @ setting.vectors.T
    return lambda P: density_N * np.exp(beta * cosines_NN[P].mean(axis=1))


def together(setting: Setting, label: str, top: int) -> Weigh:
    density_N = setting.density(label)
    order, M = setting.pairs(label, top)
    shares = M / np.maximum(M.sum(axis=1, keepdims=True), 1e-9)
    of_term = np.zeros((len(density_N), len(density_N)))
    of_term[np.ix_(order, order)] = shares
    return lambda P: (1 - SHARE) * density_N + SHARE * of_term[P].mean(axis=1)


def cells(way: Callable[[tuple[float, float]], float]) -> Sequence[str]:
    return [f"{way(eps):.3f}" for eps in BUDGETS]


def main(sequences: int = 250, seed: int = 0) -> None:
    whole = {eps: Setting(eps, seed) for eps in BUDGETS}
    halves = {eps: Setting(eps, seed, 0.5) for eps in BUDGETS}
    print("| next term | " + " | ".join(f"{a:g} + {b:g}" for a, b in BUDGETS) + " |")
    print("|---|" + "---|" * len(BUDGETS))

    def show(
        name: str, settings: dict[Any, Setting], weigh: Callable[..., Weigh], *of: Any
    ) -> None:
        found = cells(
            lambda eps: settings[eps].accuracy(
                lambda label: weigh(settings[eps], label, *of), sequences
            )
        )
        print(f"| {name} | " + " | ".join(found) + " |", flush=True)

    show("independent (the default)", whole, independent)
    for beta in (2.0, 5.0, 10.0):
        show(f"similar terms, beta {beta:g}", whole, similar, beta)
    for top in (100, 300):
        show(f"co-occurrence among the {top} most common", halves, together, top)


if __name__ == "__main__":
    typer.run(main)

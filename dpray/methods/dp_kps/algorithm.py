"""DP-KPS draws private sequences of key phrases that seed an LLM's prompts (Nagesh et al. 2025).

1. The private vocabulary: `vocabulary_counts` of a shard, and `noisy_vocabulary` of the sum.
2. The kernel density of each class: `DensityPass.sums` of a shard, and `noisy_sums` of the sum.
3. `Sequences` draws from both: post-processing.

Sums of shards are exact and private, and add up; only the two `noisy_...` results may be released.

The paper's symbols: S phrases of a record, V the public vocabulary, N terms of the private one, L
phrases of a sequence, I features, K_1, K_2, ... an ensemble's estimators, u the squared norm of one
block of a concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.accounting.accountant import noise_multiplier
from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.event import Event
from dpray.mechanisms.discrete_noise import Counts, laplace_scale
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.mechanisms import (
    Array,
    FeatureSum,
    FourierFeatures,
    VocabularyHistogram,
    density,
    record_averages,
    record_prefixes,
)
from dpray.methods.dp_kps.settings import DpKpsSettings

Ids = npt.NDArray[np.int64]
Sums = npt.NDArray[Any]
"""Counts, int64 of shape (1, N), or feature sums of shape (estimators, I): int64 in steps of the
grid while they are private, float64 in the features' unit once they are noisy."""

SEQUENCES_AT_ONCE = 1024
"""An iterative draw makes at most this many sequences at once: it has a row of N for each."""


@dataclass(frozen=True)
class DpKps:
    """The frozen plan of a run; it is public.

    `epsilon_vocabulary` and `epsilon_kde` are the shares of the two mechanisms. With a
    `noise_factor` of 1, each has the noise at which it costs its share by itself. At a delta above
    0 both together cost less, so a common `noise_factor` below 1 multiplies their noises.

    Guarantee: add or remove one unit, at most `records_per_unit` records of any classes: the whole
    costs `dp_event`. A record's phrases go to the estimators of its own class only, so the classes
    compose in parallel, and an ensemble's estimators one after the other: each gets an equal part
    of `epsilon_kde`. A unit with records in several classes moves their sums together by no more
    than it could move one class's.
    Proof: docs/privacy.md, sections 4.6 and 4.7.
    """

    settings: DpKpsSettings
    labels: tuple[str, ...]
    public_terms: int
    dimension: int
    epsilon_vocabulary: float
    epsilon_kde: float
    delta: float = 0.0
    records_per_unit: int = 1
    noise_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.settings.noise == "gaussian" and not 0 < self.delta < 1:
            raise ValueError("delta: must be above 0 and below 1 for noise gaussian")

    @property
    def vocabulary(self) -> VocabularyHistogram:
        return self._histogram(self.public_terms, self.epsilon_vocabulary)

    def _histogram(self, size: int, epsilon: float) -> VocabularyHistogram:
        S, k = self.settings.phrases_per_record, self.records_per_unit
        scale = laplace_scale(k, epsilon, count=S) * self.noise_factor
        return VocabularyHistogram(size, S, scale, k)

    @property
    def terms(self) -> int:
        """Return N, or the size of V if it has fewer terms."""
        return min(self.settings.vocabulary_size, self.public_terms)

    @cached_property
    def estimators(self) -> tuple[FourierFeatures, ...]:
        """Return the points of K_1, K_2, ...; none for `exact`. The linear K_l takes prefixes of l
        phrases with u = 1/l; the logarithmic K_j takes L' = 2^j with u = 2/L'."""
        settings, L = self.settings, self.settings.sequence_length
        if settings.estimator == "exact":
            return ()
        if settings.sampling == "independent":
            shapes = [(1, 1.0)]
        elif settings.ensemble == "linear":
            shapes = [(length, 1 / length) for length in range(1, L + 1)]
        else:
            number = max(1, (L - 1).bit_length())  # ceil(log2 L)
            shapes = [(2**j, 2 / 2**j) for j in range(1, number + 1)]
        I, bandwidth = settings.features, settings.bandwidth  # noqa: E741 (the paper's)
        return tuple(
            FourierFeatures(self.dimension, I, bandwidth, k, blocks, u)
            for k, (blocks, u) in enumerate(shapes)
        )

    def estimator_of(self, length: int) -> int:
        """Return the number, from 0, of the estimator for prefixes of `length` phrases: K_l, or
        K_ceil(log2 l) but K_1 for a single one."""
        if self.settings.ensemble == "linear":
            return length - 1
        return max(1, (length - 1).bit_length()) - 1

    def shortest(self, k: int) -> int:
        """Return the shortest prefix of the k-th estimator, from 0: records with fewer phrases have
        no part in it."""
        lengths = range(1, self.settings.sequence_length + 1)
        return next(length for length in lengths if self.estimator_of(length) == k)

    @cached_property
    def kde(self) -> VocabularyHistogram | FeatureSum:
        """Return the mechanism of one class and one estimator. With `exact`, a record gives each of
        its S terms the weight 1/S, here in units of 1/S."""
        settings = self.settings
        if settings.estimator == "exact":
            return self._histogram(self.terms, self.epsilon_kde)
        number = len(self.estimators)
        multiplier = laplace_scale(1, self.epsilon_kde, count=number)
        if settings.noise == "gaussian":
            multiplier = noise_multiplier(self.epsilon_kde, self.delta, count=number)
        multiplier *= self.noise_factor
        return FeatureSum(settings.features, settings.noise, multiplier, self.records_per_unit)

    @property
    def kde_event(self) -> Event:
        """Return the cost of all densities, which is that of one class (Amin et al. 2024, Lemma
        2)."""
        return SelfComposed(self.kde.dp_event, max(1, len(self.estimators)))

    @property
    def dp_event(self) -> Event:
        """Return the cost of both passes over the private records."""
        return Composed((self.vocabulary.dp_event, self.kde_event))

    def vocabulary_counts(self, matcher: TermMatcher, texts: Iterable[str]) -> Counts:
        """Return private pass 1, a shard's counts over V, shape (V,). `matcher` knows all of V."""
        S = self.settings.phrases_per_record
        return self.vocabulary.count(matcher.first_terms(text, S) for text in texts)

    def noisy_vocabulary(self, counts_V: Counts, rng: np.random.Generator) -> list[int]:
        """Return release 1, the ids of the private vocabulary's N terms."""
        noisy_V = self.vocabulary(counts_V)
        return self.vocabulary.top(noisy_V, self.settings.vocabulary_size, rng)

    def noisy_sums(self, sums: Sums) -> Sums:
        """Return release 2, one class's sums over all records; every class has one, even without
        records."""
        return np.stack([self.kde(total) for total in sums])

    @property
    def density_noise(self) -> float:
        """Return the standard deviation of the noise in one term's density."""
        if isinstance(self.kde, VocabularyHistogram):
            return math.sqrt(2) * self.kde.scale
        std_of_unit_scale = math.sqrt(2) if self.settings.noise == "laplace" else 1.0
        return std_of_unit_scale * self.kde.scale / math.sqrt(self.settings.features)


class DensityPass:
    """Private pass 2, with the matcher of the N terms and their features (rff) or their angles in
    every block (iterative: N * I * 8 bytes for each block of each estimator)."""

    def __init__(self, plan: DpKps, terms: Sequence[str], vectors_ND: npt.NDArray[Any]) -> None:
        self.plan, self.matcher = plan, TermMatcher(terms)
        S = plan.settings.phrases_per_record
        self._features_NI: Array | None = None
        self._angles: list[list[Array]] = []
        if plan.settings.sampling == "iterative":
            self._angles = [
                [K.angles(vectors_ND, block) for block in range(min(K.blocks, S))]
                for K in plan.estimators
            ]
        elif plan.settings.estimator == "rff":
            self._features_NI = plan.estimators[0](vectors_ND)

    def sums(self, texts: Iterable[str]) -> Sums:
        """Return the sums of a shard of ONE class's texts, shape (1, N) or (estimators, I)."""
        kde, S = self.plan.kde, self.plan.settings.phrases_per_record
        found = (self.matcher.first_terms(text, S) for text in texts)
        if isinstance(kde, VocabularyHistogram):
            return kde.count(found)[None]
        if self._features_NI is not None:
            return kde.sum(record_averages(self._features_NI, found))[None]
        records = list(found)
        return np.stack(
            [
                kde.sum(record_prefixes(K, angles_LNI, records, self.plan.shortest(k)))
                for k, (K, angles_LNI) in enumerate(
                    zip(self.plan.estimators, self._angles, strict=True)
                )
            ]
        )


class Sequences:
    """Draws sequences of term ids from what was released: post-processing, in any number.

    `noisy` are each label's noisy sums, `vectors_ND` the embeddings of the N terms. The weights of
    a class's terms are made in four steps.

    - `threshold` standard deviations of the noise are taken off the densities, which are cut at 0
      and divided by their sum.
    - `contrast` times the same shares of all classes together are taken off: terms that every class
      has say nothing about this one.
    - Weights below 0, and all but the `top_m` largest, become 0.
    - The weights are raised to the power 1 / temperature. If none is above 0, all are equal.
    """

    def __init__(
        self, plan: DpKps, vectors_ND: npt.NDArray[Any], noisy: Mapping[str, Sums]
    ) -> None:
        self.plan, self.vectors_ND, self.noisy = plan, vectors_ND, noisy
        self.pool: Sums = np.sum(list(noisy.values()), axis=0)
        # The blocks of one estimator at a time are in use, L at most.
        self._angles = lru_cache(plan.settings.sequence_length)(self._angles_of)

    def draw(self, label: str, number: int, rng: np.random.Generator) -> Ids:
        """Draw term ids of shape (number, L)."""
        if self.plan.settings.sampling == "independent":
            return self.independent(label, number, rng)
        parts = [
            self.iterative(label, min(SEQUENCES_AT_ONCE, number - done), rng)
            for done in range(0, number, SEQUENCES_AT_ONCE)
        ]
        return np.concatenate([np.zeros((0, self.plan.settings.sequence_length), int), *parts])

    def independent(self, label: str, number: int, rng: np.random.Generator) -> Ids:
        """Draw L times from the multinomial over the N terms."""
        weights_N, L = self._weights(label, None)[0], self.plan.settings.sequence_length
        return rng.choice(len(weights_N), size=(number, L), p=weights_N)

    def iterative(self, label: str, number: int, rng: np.random.Generator) -> Ids:
        """Draw one phrase after the other by the densities of all extensions of the prefix P. A
        record's phrases are distinct, and so are a sequence's while any are left."""
        P = np.zeros((number, 0), dtype=np.int64)
        for _ in range(self.plan.settings.sequence_length):
            weights_RN = self._weights(label, P)
            cumulative_RN = np.cumsum(weights_RN, axis=1)
            thresholds_R = rng.random(number) * cumulative_RN[:, -1]
            w = (cumulative_RN <= thresholds_R[:, None]).sum(axis=1)
            P = np.column_stack([P, w])
        return P

    def _weights(self, label: str, P: Ids | None) -> Array:
        """Return the probabilities of the next term, shape (number of prefixes, N)."""
        settings = self.plan.settings
        left_RN = self._shares(self.noisy[label], P, 1)
        if settings.contrast and len(self.noisy) > 1:
            left_RN = left_RN - settings.contrast * self._shares(self.pool, P, len(self.noisy))
        left_RN = np.maximum(left_RN, 0.0)
        free_RN = np.ones(left_RN.shape)
        if P is not None and P.shape[1] < left_RN.shape[1]:
            np.put_along_axis(free_RN, P, 0.0, axis=1)
            left_RN *= free_RN
        m = settings.top_m
        if m is not None and m < left_RN.shape[1]:
            worst_of_best = np.partition(left_RN, -m, axis=1)[:, -m]
            left_RN[left_RN < worst_of_best[:, None]] = 0.0
        largest = left_RN.max(axis=1, keepdims=True)
        empty = largest[:, 0] <= 0
        left_RN = (left_RN / np.where(largest > 0, largest, 1.0)) ** (1 / settings.temperature)
        left_RN[empty] = free_RN[empty]
        weights_RN: Array = left_RN / left_RN.sum(axis=1, keepdims=True)
        return weights_RN

    def _shares(self, noisy: Sums, P: Ids | None, classes: int) -> Array:
        """Return densities as shares of their sum, or zeros for a row in which none is above the
        threshold. `noisy` is the sum of the noisy sums of `classes` classes."""
        floor = self.plan.settings.threshold * self.plan.density_noise * math.sqrt(classes)
        if self.plan.settings.estimator == "exact":
            scores_RN = np.maximum(noisy - floor, 0.0)
        elif P is None:
            features_NI = self.plan.estimators[0](self.vectors_ND)
            scores_RN = np.maximum(density(noisy[0], features_NI)[None] - floor, 0.0)
        else:
            length = P.shape[1] + 1
            factor = self.plan.estimators[self.plan.estimator_of(length)].padding_factor(length)
            scores_RN = np.maximum(self.extensions(noisy, P) - factor * floor, 0.0)
        total = scores_RN.sum(axis=1, keepdims=True)
        shares_RN: Array = scores_RN / np.where(total > 0, total, 1.0)
        return shares_RN

    def extensions(self, noisy: Sums, P: Ids) -> Array:
        """Return the densities of every prefix of P extended by every term, shape (rows of P, N).

        With the prefix's angles A and a term's T, sum_i F_i cos(A_i + T_i + b_i) is two products of
        matrices; the queries' factor undoes the padding (Theorem B.2).
        """
        length = P.shape[1] + 1
        k = self.plan.estimator_of(length)
        K, F_I = self.plan.estimators[k], noisy[k]
        A_RI = np.tile(K.phases, (len(P), 1))
        for block in range(length - 1):
            A_RI += self._angles(k, block)[P[:, block]]
        T_NI = self._angles(k, length - 1)
        scores_RN = (np.cos(A_RI) * F_I) @ np.cos(T_NI).T - (np.sin(A_RI) * F_I) @ np.sin(T_NI).T
        return np.asarray(math.sqrt(2) / K.number * K.padding_factor(length) * scores_RN)

    def _angles_of(self, k: int, block: int) -> Array:
        return self.plan.estimators[k].angles(self.vectors_ND, block)

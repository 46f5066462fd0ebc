"""DP-KPS draws private sequences of key phrases that seed an LLM's prompts (Nagesh et al. 2025).

1. The private vocabulary: `vocabulary_counts` of a shard, and `noisy_vocabulary` of the sum.
2. The kernel density of each class: `DensityPass.sums` of a shard, and `noisy_sums` of the sum.
3. `Sequences` draws from both: post-processing.

The sums of a shard are exact and private. Only the two `noisy_...` results may be released.

The paper's symbols: S phrases of a record, V the public vocabulary, N terms of the private one, L
phrases of a sequence, I features, K_1, K_2, ... the estimators of an ensemble, u the squared norm
of one block of a concatenation.
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
from dpray.accounting.event import Array, Event
from dpray.mechanisms.discrete_noise import Counts, laplace_scale
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.mechanisms import (
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
"""Counts, int64 of shape (1, N), or sums of features, shape (estimators, I). Private sums of
features are int64, in steps of the grid; noisy ones are float64, in the unit of the features."""

SEQUENCES_AT_ONCE = 1024
"""An iterative draw makes at most this many sequences at once, because each takes N weights."""


@dataclass(frozen=True)
class DpKps:
    """The public parameters of a run, and its cost.

    `epsilon_vocabulary` and `epsilon_kde` set the noise of the two mechanisms: with a
    `noise_factor` of 1, each mechanism costs its epsilon if it is accounted for alone. At a delta
    above 0, both together cost less than the sum. A `noise_factor` below 1 then multiplies the
    noise of both.

    Guarantee: add or remove one unit, at most `records_per_unit` records of any classes: both
    mechanisms together cost `dp_event`. A record's phrases go to the estimators of its own class
    only, so the classes compose in parallel. The estimators of an ensemble compose sequentially,
    each with an equal part of `epsilon_kde`. A unit with records in several classes moves all their
    sums together by no more than it could move those of one class.
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
        """Return the features of K_1, K_2, ...; none for `exact`. The linear K_l takes prefixes of
        l phrases with u = 1/l; the logarithmic K_j takes L' = 2^j phrases with u = 2/L'."""
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
        """Return the index, from 0, of the estimator for prefixes of l = `length` phrases: K_l in a
        linear ensemble, else K_ceil(log2 l), or K_1 for one phrase."""
        if self.settings.ensemble == "linear":
            return length - 1
        return max(1, (length - 1).bit_length()) - 1

    def shortest(self, k: int) -> int:
        """Return the length of the shortest prefix of estimator k, from 0. Records with fewer
        phrases do not enter its sums."""
        lengths = range(1, self.settings.sequence_length + 1)
        return next(length for length in lengths if self.estimator_of(length) == k)

    @cached_property
    def kde(self) -> VocabularyHistogram | FeatureSum:
        """Return the mechanism of one class and one estimator. With `exact`, a record gives the
        weight 1/S to each of its S terms; the histogram counts in units of 1/S."""
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
    def dp_event(self) -> Event:
        """Return the cost of both passes over the private records. That of the densities of all
        classes is that of one class (Amin et al. 2024, Lemma 2)."""
        densities = SelfComposed(self.kde.dp_event, max(1, len(self.estimators)))
        return Composed((self.vocabulary.dp_event, densities))

    def vocabulary_counts(self, matcher: TermMatcher, texts: Iterable[str]) -> Counts:
        """Count a shard's terms, shape (V,): private pass 1. `matcher` knows all of V."""
        S = self.settings.phrases_per_record
        return self.vocabulary.count(matcher.first_terms(text, S) for text in texts)

    def noisy_vocabulary(self, counts_V: Counts, rng: np.random.Generator) -> list[int]:
        """Return the ids of the private vocabulary's N terms, or of fewer that stand above the
        noise, but enough for one sequence: the first noisy output."""
        settings, noisy_V = self.settings, self.vocabulary(counts_V)
        number = settings.vocabulary_size
        if settings.fdr < 1:
            real = self.vocabulary.above_noise(noisy_V, settings.fdr)
            number = min(number, max(real, settings.sequence_length))
        return self.vocabulary.top(noisy_V, number, rng)

    def noisy_sums(self, sums: Sums) -> Sums:
        """Add the noise to the sums of one class over all records: the second noisy output. Every
        class has one, even without records."""
        return np.stack([self.kde(total) for total in sums])

    @property
    def density_noise_std(self) -> float:
        """Return the standard deviation of the noise in one term's density."""
        if isinstance(self.kde, VocabularyHistogram):
            return math.sqrt(2) * self.kde.scale
        # Laplace noise has a standard deviation of sqrt(2) times its scale.
        std_over_scale = math.sqrt(2) if self.settings.noise == "laplace" else 1.0
        return std_over_scale * self.kde.scale / math.sqrt(self.settings.features)


class DensityPass:
    """Private pass 2. It keeps the N terms' features (rff), or their angles in every block of every
    estimator, N * I * 8 bytes each (iterative)."""

    def __init__(
        self, method: DpKps, terms: Sequence[str], vectors_ND: npt.NDArray[np.float32]
    ) -> None:
        self.method, self.matcher = method, TermMatcher(terms)
        S = method.settings.phrases_per_record
        self._features_NI: Array | None = None
        self._angles: list[list[Array]] = []
        if method.settings.sampling == "iterative":
            self._angles = [
                [K.angles(vectors_ND, block) for block in range(min(K.blocks, S))]
                for K in method.estimators
            ]
        elif method.settings.estimator == "rff":
            self._features_NI = method.estimators[0](vectors_ND)

    def sums(self, texts: Iterable[str]) -> Sums:
        """Return the sums of a shard's texts of ONE class, shape (1, N) or (estimators, I)."""
        kde, S = self.method.kde, self.method.settings.phrases_per_record
        found = (self.matcher.first_terms(text, S) for text in texts)
        if isinstance(kde, VocabularyHistogram):
            return kde.count(found)[None]
        if self._features_NI is not None:
            return kde.sum(record_averages(self._features_NI, found))[None]
        records = list(found)
        return np.stack(
            [
                kde.sum(record_prefixes(K, angles_LNI, records, self.method.shortest(k)))
                for k, (K, angles_LNI) in enumerate(
                    zip(self.method.estimators, self._angles, strict=True)
                )
            ]
        )


class Sequences:
    """Draws any number of sequences of term ids from the noisy outputs: post-processing.

    `noisy` are each label's noisy sums, `vectors_ND` the embeddings of the N terms. The weights of
    a class's terms are computed in four steps.

    - Subtract `threshold` standard deviations of the noise from the densities, set those below 0 to
      0, and divide by the sum: these are the shares of the terms.
    - Subtract `contrast` times the shares of all classes together: a term that every class has
      tells nothing about this one.
    - Set weights below 0, and all but the `top_m` largest, to 0.
    - Raise the weights to the power 1 / temperature. If none is above 0, all terms are equal.
    """

    def __init__(
        self, method: DpKps, vectors_ND: npt.NDArray[np.float32], noisy: Mapping[str, Sums]
    ) -> None:
        self.method, self.vectors_ND, self.noisy = method, vectors_ND, noisy
        self.pool: Sums = np.sum(list(noisy.values()), axis=0)
        # Only the blocks of one estimator are in use at a time, at most L.
        self._angles = lru_cache(method.settings.sequence_length)(
            lambda k, block: method.estimators[k].angles(vectors_ND, block)
        )

    def draw(self, label: str, number: int, rng: np.random.Generator) -> Ids:
        """Draw term ids of shape (number, L)."""
        if self.method.settings.sampling == "independent":
            return self.independent(label, number, rng)
        parts = [
            self.iterative(label, min(SEQUENCES_AT_ONCE, number - done), rng)
            for done in range(0, number, SEQUENCES_AT_ONCE)
        ]
        return np.concatenate([np.zeros((0, self.method.settings.sequence_length), int), *parts])

    def independent(self, label: str, number: int, rng: np.random.Generator) -> Ids:
        """Draw L times from the multinomial over the N terms."""
        weights_N, L = self._weights(label, None)[0], self.method.settings.sequence_length
        return rng.choice(len(weights_N), size=(number, L), p=weights_N)

    def iterative(self, label: str, number: int, rng: np.random.Generator) -> Ids:
        """Draw one phrase after the other, by the densities of all extensions of the prefix P. The
        phrases of a sequence are distinct, as a record's are, while any are left."""
        P = np.zeros((number, 0), dtype=np.int64)
        for _ in range(self.method.settings.sequence_length):
            weights_RN = self._weights(label, P)
            cumulative_RN = np.cumsum(weights_RN, axis=1)
            thresholds_R = rng.random(number) * cumulative_RN[:, -1]
            w = (cumulative_RN <= thresholds_R[:, None]).sum(axis=1)
            P = np.column_stack([P, w])
        return P

    def _weights(self, label: str, P: Ids | None) -> Array:
        """Return the probabilities of the next term, shape (number of prefixes, N)."""
        settings = self.method.settings
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
        """Return densities as shares of their sum, or zeros for a row with no density above the
        threshold. `noisy` is the sum of the noisy sums of `classes` classes."""
        method = self.method
        floor = method.settings.threshold * method.density_noise_std * math.sqrt(classes)
        if method.settings.estimator == "exact":
            scores_RN = np.maximum(noisy - floor, 0.0)
        elif P is None:
            features_NI = method.estimators[0](self.vectors_ND)
            scores_RN = np.maximum(density(noisy[0], features_NI)[None] - floor, 0.0)
        else:
            length = P.shape[1] + 1
            factor = method.estimators[method.estimator_of(length)].padding_factor(length)
            scores_RN = np.maximum(self.extensions(noisy, P) - factor * floor, 0.0)
        total = scores_RN.sum(axis=1, keepdims=True)
        shares_RN: Array = scores_RN / np.where(total > 0, total, 1.0)
        return shares_RN

    def extensions(self, noisy: Sums, P: Ids) -> Array:
        """Return the densities of every prefix of P extended by every term, shape (rows of P, N).

        With the angles A of a prefix and T of a term, sum_i F_i cos(A_i + T_i + b_i) is computed by
        two matrix products. `padding_factor` undoes the zero padding (Theorem B.2).
        """
        length = P.shape[1] + 1
        k = self.method.estimator_of(length)
        K, F_I = self.method.estimators[k], noisy[k]
        A_RI = np.tile(K.phases, (len(P), 1))
        for block in range(length - 1):
            A_RI += self._angles(k, block)[P[:, block]]
        T_NI = self._angles(k, length - 1)
        scores_RN = (np.cos(A_RI) * F_I) @ np.cos(T_NI).T - (np.sin(A_RI) * F_I) @ np.sin(T_NI).T
        return np.asarray(math.sqrt(2) / K.number * K.padding_factor(length) * scores_RN)

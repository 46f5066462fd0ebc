"""DP-KPS chooses among settings on the private records themselves, by private selection (Papernot
and Steinke 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.accounting.composed_events import Composed, Parallel
from dpray.accounting.events import DiscreteLaplace
from dpray.accounting.selection import PrivateSelection
from dpray.mechanisms.discrete_noise import Counts, checked_scale, discrete_laplace
from dpray.mechanisms.private_selection import TruncatedNegativeBinomial, best
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.algorithm import DpKps, Sequences, Sums

Weights = Mapping[str, npt.NDArray[np.float64]]
"""`Weights` hold each label's probabilities of the N terms."""

OneRun = Callable[[int], dict[str, Any]]
"""A `OneRun` makes the releases of a candidate once, `terms` and `sums`, and counts the records
whose label they tell, `right`, a private number."""


@dataclass(frozen=True)
class Tuning:
    """A `Tuning` makes K runs. Each draws a candidate, uniformly, makes its two releases, and
    scores them with noise. The one with the best score is released, with its candidate; K and all
    else are secret.

    The score is the number of private records whose label the releases tell: the label under which
    the record's terms weigh most. Guarantee: add or remove one unit, at most `records_per_unit` k
    records. For given releases it changes the score by k at most, so that discrete Laplace noise
    of `score_scale` makes a run cost what its candidate does, composed with
    `DiscreteLaplace(score_scale, k)`; which candidate it is depends on no data, and the worst one
    bounds them all. K is drawn from a truncated negative binomial law, whatever the data, and all
    runs together cost `PrivateSelection`. Proof: docs/privacy.md, sections 4.9 and 6.12.
    """

    candidates: tuple[DpKps, ...]
    score_scale: float
    shape: float
    gamma: float

    def __post_init__(self) -> None:
        checked_scale(self.score_scale)

    @property
    def records_per_unit(self) -> int:
        return self.candidates[0].records_per_unit

    @property
    def dp_event(self) -> PrivateSelection:
        releases = Parallel.of(candidate.dp_event for candidate in self.candidates)
        score = DiscreteLaplace(self.score_scale, self.records_per_unit)
        return PrivateSelection(Composed((releases, score)), self.shape, self.gamma)

    def with_noise_factor(self, factor: float) -> Tuning:
        """Return the same with all noises, which have the factor 1, multiplied by another."""
        candidates = tuple(replace(one, noise_factor=factor) for one in self.candidates)
        return replace(self, candidates=candidates, score_scale=self.score_scale * factor)

    def drawn(self, rng: np.random.Generator) -> list[int]:
        """Draw K, and the candidate of every run; secret. `rng` has to be, too."""
        K = TruncatedNegativeBinomial(self.shape, self.gamma).draw(rng)
        return [int(number) for number in rng.integers(len(self.candidates), size=K)]

    def noisy_scores(self, right_R: Counts) -> Counts:
        """Return the scores of R runs that tell so many labels right."""
        return discrete_laplace(right_R, self.score_scale)

    def selected(self, drawn: Sequence[int], run: OneRun) -> dict[str, Any]:
        """Make the runs of `drawn`, and return the best one's candidate, releases and score, which
        is all that may be released."""
        return best(self._scored(drawn, run))

    def _scored(self, drawn: Sequence[int], run: OneRun) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in drawn:
            made = run(number)
            score = int(self.noisy_scores(np.array([made.pop("right")]))[0])
            yield score, {"candidate": number, "noisy_score": score} | made


def weights(method: DpKps, noisy: Mapping[str, Sums]) -> Weights:
    """Return the probabilities by which the sequences of each label are drawn."""
    drawn = Sequences(method, np.zeros((method.terms, 1)), noisy)
    return {label: drawn.weights(label) for label in noisy}


def recognised(
    method: DpKps, terms: Sequence[str], weights_N: Weights, records: Iterable[tuple[str, str]]
) -> int:
    """Return how many records, texts and labels, have the label under which their terms weigh
    most. A record without any of the terms is not one of them."""
    matcher, S = TermMatcher(terms), method.settings.phrases_per_record
    labels = list(weights_N)
    weights_CN = np.array([weights_N[label] for label in labels])
    right = 0
    for text, label in records:
        totals_C = weights_CN[:, matcher.first_terms(text, S)].sum(axis=1)
        best_C = int(totals_C.argmax())
        right += totals_C[best_C] > 0 and labels[best_C] == label
    return int(right)

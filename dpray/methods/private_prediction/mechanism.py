"""The mechanism of one token of private prediction (Amin et al. 2024, Algorithm 1, lines 12 to 20).

`PrivateToken` has its public parameters and its cost. It is made of softmax sampling, which is the
exponential mechanism (Lemma 4), and of the sparse vector (Lemma 5). `step` draws by it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import AboveThreshold, ExponentialMechanism
from dpray.engines.base import SelectorSpec
from dpray.methods.private_prediction.logits import Candidates, Clip
from dpray.types import ReadOnlyJson

if TYPE_CHECKING:  # a plan holds a `PrivateToken` and needs no torch
    import torch

    from dpray.methods.private_prediction.settings import PrivatePredictionSettings

SELECTOR = "dpray.methods.private_prediction.token:PrivateTokenSelector"


@dataclass(frozen=True)
class SoftmaxSampler:
    """Draws `x ~ softmax(u / temperature)`.

    Sensitivity: adding or removing one privacy unit moves each component of `u` by at most
    `sensitivity`, so the log-probability ratio of any two tokens moves by at most
    `2 * sensitivity / temperature`: an exponential mechanism of that bounded range, hence
    `1/2 * (sensitivity / temperature)^2` zCDP (Cesar and Rogers 2021).
    Proof: docs/privacy.md, section 2.3.
    """

    sensitivity: float
    temperature: float

    @property
    def dp_event(self) -> ExponentialMechanism:
        """Return the cost of one draw."""
        return ExponentialMechanism(range=2.0 * self.sensitivity / self.temperature)

    def exponents(self, utilities: torch.Tensor) -> torch.Tensor:
        """Return `u / temperature`, of which `sample_softmax` takes the softmax."""
        return utilities.double() / self.temperature


@dataclass(frozen=True)
class SparseVector:
    """AboveThreshold on the distance of private and public predictions: answers at each position
    whether the private rows are far from the public one.

    Claim: a query has sensitivity `sensitivity` (1/s, times the records of a unit); the threshold
    has noise Laplace(noise) and each query fresh noise Laplace(2 * noise), so every answer up
    to and including one "far" is `2 * sensitivity / noise`-DP (Dwork et al. 2009) and
    `2 * (sensitivity / noise)^2` zCDP; the "near"s before it are free. After a "far" a new
    threshold has to be drawn.
    Proof: docs/privacy.md, section 2.5.
    """

    threshold: float
    noise: float
    sensitivity: float

    @property
    def dp_event(self) -> AboveThreshold:
        """Return the cost up to and including one "far"."""
        return AboveThreshold(epsilon=2.0 * self.sensitivity / self.noise)

    def draw_threshold(self, rng: np.random.Generator) -> float:
        return self.threshold + float(rng.laplace(scale=self.noise))

    def draw_noise(self, rng: np.random.Generator) -> float:
        return float(rng.laplace(scale=2.0 * self.noise))


@dataclass(frozen=True)
class PrivateToken:
    """Draws the next token from the clipped average of a batch's logits. It is drawn for free, from
    the public logits, if the public gate finds them sure or the sparse vector finds the two near.

    Guarantee: relation add-or-remove-one unit; a unit has at most `records_per_unit` rows, so a
    batch's average moves by at most `records_per_unit * clip_bound / batch_size` in any component,
    and the distance by `records_per_unit / batch_size`. At most `private_tokens` tokens are drawn
    privately for a batch: `dp_event` is the cost of them all.

    This holds for logits of a row that depend on this row only, and for candidates cut out by
    public logits that no private row touches. Engines satisfy the second exactly (`PublicPass`).
    Kernels satisfy the first up to their rounding, which goes with the shape of the whole forward
    pass: every engine that decodes is tested for it (`row_variation`), refused if it is too much
    (`share_of_rounding`), and the report states what was found. With a small model on a CPU, and
    one row more, the average moved by 1.000 c / s in float32 and by up to 1.39 c / s in bfloat16.
    So a plan takes float32 unless another dtype is configured. The sums themselves are exact
    (`dpray.methods.private_prediction.logits`). A row that is not finite counts for nothing.

    `batch_size` is the public expected size s; `threshold` and `noise` are theta and sigma of
    the sparse vector, both None if it is off. `sure_probability` is the mark of the public gate,
    None if it is off; if it opens, the sparse vector is not asked.
    Proof: docs/privacy.md, sections 2.1, 2.6 and 2.9.
    """

    batch_size: int
    private_tokens: int
    clip: Clip
    clip_bound: float
    temperature: float
    public_temperature: float
    candidates: Candidates = "all"
    k: int = 0
    threshold: float | None = None
    noise: float | None = None
    sure_probability: float | None = None
    records_per_unit: int = 1

    @classmethod
    def of(
        cls, settings: PrivatePredictionSettings, private_tokens: int, records_per_unit: int
    ) -> PrivateToken:
        """Return the mechanism of a batch of `private_tokens` tokens."""
        sparse_vector, gate = settings.sparse_vector, settings.public_gate
        return cls(
            batch_size=settings.expected_batch_size,
            private_tokens=private_tokens,
            clip=settings.clip,
            clip_bound=settings.clip_bound,
            temperature=settings.temperature,
            public_temperature=settings.public_temperature,
            candidates=settings.candidates,
            k=settings.k,
            threshold=None if sparse_vector is None else sparse_vector.threshold,
            noise=None if sparse_vector is None else sparse_vector.noise,
            sure_probability=None if gate is None else gate.probability,
            records_per_unit=records_per_unit,
        )

    @cached_property
    def ending(self) -> PrivateToken:
        """Return the mechanism of tokens that no private row has a part in: the public gate is open
        at every position."""
        return replace(
            self,
            threshold=None,
            noise=None,
            sure_probability=0.0,
            public_temperature=min(self.temperature, self.public_temperature),
        )

    @cached_property
    def values(self) -> ReadOnlyJson:
        """Return the fields, which are plain values; made once, because every text sends them."""
        return asdict(self)

    def selector(self, key: str, **others: object) -> SelectorSpec:
        """Describe the `PrivateTokenSelector` of a text; `others` are its further arguments."""
        return SelectorSpec(SELECTOR, {"mechanism": self.values, "key": key, **others})

    @cached_property
    def sampler(self) -> SoftmaxSampler:
        sensitivity = self.records_per_unit * self.clip_bound / self.batch_size
        return SoftmaxSampler(sensitivity=sensitivity, temperature=self.temperature)

    @cached_property
    def sparse_vector(self) -> SparseVector | None:
        if self.threshold is None or self.noise is None:
            return None
        return SparseVector(self.threshold, self.noise, self.records_per_unit / self.batch_size)

    @property
    def ungated(self) -> PrivateToken:
        """Return the mechanism without what makes tokens free, for an audit."""
        return replace(self, threshold=None, noise=None, sure_probability=None)

    @property
    def dp_event(self) -> Event:
        """Return the cost of one batch for a unit that is in it."""
        token: Event = self.sampler.dp_event
        if self.sparse_vector is not None:
            token = Composed((token, self.sparse_vector.dp_event))
        return SelfComposed(token, self.private_tokens)

    def share_of_rounding(self, row_variation: float, shares_public_pass: bool) -> float:
        """Return how far a batch of s rows may move if one more row moves the logits of each by
        `row_variation` nats: in units of what a unit moves the average, and the distance.

        A row's clipped logits move by at most twice as much, its probabilities by once as much in
        L1. A public row that shares the passes of private rows counts like s of them.
        Proof: docs/privacy.md, section 7.3.
        """
        unit = self.clip_bound if self.sparse_vector is None else min(self.clip_bound, 2.0)
        return 2.0 * row_variation * self.batch_size * (1 + shares_public_pass) / unit

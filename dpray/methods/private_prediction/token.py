"""One token of private prediction (Amin et al. 2024, Algorithm 1, lines 12 to 20).

`PrivateToken` is the mechanism: its public parameters, its cost, its draws. It is made of softmax
sampling, which is the exponential mechanism (Lemma 4), and of the sparse vector (Lemma 5).
`PrivateTokenSelector` carries it through a text, in the process that holds the logits.

With a schema, the vocabulary of a position is the set A of tokens that the schema allows. A row's
logits are cut to A before anything else is computed from them, so every rule on rows and on public
logits holds as it is. A is a function of the schema and of the tokens drawn so far, which are
public: it costs nothing, and nor does a token that it leaves no choice about.
Proof: docs/privacy.md, section 2.10.

Shapes: S private rows, V vocabulary, A the tokens that the schema allows (all, without one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import AboveThreshold, ExponentialMechanism
from dpray.engines.base import HostSync, Selected, Selection, SelectorSpec
from dpray.engines.finite_rows import highest
from dpray.engines.schema.forms import open_mask
from dpray.engines.schema.token_mask import TokenMask
from dpray.extras import Late
from dpray.mechanisms.randomness import generator
from dpray.methods.private_prediction.logits import (
    Candidates,
    Clip,
    CopyFilter,
    candidate_set,
    columns_of,
    dclip_sum,
    distribution_distance,
    even_if_not_finite,
    is_sure,
    log_probabilities,
    probability_sum,
    recentred_sum,
    sample_softmax,
)

# Imported late: a plan holds a `PrivateToken` and needs no torch.
if TYPE_CHECKING:
    import torch

    from dpray.methods.private_prediction.settings import PrivatePredictionSettings
else:
    torch = Late("torch")

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

    def sample(
        self,
        utilities: torch.Tensor,
        rng: np.random.Generator,
        draws: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Return the index of one draw, or of several, as `sample_softmax` does."""
        return sample_softmax(utilities, self.temperature, rng, draws)


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

    def is_far(self, distance: float, noisy_threshold: float, rng: np.random.Generator) -> bool:
        return distance + float(rng.laplace(scale=2.0 * self.noise)) >= noisy_threshold


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
    def values(self) -> Mapping[str, Any]:
        """Return the fields, which are plain values; made once, because every text sends them."""
        return asdict(self)

    def selector(self, key: str, **others: Any) -> SelectorSpec:
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

    def candidate_set(self, logits_public_V: torch.Tensor) -> torch.Tensor | None:
        """Return the tokens that may be drawn, by their public logits; None means all."""
        margin = 2.0 * self.clip_bound / self.batch_size
        return candidate_set(logits_public_V, self.candidates, self.k, margin)

    def clipped_sum(
        self,
        logits_SV: torch.Tensor,
        logits_public_V: torch.Tensor,
        candidates_K: torch.Tensor | None,
        highest_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the rows' clipped logits over the candidates. The sums of a batch's
        parts add up to that of the batch, to the last bit. `highest_S` is by default that of rows
        which were finite before."""
        highest_S = highest(logits_SV) if highest_S is None else highest_S
        match self.clip:
            case "recentred":
                return recentred_sum(logits_SV, highest_S, candidates_K, self.clip_bound)
            case "dclip":
                public_V = logits_public_V
                return dclip_sum(logits_SV, highest_S, public_V, candidates_K, self.clip_bound)

    def average(
        self,
        clipped_sum_K: torch.Tensor,
        logits_public_V: torch.Tensor,
        candidates_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the clipped average over the candidates (line 14): the sum divided by s."""
        mean_K = clipped_sum_K / self.batch_size
        match self.clip:
            case "recentred":
                return mean_K
            case "dclip":
                return log_probabilities(logits_public_V, candidates_K).double() + mean_K

    def draw_private(
        self,
        logits_SV: torch.Tensor,
        logits_public_V: torch.Tensor,
        rng: np.random.Generator,
        draws: tuple[int, ...] | None = None,
        added_K: torch.Tensor | float = 0.0,
        highest_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw by lines 14 and 15: average, then the exponential mechanism; in an audit as often as
        the shape `draws` says. `added_K` is the clipped sum of the batch's other rows, `highest_S`
        as for `clipped_sum`.

        Returns the token as `sample_softmax` does; so does `draw_public`."""
        candidates_K = self.candidate_set(logits_public_V)
        clipped_K = self.clipped_sum(logits_SV, logits_public_V, candidates_K, highest_S)
        total_K = added_K + clipped_K
        mean_K = self.average(total_K, logits_public_V, candidates_K)
        index = self.sampler.sample(mean_K, rng, draws)
        return index if candidates_K is None else candidates_K[index].where(index >= 0, -1)

    def draw_public(self, logits_public_V: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Draw by line 19, from the public logits only: free."""
        return sample_softmax(logits_public_V, self.public_temperature, rng)


@dataclass(frozen=True, eq=False)
class _Position:
    """The logits of the position at which a token is being selected: of the private rows (S, A),
    their highest (S,), the public ones (V,), and of those the ones that may be drawn (A,)."""

    private: torch.Tensor
    highest: torch.Tensor
    public: torch.Tensor
    allowed: torch.Tensor | None
    drawable: torch.Tensor


class PrivateTokenSelector:
    """Selects a text's tokens; a `dpray.engines.base.TokenSelector`.

    `mechanism` has the fields of a `PrivateToken`. `key` is used for one text only. `t` private
    tokens were drawn for the batch before this text, and `noisy_threshold` is in force (None if
    none is drawn yet). `longest_copy` is the most tokens in a row that the text may share with the
    public `prompt`, or with itself; tokens that would make it more are excluded. `form` has the
    arguments of `open_mask`, if the text has a schema. All arguments are plain values: they travel
    in a request to the process with the logits.
    """

    def __init__(
        self,
        mechanism: Mapping[str, Any],
        key: str,
        t: int = 0,
        noisy_threshold: float | None = None,
        prompt: Sequence[int] = (),
        longest_copy: int | None = None,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        self.mechanism = PrivateToken(**mechanism)
        self.rng = generator(key)
        self.t = t
        self.public_tokens = 0
        self.copies = None if longest_copy is None else CopyFilter(prompt, longest_copy)
        self.form = form
        self.mask: TokenMask | None = None
        # The sums of the rows of this position that came in parts.
        self.clipped_sum_K: torch.Tensor | float = 0.0
        self.probability_sum_A: torch.Tensor | float = 0.0
        self.position: _Position | None = None
        self.noisy_threshold = noisy_threshold
        if self.mechanism.sparse_vector is not None and noisy_threshold is None:
            self.noisy_threshold = self.mechanism.sparse_vector.draw_threshold(self.rng)  # line 4

    def add(
        self,
        logits_private_SV: torch.Tensor,
        highest_S: torch.Tensor,
        logits_public_V: torch.Tensor,
    ) -> None:
        """Add up a part of the batch's rows. Sums are exact, so a batch that comes in parts gives
        the tokens that it gives whole."""
        if self._forced(logits_public_V) is not None:
            return
        logits_public_V = even_if_not_finite(logits_public_V)
        allowed_A = self._allowed(logits_public_V)
        private_SA, highest_S = _cut(logits_private_SV, highest_S, allowed_A)
        drawable_A = self._drawable(logits_public_V, allowed_A)
        candidates_K = self.mechanism.candidate_set(drawable_A)
        self.clipped_sum_K = self.clipped_sum_K + self.mechanism.clipped_sum(
            private_SA, drawable_A, candidates_K, highest_S
        )
        if self.mechanism.sparse_vector is not None:
            self.probability_sum_A = self.probability_sum_A + probability_sum(private_SA, highest_S)

    def select(
        self,
        logits_private_SV: torch.Tensor,
        highest_S: torch.Tensor,
        logits_public_V: torch.Tensor,
    ) -> Selection:
        """Select a token by lines 12 to 20. Once the batch's r private tokens are drawn, select
        None, or end the text as its schema asks: the bound holds inside a text.

        The gate looks at the tokens that may be drawn. The distance is over all that the schema
        allows: private logits have no excluded ones.
        """
        if (forced := self._forced(logits_public_V)) is not None:
            self.public_tokens += 1
            return Selected(self._take(forced))
        if self.t >= self.mechanism.private_tokens:
            return Selected(None)
        public_V = even_if_not_finite(logits_public_V)
        allowed_A = self._allowed(public_V)
        private_SA, highest_S = _cut(logits_private_SV, highest_S, allowed_A)
        drawable_A = self._drawable(public_V, allowed_A)
        self.position = _Position(private_SA, highest_S, public_V, allowed_A, drawable_A)
        if self.mechanism.sure_probability is None:
            return self._compare(self.position)
        return HostSync(is_sure(drawable_A, self.mechanism.sure_probability), self._after_gate)

    def _after_gate(self, is_sure: torch.Tensor) -> Selection:
        assert self.position is not None
        return self._draw(self.position, True) if is_sure else self._compare(self.position)

    def _compare(self, at: _Position) -> Selection:
        if self.mechanism.sparse_vector is None:
            return self._draw(at, is_free=False)
        public_A = columns_of(at.public, at.allowed)
        distance = self._distance(at.private, at.highest, public_A)
        return HostSync(distance, self._after_comparison)

    def _after_comparison(self, distance: torch.Tensor) -> Selection:
        sparse_vector = self.mechanism.sparse_vector
        assert self.position is not None
        assert sparse_vector is not None and self.noisy_threshold is not None
        is_far = sparse_vector.is_far(float(distance), self.noisy_threshold, self.rng)  # 12, 13
        return self._draw(self.position, is_free=not is_far)

    def _draw(self, at: _Position, is_free: bool) -> Selection:
        mechanism, sparse_vector = self.mechanism, self.mechanism.sparse_vector
        if is_free:
            index = mechanism.draw_public(at.drawable, self.rng)  # line 19
            self.public_tokens += 1
        else:
            index = mechanism.draw_private(  # lines 14 and 15
                at.private,
                at.drawable,
                self.rng,
                added_K=self.clipped_sum_K,
                highest_S=at.highest,
            )
            self.t += 1  # line 16
            if sparse_vector is not None:
                self.noisy_threshold = sparse_vector.draw_threshold(self.rng)  # line 17
        self.clipped_sum_K = self.probability_sum_A = 0.0
        self.position = None
        if at.allowed is not None:
            index = at.allowed[index].where(index >= 0, -1)
        return HostSync(index, self._after_draw)

    def _after_draw(self, drawn: torch.Tensor) -> Selection:
        if drawn < 0:
            raise ValueError("no finite logit to draw from")
        return Selected(self._take(int(drawn)))

    def _forced(self, logits_public_V: torch.Tensor) -> int | None:
        """Return the token that the schema leaves no choice about, if there is one."""
        if self.mask is None and self.form is not None:
            self.mask = open_mask(**self.form, size=logits_public_V.numel())
        if self.mask is None:
            return None
        return self.mask.forced(must_end=self.t >= self.mechanism.private_tokens)

    def _allowed(self, logits_public_V: torch.Tensor) -> torch.Tensor | None:
        """Return the ids of the tokens that the schema allows, ascending; None means all."""
        if self.mask is None:
            return None
        return torch.from_numpy(np.flatnonzero(self.mask.allowed)).to(logits_public_V.device)

    def _drawable(
        self, logits_public_V: torch.Tensor, allowed_A: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the public logits with -inf for the tokens that would be copies, unless the schema
        allows no others."""
        excluded = [] if self.copies is None else list(self.copies.excluded)
        if excluded and self.mask is not None:
            rest = self.mask.allowed.copy()
            rest[excluded] = False
            excluded = excluded if rest.any() else []
        if excluded:
            logits_public_V = logits_public_V.clone()  # the logits are the engine's own
            logits_public_V[excluded] = -math.inf
        return columns_of(logits_public_V, allowed_A)

    def _distance(
        self, private_SA: torch.Tensor, highest_S: torch.Tensor, public_A: torch.Tensor
    ) -> torch.Tensor:
        sum_A = self.probability_sum_A + probability_sum(private_SA, highest_S)
        return distribution_distance(sum_A, public_A, self.mechanism.batch_size)

    def _take(self, token: int) -> int:
        """Note the token that comes next, and return it. The schema may put another in its place,
        so that the text ends in time: that is post-processing of the one that was drawn."""
        if self.mask is not None:
            token = self.mask.take(token)
        if self.copies is not None:
            self.copies.add(token)
        return token

    def state(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "public_tokens": self.public_tokens,
            "noisy_threshold": self.noisy_threshold,
            "was_closed": self.mask is not None and self.mask.was_closed,
        }


def _cut(
    logits_SV: torch.Tensor, highest_S: torch.Tensor, allowed_A: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows' logits of the tokens that the schema allows, and the highest of these: NaN
    for a row that is not finite, by whatever token."""
    if allowed_A is None:
        return logits_SV, highest_S
    logits_SA = columns_of(logits_SV, allowed_A)
    return logits_SA, highest(logits_SA) + (highest_S - highest_S)

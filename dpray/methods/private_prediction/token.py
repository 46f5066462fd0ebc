"""One token of private prediction (Amin et al. 2024, Algorithm 1, lines 12 to 20).

`PrivateToken` is the mechanism: its public parameters, its cost, its draws. It is made of softmax
sampling, which is the exponential mechanism (Lemma 4), and of the sparse vector (Lemma 5). The
tokens of a step are drawn together (`dpray.methods.private_prediction.step`).
`PrivateTokenSelector` carries the mechanism through a text, in the process that holds the logits.

With a schema, the vocabulary of a position is the set A of tokens that the schema allows. A row's
logits are cut to A before anything else is computed from them, so every rule on rows and on public
logits holds as it is. A is a function of the schema and of the tokens drawn so far, which are
public: it costs nothing, and nor does a token that it leaves no choice about.
Proof: docs/privacy.md, section 2.10.

Shapes: S private rows of a group, V vocabulary, A the tokens that the schema allows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
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
    sample_softmax,
)
from dpray.methods.private_prediction.step import Coins, Group, Step, Sums

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

    def draw_private(
        self,
        logits_SV: torch.Tensor,
        logits_public_V: torch.Tensor,
        rng: np.random.Generator,
        draws: tuple[int, ...],
    ) -> torch.Tensor:
        """Draw by lines 14 and 15 only, as often as the shape `draws` says: for an audit."""
        group = Group(logits_SV, highest(logits_SV), logits_public_V, Coins())
        ungated = replace(self, threshold=None, noise=None, sure_probability=None)
        step = Step(ungated, [group], looks=logits_SV.is_cpu)
        uniforms = torch.from_numpy(rng.integers(2**62, size=(1, math.prod(draws))))
        index = sample_softmax(step.private(), uniforms.to(logits_SV.device))
        return step.token_of(index).view(draws)

    def draw(self, groups: Sequence[Group]) -> torch.Tensor:
        """Draw the tokens of a step's groups, as `Step.draw` does. On a CPU, where looking at a
        value is no wait, each group is a step by itself, in which nothing is computed in vain."""
        if groups[0].public.is_cpu:
            return torch.cat([Step(self, [group], looks=True).draw() for group in groups])
        return Step(self, groups, looks=False).draw()


@lru_cache(maxsize=16, typed=True)
def _mechanism(**values: Any) -> PrivateToken:
    """Make the mechanism that the texts of a run have in common: one object, so that their tokens
    are drawn together."""
    return PrivateToken(**values)


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
        self.mechanism = _mechanism(**mechanism)
        self.rng = generator(key)
        self.t = t
        self.public_tokens = 0
        self.copies = None if longest_copy is None else CopyFilter(prompt, longest_copy)
        self.form = form
        self.mask: TokenMask | None = None
        # The sums of the rows of this position that came in parts.
        self.added: Sums | None = None
        self.if_sure: Mapping[str, Any] | None = None
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
        if self._forced(logits_public_V) is None:
            part = self._group(logits_private_SV, highest_S, logits_public_V, Coins())
            self.added = Step(self.mechanism, [part], looks=logits_public_V.is_cpu).sums

    def select(
        self,
        logits_private_SV: torch.Tensor,
        highest_S: torch.Tensor,
        logits_public_V: torch.Tensor,
    ) -> Selection:
        """Select a token by lines 12 to 20. Once the batch's r private tokens are drawn, select
        None, or end the text as its schema asks: the bound holds inside a text."""
        if (forced := self._forced(logits_public_V)) is not None:
            self.public_tokens += 1
            return Selected(self._take(forced))
        if self.t >= self.mechanism.private_tokens:
            return Selected(None)
        group = self._group(logits_private_SV, highest_S, logits_public_V, self._coins())
        return HostSync(group, self.mechanism.draw, self._after_draw)

    def _coins(self) -> Coins:
        """Draw what the position may need, in the order in which it is needed. A coin that is not
        used is the next one: where the gate is open, the draw's coin is the one that otherwise is
        the query's noise, and `if_sure` is the generator's state after it. The gate is public, so
        no private row decides which coins are used, and each is used once."""
        if (sparse_vector := self.mechanism.sparse_vector) is None:
            uniform = int(self.rng.integers(2**62))
            return Coins(uniform, uniform)
        assert self.noisy_threshold is not None
        before = self.rng.bit_generator.state
        uniform_if_sure = int(self.rng.integers(2**62))
        self.if_sure, self.rng.bit_generator.state = self.rng.bit_generator.state, before
        noise = sparse_vector.draw_noise(self.rng)
        uniform = int(self.rng.integers(2**62))
        return Coins(uniform, uniform_if_sure, noise, self.noisy_threshold)

    def _after_draw(self, drawn: torch.Tensor) -> Selected:
        token, answers = divmod(int(drawn), 4)
        is_sure, is_near = answers & 2, answers & 1
        if token < 0:
            raise ValueError("no finite logit to draw from")
        if is_sure and self.if_sure is not None:
            self.rng.bit_generator.state = self.if_sure
        if is_sure or is_near:
            self.public_tokens += 1
        else:
            self.t += 1  # line 16
            if self.mechanism.sparse_vector is not None:
                self.noisy_threshold = self.mechanism.sparse_vector.draw_threshold(self.rng)  # 17
        self.added = None
        return Selected(self._take(token))

    def _group(
        self,
        logits_private_SV: torch.Tensor,
        highest_S: torch.Tensor,
        logits_public_V: torch.Tensor,
        coins: Coins,
    ) -> Group:
        rows = logits_private_SV, highest_S, logits_public_V
        return Group(*rows, coins, self._allowed(), self._excluded(), self.added)

    def _forced(self, logits_public_V: torch.Tensor) -> int | None:
        """Return the token that the schema leaves no choice about, if there is one."""
        if self.mask is None and self.form is not None:
            self.mask = open_mask(**self.form, size=logits_public_V.numel())
        if self.mask is None:
            return None
        return self.mask.forced(must_end=self.t >= self.mechanism.private_tokens)

    def _allowed(self) -> np.ndarray | None:
        """Return whether the schema allows each token; None means all."""
        return None if self.mask is None else self.mask.allowed

    def _excluded(self) -> Collection[int]:
        """Return the tokens that would be copies, unless the schema allows no others."""
        excluded = [] if self.copies is None else list(self.copies.excluded)
        if excluded and (allowed := self._allowed()) is not None:
            rest = allowed.copy()
            rest[excluded] = False
            return excluded if rest.any() else []
        return excluded

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

"""This module draws one token of private prediction (Amin et al. 2024, Algorithm 1, lines 11 to
19).

`PrivateToken` is the mechanism: its public parameters, its cost, its draw. `PrivateTokenSelector`
carries it through a text, in the process that holds the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.event import Event
from dpray.engines.base import Waiting
from dpray.mechanisms.randomness import generator
from dpray.methods.private_prediction.copies import CopyBar
from dpray.methods.private_prediction.exponential import SoftmaxSampler, sample_softmax
from dpray.methods.private_prediction.public_gate import is_sure
from dpray.methods.private_prediction.sparse_vector import (
    SparseVector,
    distribution_distance,
    probability_sum,
)

# A plan holds a `PrivateToken` and needs no torch: what draws imports it.
if TYPE_CHECKING:
    import numpy as np
    import torch

    from dpray.methods.private_prediction.candidates import Candidates


@dataclass(frozen=True)
class PrivateToken:
    """Draws the next token from the clipped average of a batch's logits, or for free from the
    public ones: with the public gate where these are sure, with the sparse vector where the two are
    near.

    Guarantee: relation add-or-remove-one unit; a unit has at most `records_per_unit` rows, so a
    batch's average moves by at most `records_per_unit * clip_bound / batch_size` in any component,
    and the distance by `records_per_unit / batch_size`. At most `private_tokens` tokens are drawn
    privately for a batch: `dp_event` is the cost of them all.

    This holds for logits of a row that depend on this row alone, and for candidates cut out by
    public logits that no private row touches. Engines satisfy the second exactly (`PublicPass`).
    Kernels satisfy the first up to their rounding, which goes with the shape of the whole forward
    pass: every engine that decodes is tested for it (`row_variation`), and the report states what
    was found. With a small model on a CPU, and one row more, the average moved by 1.000 c / s in
    float32 and by up to 1.39 c / s in bfloat16. So a plan takes float32 unless another dtype is
    configured. The sums themselves are exact (`dpray.methods.private_prediction.clipping`).

    `batch_size` is the public expected size s; `threshold` and `noise` are theta and sigma of
    the sparse vector, both None where it is off. `sure_probability` or `sure_entropy` is the mark
    of the public gate, both None where it is off; where it opens, the sparse vector is not asked.
    Proof: docs/privacy.md, sections 2.1, 2.6 and 2.9.
    """

    batch_size: int
    private_tokens: int
    clip: Literal["recentred", "dclip"]
    clip_bound: float
    temperature: float
    public_temperature: float
    candidates: Candidates = "all"
    k: int = 0
    threshold: float | None = None
    noise: float | None = None
    sure_probability: float | None = None
    sure_entropy: float | None = None
    records_per_unit: int = 1

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Return the fields, which are plain values; made once, because every text sends them."""
        return asdict(self)

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

    def candidate_set(self, logits_public_V: torch.Tensor) -> torch.Tensor | None:
        """Return the tokens that may be drawn, by their public logits; None means all."""
        from dpray.methods.private_prediction.candidates import candidate_set

        margin = 2.0 * self.clip_bound / self.batch_size
        return candidate_set(logits_public_V, self.candidates, self.k, margin)

    def clipped_sum(
        self,
        logits_SV: torch.Tensor,
        logits_public_V: torch.Tensor,
        candidates_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the sum of the rows' clipped logits over the candidates. The sums of a batch's
        parts add up to that of the batch, to the last bit."""
        from dpray.methods.private_prediction.clipping import dclip_sum, recentred_sum

        if self.clip == "recentred":
            return recentred_sum(logits_SV, candidates_K, self.clip_bound)
        return dclip_sum(logits_SV, logits_public_V, candidates_K, self.clip_bound)

    def average(
        self,
        clipped_sum_K: torch.Tensor,
        logits_public_V: torch.Tensor,
        candidates_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the clipped average over the candidates (line 14): the sum divided by s."""
        from dpray.methods.private_prediction.clipping import log_probabilities

        mean_K = clipped_sum_K / self.batch_size
        if self.clip == "recentred":
            return mean_K
        return log_probabilities(logits_public_V, candidates_K).double() + mean_K

    def draw_private(
        self,
        logits_SV: torch.Tensor,
        logits_public_V: torch.Tensor,
        rng: np.random.Generator,
        draws: tuple[int, ...] | None = None,
        added_K: torch.Tensor | float = 0.0,
    ) -> torch.Tensor:
        """Draw by lines 14 and 15: average, then the exponential mechanism; in an audit as often as
        the shape `draws` says. `added_K` is the clipped sum of the batch's other rows.

        Returns the token as `sample_softmax` does; so does `draw_public`."""
        candidates_K = self.candidate_set(logits_public_V)
        total_K = added_K + self.clipped_sum(logits_SV, logits_public_V, candidates_K)
        mean_K = self.average(total_K, logits_public_V, candidates_K)
        index = self.sampler.sample(mean_K, rng, draws)
        return index if candidates_K is None else candidates_K[index].where(index >= 0, -1)

    def draw_public(self, logits_public_V: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Draw by line 19, from the public logits alone: free."""
        return sample_softmax(logits_public_V, self.public_temperature, rng)


class PrivateTokenSelector:
    """Selects a text's tokens; a `dpray.engines.base.TokenSelector`.

    `mechanism` is a `PrivateToken`'s fields. `key` is a fresh key for every text. `t` private
    tokens were drawn for the batch before this text and `noisy_threshold` is in force (None: none
    is drawn yet). With `longest_copy` a token is no candidate that makes the text share more tokens
    in a row than these with the public `prompt`, or with itself. All are plain values: they travel
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
    ) -> None:
        self.mechanism = PrivateToken(**mechanism)
        self.rng = generator(key)
        self.t = t
        self.public_tokens = 0
        self.copies = None if longest_copy is None else CopyBar(prompt, longest_copy)
        # The sums of the rows of this position that came in parts.
        self.clipped_sum_K: torch.Tensor | float = 0.0
        self.probability_sum_V: torch.Tensor | float = 0.0
        self.noisy_threshold = noisy_threshold
        if self.mechanism.sparse_vector is not None and noisy_threshold is None:
            self.noisy_threshold = self.mechanism.sparse_vector.draw_threshold(self.rng)

    def add(self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor) -> None:
        """Add up a part of the batch's rows. Sums are exact, so a batch that comes in parts gives
        the tokens that it gives whole."""
        drawable_V = self._without_copies(logits_public_V)
        candidates_K = self.mechanism.candidate_set(drawable_V)
        self.clipped_sum_K = self.clipped_sum_K + self.mechanism.clipped_sum(
            logits_private_SV, drawable_V, candidates_K
        )
        if self.mechanism.sparse_vector is not None:
            self.probability_sum_V = self.probability_sum_V + probability_sum(logits_private_SV)

    def select(
        self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor
    ) -> Waiting[int | None]:
        """Return None once the batch's r private tokens are drawn: the bound holds inside a
        text."""
        if self.t >= self.mechanism.private_tokens:
            return None
        drawable_V = self._without_copies(logits_public_V)
        if (yield from self._is_free(logits_private_SV, logits_public_V, drawable_V)):
            self.public_tokens += 1
            token = self.mechanism.draw_public(drawable_V, self.rng)
        else:
            self.t += 1
            token = self.mechanism.draw_private(
                logits_private_SV, drawable_V, self.rng, added_K=self.clipped_sum_K
            )
            if self.mechanism.sparse_vector is not None:
                self.noisy_threshold = self.mechanism.sparse_vector.draw_threshold(self.rng)
        self.clipped_sum_K = self.probability_sum_V = 0.0
        drawn = int((yield token))
        if drawn < 0:
            raise ValueError("no finite logit to draw from")
        if self.copies is not None:
            self.copies.add(drawn)
        return drawn

    def _without_copies(self, logits_public_V: torch.Tensor) -> torch.Tensor:
        """Return the public logits with -inf for the tokens that would be copies."""
        if self.copies is None or not (barred := self.copies.barred):
            return logits_public_V
        drawable_V = logits_public_V.clone()  # the logits are the engine's own
        drawable_V[list(barred)] = -math.inf
        return drawable_V

    def _is_free(
        self,
        logits_private_SV: torch.Tensor,
        logits_public_V: torch.Tensor,
        drawable_V: torch.Tensor,
    ) -> Waiting[bool]:
        """Return whether the public gate is open, or else the sparse vector's answer is "near". The
        gate looks at the tokens that may be drawn, and the distance at all of them: private logits
        have no bars."""
        marks = self.mechanism.sure_probability, self.mechanism.sure_entropy
        if marks != (None, None) and bool((yield is_sure(drawable_V, *marks))):
            return True
        sparse_vector = self.mechanism.sparse_vector
        if sparse_vector is None or self.noisy_threshold is None:
            return False
        sum_V = self.probability_sum_V + probability_sum(logits_private_SV)
        distance = distribution_distance(sum_V, logits_public_V, self.mechanism.batch_size)
        return not sparse_vector.is_far(float((yield distance)), self.noisy_threshold, self.rng)

    def state(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "public_tokens": self.public_tokens,
            "noisy_threshold": self.noisy_threshold,
        }


def selector_arguments(mechanism: PrivateToken, key: str, **others: Any) -> dict[str, Any]:
    """Return the plain values that `PrivateTokenSelector` is built from; `others` are what the
    batch's last text left, and what a text must not copy."""
    return {"mechanism": mechanism.values, "key": key, **others}

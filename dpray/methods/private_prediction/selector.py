"""The tokens of one text, by Algorithm 1, lines 12 to 20, in the process that holds the logits.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.engines.base import Waiting
from dpray.engines.token_mask import TokenMask, open_mask
from dpray.mechanisms.randomness import generator
from dpray.methods.private_prediction.logits import (
    CopyFilter,
    columns_of,
    distribution_distance,
    is_sure,
    probability_sum,
)
from dpray.methods.private_prediction.token import PrivateToken

# Imported late, as in `token`.
if TYPE_CHECKING:
    import torch


class PrivateTokenSelector:
    """Selects a text's tokens; a `dpray.engines.base.TokenSelector`.

    `mechanism` has the fields of a `PrivateToken`. `key` is a fresh key for every text. `t` private
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
        self.noisy_threshold = noisy_threshold
        if self.mechanism.sparse_vector is not None and noisy_threshold is None:
            self.noisy_threshold = self.mechanism.sparse_vector.draw_threshold(self.rng)  # line 4

    def add(self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor) -> None:
        """Add up a part of the batch's rows. Sums are exact, so a batch that comes in parts gives
        the tokens that it gives whole."""
        if self._forced(logits_public_V) is not None:
            return
        allowed_A = self._allowed(logits_public_V)
        private_SA = columns_of(logits_private_SV, allowed_A)
        drawable_A = self._drawable(logits_public_V, allowed_A)
        candidates_K = self.mechanism.candidate_set(drawable_A)
        self.clipped_sum_K = self.clipped_sum_K + self.mechanism.clipped_sum(
            private_SA, drawable_A, candidates_K
        )
        if self.mechanism.sparse_vector is not None:
            self.probability_sum_A = self.probability_sum_A + probability_sum(private_SA)

    def select(
        self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor
    ) -> Waiting[int | None]:
        """Select a token by lines 12 to 20. Once the batch's r private tokens are drawn, return
        None, or end the text as its schema asks: the bound holds inside a text.

        The gate looks at the tokens that may be drawn. The distance is over all that the schema
        allows: private logits have no excluded ones.
        """
        mechanism, sparse_vector = self.mechanism, self.mechanism.sparse_vector
        if (forced := self._forced(logits_public_V)) is not None:
            self.public_tokens += 1
            return self._take(forced)
        if self.t >= mechanism.private_tokens:
            return None
        allowed_A = self._allowed(logits_public_V)
        private_SA = columns_of(logits_private_SV, allowed_A)
        drawable_A = self._drawable(logits_public_V, allowed_A)
        is_free = False
        if mechanism.sure_probability is not None:
            is_free = bool((yield is_sure(drawable_A, mechanism.sure_probability)))
        if sparse_vector is not None and not is_free:
            assert self.noisy_threshold is not None
            public_A = columns_of(logits_public_V, allowed_A)
            distance = float((yield self._distance(private_SA, public_A)))
            is_free = not sparse_vector.is_far(distance, self.noisy_threshold, self.rng)  # 12, 13
        if is_free:
            index = mechanism.draw_public(drawable_A, self.rng)  # line 19
            self.public_tokens += 1
        else:
            index = mechanism.draw_private(  # lines 14 and 15
                private_SA, drawable_A, self.rng, added_K=self.clipped_sum_K
            )
            self.t += 1  # line 16
            if sparse_vector is not None:
                self.noisy_threshold = sparse_vector.draw_threshold(self.rng)  # line 17
        self.clipped_sum_K = self.probability_sum_A = 0.0
        drawn = int((yield index if allowed_A is None else allowed_A[index].where(index >= 0, -1)))
        if drawn < 0:
            raise ValueError("no finite logit to draw from")
        return self._take(drawn)

    def _forced(self, logits_public_V: torch.Tensor) -> int | None:
        """Return the token that the schema leaves no choice about, if there is one."""
        if self.mask is None and self.form is not None:
            self.mask = open_mask(**self.form, size=logits_public_V.numel())
        if self.mask is None:
            return None
        return self.mask.forced(must_end=self.t >= self.mechanism.private_tokens)

    def _allowed(self, logits_public_V: torch.Tensor) -> torch.Tensor | None:
        """Return the ids of the tokens that the schema allows, ascending; None means all."""
        import torch

        if self.mask is None:
            return None
        return torch.from_numpy(np.flatnonzero(self.mask.allowed)).to(logits_public_V.device)

    def _drawable(
        self, logits_public_V: torch.Tensor, allowed_A: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the public logits with -inf for the tokens that would be copies, unless the schema
        allows no others."""
        excluded = [] if self.copies is None else list(self.copies.excluded)
        if self.mask is not None:
            rest = self.mask.allowed.copy()
            rest[excluded] = False
            excluded = excluded if rest.any() else []
        if excluded:
            logits_public_V = logits_public_V.clone()  # the logits are the engine's own
            logits_public_V[excluded] = -math.inf
        return columns_of(logits_public_V, allowed_A)

    def _distance(self, private_SA: torch.Tensor, public_A: torch.Tensor) -> torch.Tensor:
        sum_A = self.probability_sum_A + probability_sum(private_SA)
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
        }

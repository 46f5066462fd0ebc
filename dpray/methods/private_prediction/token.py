"""One token after the other of a text of private prediction (Amin et al. 2024, Algorithm 1).

`PrivateTokenSelector` carries the mechanism (`PrivateToken`) through a text, in the process that
holds the logits. The tokens of a step are drawn together (`dpray.methods.private_prediction.step`).

With a schema, the vocabulary of a position is the set A of tokens that the schema allows. A row's
logits are cut to A before anything else is computed from them, so every rule on rows and on public
logits holds as it is. A is a function of the schema and of the tokens drawn so far, which are
public: it costs nothing, and nor does a token that it leaves no choice about.
Proof: docs/privacy.md, section 2.10.

Shapes: S private rows of a group, V vocabulary, A the tokens that the schema allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dpray.engines.base import GroupLogits, HostSync, Selected, Selection
from dpray.engines.schema.forms import open_mask
from dpray.engines.schema.token_mask import TokenMask
from dpray.extras import torch
from dpray.mechanisms.randomness import generator
from dpray.methods.private_prediction.logits import CopyFilter
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import Coins, Group, Step, Sums, draw
from dpray.types import Json, ReadOnlyJson


@lru_cache(maxsize=16)
def _draw_by(mechanism: PrivateToken) -> Callable[[Sequence[Group]], torch.Tensor]:
    """Return the function that draws a step's tokens: one object for the texts of a run."""
    return partial(draw, mechanism)


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
    public `prompt`, or with itself, what is `written` of it included; tokens that would make it
    more are excluded. `form` has the arguments of `open_mask`, if the text has a schema. All
    arguments are plain values: they travel in a request to the process with the logits.
    """

    def __init__(
        self,
        mechanism: ReadOnlyJson,
        key: str,
        t: int = 0,
        noisy_threshold: float | None = None,
        prompt: Sequence[int] = (),
        longest_copy: int | None = None,
        written: Sequence[int] = (),
        form: ReadOnlyJson | None = None,
    ) -> None:
        self.mechanism = _mechanism(**mechanism)
        self.rng = generator(key)
        self.t = t
        self.public_tokens = 0
        self.copies = None if longest_copy is None else CopyFilter(prompt, longest_copy, written)
        self.form = form
        self.mask: TokenMask | None = None
        # The sums of the rows of this position that came in parts.
        self.added: Sums | None = None
        self.if_sure: ReadOnlyJson | None = None
        self.noisy_threshold = noisy_threshold
        if self.mechanism.sparse_vector is not None and noisy_threshold is None:
            self.noisy_threshold = self.mechanism.sparse_vector.draw_threshold(self.rng)  # line 4

    def add(self, logits: GroupLogits) -> None:
        """Add up a part of the batch's rows. Sums are exact, so a batch that comes in parts gives
        the tokens that it gives whole."""
        if self._forced(logits.public) is None:
            part = self._group(logits, Coins())
            self.added = Step(self.mechanism, [part], looks=logits.public.is_cpu).sums

    def select(self, logits: GroupLogits) -> Selection:
        """Select a token by lines 12 to 20. Once the batch's r private tokens are drawn, select
        None, or end the text as its schema asks: the bound holds inside a text."""
        if (forced := self._forced(logits.public)) is not None:
            self.public_tokens += 1
            return Selected(self._take(forced))
        if self.t >= self.mechanism.private_tokens:
            return Selected(None)
        group = self._group(logits, self._coins())
        after = partial(self._after_draw, len(logits.public))
        return HostSync(group, _draw_by(self.mechanism), after)

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

    def _after_draw(self, vocabulary: int, drawn: torch.Tensor) -> Selected:
        answers, token = divmod(int(drawn), vocabulary + 1)
        is_sure, is_near = answers & 2, answers & 1
        if token == vocabulary:
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

    def _group(self, logits: GroupLogits, coins: Coins) -> Group:
        return Group(*logits, coins, self._allowed(), self._excluded(), self.added)

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

    def state(self) -> Json:
        return {
            "t": self.t,
            "public_tokens": self.public_tokens,
            "noisy_threshold": self.noisy_threshold,
            "was_closed": self.mask is not None and self.mask.was_closed,
        }

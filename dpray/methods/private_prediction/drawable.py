"""Public logits decide which tokens may be drawn, and which are drawn for free.

All of it follows from the public prompt's logits and the tokens drawn so far, so it costs nothing.
That holds to the last bit only if no private row moves a bit of the public logits; engines see to
that (`dpray.engines.transformers.PublicPass`).
Proof: docs/privacy.md, sections 2.4 and 2.9.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

# A plan holds a mechanism and needs no torch.
if TYPE_CHECKING:
    import torch

Candidates = Literal["all", "top_k", "top_k_plus"]


def candidate_set(
    logits_public_V: torch.Tensor, rule: Candidates, k: int, margin: float
) -> torch.Tensor | None:
    """Return the indices of the candidates, in ascending order; None means the whole vocabulary.

    `top_k`: the k highest public logits. `top_k_plus`: `{v : z_pub(v) >= l_k - margin}` with l_k
    the k-th highest and `margin = 2c/s`: by so much one clipped row can lift one token of the
    average against another (InvisibleInk 2025). A token whose public logit is -inf is a candidate
    only if fewer than k logits are finite.
    """
    if rule == "all":
        return None
    if k >= logits_public_V.numel():
        return (logits_public_V > -math.inf).nonzero().squeeze(-1)
    top = logits_public_V.float().topk(k)
    if rule == "top_k":
        return top.indices.sort().values
    return (logits_public_V.float() >= top.values[-1] - margin).nonzero().squeeze(-1)


def is_sure(logits_public_V: torch.Tensor, probability: float) -> torch.Tensor:
    """Return whether the public gate is open: the largest public probability is at least
    `probability`. The answer is a tensor without dimensions on the logits' device.

    A token drawn from the public logits while the gate is open costs nothing.
    """
    return logits_public_V.double().log_softmax(dim=-1).max().exp() >= probability


class CopyFilter:
    """Excludes every token after which more than `longest` tokens in a row would be the same as in
    the public prompt, or as before in the text."""

    def __init__(self, prompt: Sequence[int], longest: int) -> None:
        self._longest = longest
        self._last: tuple[int, ...] = ()
        self._next: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for token in prompt:
            self.add(token)
        self._last = ()  # a text begins anew: the end of the prompt is no part of it

    def add(self, token: int) -> None:
        """Note the token that comes next in the text."""
        if len(self._last) == self._longest:
            self._next[self._last].add(token)
        self._last = (*self._last, token)[-self._longest :]

    @property
    def excluded(self) -> Collection[int]:
        """Return the tokens that may not come next."""
        return self._next.get(self._last, ())

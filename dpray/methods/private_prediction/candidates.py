"""The tokens that may be drawn are chosen from public logits only, which costs nothing."""

from __future__ import annotations

from typing import Literal

import torch

Candidates = Literal["all", "top_k", "top_k_plus"]


def candidate_set(
    logits_public_V: torch.Tensor, rule: Candidates, k: int, margin: float
) -> torch.Tensor | None:
    """Return the indices of the candidates, in ascending order; None means the whole vocabulary.

    `top_k`: the k highest public logits. `top_k_plus`: `{v : z_pub(v) >= l_k - margin}` with l_k
    the k-th highest and `margin = 2c/s`: by so much one clipped row can lift one token of the
    average against another (InvisibleInk 2025). Where k public logits are finite, no other token
    is among the candidates.
    Proof: docs/privacy.md, section 2.4.
    """
    if rule == "all":
        return None
    if k >= logits_public_V.numel():
        return torch.nonzero(logits_public_V > -torch.inf).squeeze(-1)
    top = torch.topk(logits_public_V.float(), k)
    if rule == "top_k":
        return top.indices.sort().values
    return torch.nonzero(logits_public_V.float() >= top.values[-1] - margin).squeeze(-1)

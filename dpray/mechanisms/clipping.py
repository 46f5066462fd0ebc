"""Clipped averages of logits (Amin et al. 2024, Eq. 1; InvisibleInk 2025 for `dclip`).

Both return `(1/s) * sum over rows of (something in [-c, c]^V)`, plus, for `dclip`, public logits.
Adding or removing one row therefore moves no component by more than `c / s`: sensitivity `c / s` in
the infinity norm, whatever the number of rows that are there. `s` is the public expected batch
size, never the number of rows.

Shapes: S private rows, V vocabulary, K candidates (a subset of the vocabulary chosen from public
logits only). All arithmetic is in float32 whatever the model's dtype.
"""

from __future__ import annotations

import torch


def recentred_mean(
    logits_SV: torch.Tensor, candidates_K: torch.Tensor | None, clip_bound: float, batch_size: int
) -> torch.Tensor:
    """`(1/s) * sum_i clip_c(z_i)`, `clip_c(z)_j = max(-c, z_j - max_k z_k + c)` (Eq. 1)."""
    logits_SV = logits_SV.float()
    top_S1 = logits_SV.amax(dim=-1, keepdim=True)
    rows_SK = logits_SV if candidates_K is None else logits_SV[:, candidates_K]
    return torch.clamp(rows_SK - top_S1 + clip_bound, min=-clip_bound).sum(dim=0) / batch_size


def dclip_mean(
    logits_SV: torch.Tensor,
    logits_public_V: torch.Tensor,
    candidates_K: torch.Tensor | None,
    clip_bound: float,
    batch_size: int,
) -> torch.Tensor:
    """`z_pub + (1/s) * sum_i clamp(z_i - z_pub, -c, c)` on log-probabilities.

    Logits carry an arbitrary constant per prompt; each row's is taken out by its own log-sum-exp,
    a rule on that row alone.
    """
    logits_SV, logits_public_V = logits_SV.float(), logits_public_V.float()
    norm_S1 = torch.logsumexp(logits_SV, dim=-1, keepdim=True)
    public_V = torch.log_softmax(logits_public_V, dim=-1)
    rows_SK = logits_SV if candidates_K is None else logits_SV[:, candidates_K]
    public_K = public_V if candidates_K is None else public_V[candidates_K]
    difference_SK = torch.clamp(rows_SK - norm_S1 - public_K, -clip_bound, clip_bound)
    return public_K + difference_SK.sum(dim=0) / batch_size

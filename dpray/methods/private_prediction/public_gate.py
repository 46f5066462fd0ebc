"""The public gate decides, from public logits alone, which tokens are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

# A plan holds a mechanism with a gate and needs no torch.
if TYPE_CHECKING:
    import torch


def is_sure(
    logits_public_V: torch.Tensor, probability: float | None, entropy: float | None
) -> torch.Tensor:
    """Return whether the public distribution's largest probability is at least `probability`, or,
    with an `entropy` in its place, whether the distribution has at most so many nats: a tensor
    without dimensions on the logits' device.

    The answer is the same in both worlds only if no private row moves a bit of the public logits;
    engines see to that (`PublicPass`). Then it costs nothing, and neither does a token drawn from
    the public logits after it.
    Proof: docs/privacy.md, section 2.9.
    """
    log_p_V = logits_public_V.double().log_softmax(dim=-1)
    if probability is not None:
        return log_p_V.max().exp() >= probability
    assert entropy is not None
    # A token that cannot be drawn has probability 0, whose product with its logarithm is no number.
    return -(log_p_V.exp() * log_p_V).nan_to_num(nan=0.0).sum() <= entropy

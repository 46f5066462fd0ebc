"""Softmax sampling is the exponential mechanism (Amin et al. 2024, Lemma 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpray.accounting.events import ExponentialMechanism

if TYPE_CHECKING:
    import numpy as np
    import torch


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


def sample_softmax(
    logits: torch.Tensor,
    temperature: float,
    rng: np.random.Generator,
    draws: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Draw once from `softmax(logits / temperature)`, or as often as the shape `draws` says;
    carries no guarantee by itself.

    The weights are cut to whole numbers that add up to less than 2^62, exactly and in any order, so
    that all ranks and devices agree; one uniform of 62 bits inverts their cumulative sum. Of V
    logits, 2^19 at most, a probability is off by at most 2^-59, a relative V 2^-60, and the
    rounding of its exponential. -inf entries are never drawn.
    Returns the index, a tensor without dimensions (or of the shape `draws`) on the logits' device,
    and does not wait for it; it is -1 where no entry is finite, or one is +inf or not a number.
    """
    # Imported late: a plan holds a sampler and needs no torch.
    import torch

    scaled = logits.double() / temperature
    weights = (scaled - scaled.max()).exp_()
    # This sum is exact, and not below the weights' own: m 2^e with m < 1. So `scale`, the power of
    # two 2^(62 + 33 - e), rounds no weight, and takes their sum to at most m 2^62.
    total = (weights * 2.0**33).ceil_().sum()
    scale = total.frexp().mantissa / total * 2.0**95
    cumulative = (weights * scale).nan_to_num_(nan=0.0).long().cumsum(0)
    last = cumulative[-1]
    # last * uniform / 2^62, rounded down: by halves of both, because no integer has 124 bits.
    drawn = rng.integers(2**62, size=draws)
    uniform = int(drawn) if draws is None else torch.from_numpy(drawn).to(logits.device)
    high, low = uniform >> 31, uniform & (2**31 - 1)
    last_high, last_low = last >> 31, last & (2**31 - 1)
    middle = last_high * low + last_low * high + (last_low * low >> 31)
    mark = last_high * high + (middle >> 31)
    return torch.searchsorted(cumulative, mark, right=True).where(last > 0, -1)

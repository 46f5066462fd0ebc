"""Softmax sampling is the exponential mechanism (Amin et al. 2024, Lemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpray.accounting.events import ExponentialMechanism


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

    def sample(self, utilities: npt.NDArray[np.floating], rng: np.random.Generator) -> int:
        """Return the index of one draw, by inversion in float64 with one uniform of 53 bits."""
        return sample_softmax(utilities, self.temperature, rng)


def sample_softmax(
    logits: npt.NDArray[np.floating], temperature: float, rng: np.random.Generator
) -> int:
    """Draw once from `softmax(logits / temperature)`; carries no guarantee by itself.

    -inf entries are never drawn. Raises ValueError where no entry is finite.
    """
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    top = scaled.max()
    if not np.isfinite(top):
        raise ValueError("no finite logit to draw from")
    cumulative = np.cumsum(np.exp(scaled - top))
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    # The product may round up to the total, where searchsorted steps past the last weight.
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))

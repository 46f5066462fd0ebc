"""One step of DP-SGD: what it adds to the clipped sum of gradients, and what it costs.

Floating-point caveat: normals are drawn in float64 and rounded to float32, and the clipped sum is
a float32 sum; the sampler is not the exact one of the theory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.mechanisms.randomness import generator

# A plan holds a `DpSgdStep` and needs no torch.
if TYPE_CHECKING:
    import torch

BLOCK = 1 << 20
"""Normals held at once: 8 MiB."""

SUM_ROUNDING = (
    "the rounding of float32 sums over a batch: whether one text is there moves the sum of all "
    "others' clipped gradients a little, beside its own part within the clip norm C (by 4e-6 C in "
    "512 texts with a tiny model on a CPU; it grows with the batch and was not measured on a GPU)"
)
"""The report's line on DP-SGD beside the limits of every run; docs/benchmarks.md has figures."""

ROUNDING_SLACK = {"float32": 1e-4, "bfloat16": 3e-2}
"""How much longer than it should be a gradient that was clipped in this precision may come out: the
norm is of one backward pass, the clipped gradient of another, whose values are scaled and rounded
anew. Seen with small models: 4e-7 in float32; in bfloat16 a standard deviation of 4e-3, 1.2e-2 at
most in 360 texts."""


@dataclass(frozen=True)
class DpSgdStep:
    """Releases `(sum of clipped gradients + N(0, (sigma C)^2 I)) / B` of a Poisson sample.

    Guarantee: relation add-or-remove-one unit. Each unit joins with probability q
    (`dpray.methods.dp_sgd.poisson`) and brings one vector of L2 norm at most C, so the sum has
    sensitivity C; `dp_event` is the cost of the step. B, the expected batch size q * N, is a public
    number: nothing is divided by the size of the batch that was drawn, and an empty batch releases
    noise like any other.

    Gradients are scaled down to `clip_to`, a little below C, so that rounding in `precision`
    leaves them within C.
    """

    sampling_probability: float
    noise_multiplier: float
    clip_norm: float
    expected_batch_size: float
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.precision not in ROUNDING_SLACK:
            raise ValueError(f"precision is one of {sorted(ROUNDING_SLACK)}")
        for name in ("clip_norm", "expected_batch_size"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is a positive number")
        _ = self.dp_event  # raises where q or sigma is none

    @property
    def dp_event(self) -> PoissonSubsampledGaussian:
        return PoissonSubsampledGaussian(self.sampling_probability, self.noise_multiplier)

    @property
    def clip_to(self) -> float:
        return self.clip_norm / (1.0 + ROUNDING_SLACK[self.precision])

    @property
    def noise_std(self) -> float:
        """Of every coordinate of the noisy mean: sigma * C / B."""
        return self.noise_multiplier * self.clip_norm / self.expected_batch_size


class GradientNoise:
    """Adds a step's noise to gradients that are already divided by B.

    Claim: every coordinate that `add_` is given gets one normal of standard deviation
    `step.noise_std`, independent of all others. Who calls it hands every coordinate over once a
    step: a rank that alone holds a partition has a key of its own; ranks that hold the same
    coordinates share one key and hand them over in the same order, so that they draw the same.

    It cannot be pickled or copied: a state that was stored could draw the same noise again for
    another gradient, and the difference of the two would be in the open.
    """

    def __init__(self, step: DpSgdStep, key: str) -> None:
        self.step = step
        self.coordinates = 0
        """Noised so far, so that a step that skipped some can be told."""
        self._rng = generator(key)

    def add_(self, gradient: torch.Tensor) -> None:
        """In place, blockwise; `gradient` is contiguous and float32."""
        import torch

        if gradient.dtype != torch.float32:
            raise TypeError(f"noise is added in float32, the gradient is {gradient.dtype}")
        flat = gradient.detach().view(-1)
        self.coordinates += flat.numel()
        for start in range(0, flat.numel(), BLOCK):
            part = flat[start : start + BLOCK]
            normals = self._rng.standard_normal(part.numel())
            normals *= self.step.noise_std
            part += torch.from_numpy(normals).float().to(part.device)

    def __reduce__(self) -> NoReturn:
        raise TypeError("the state of a noise generator is never stored")

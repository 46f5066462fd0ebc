"""The slow reference of a step: lines 12 to 20 for one group after the other, as the paper has
them, with a generator that is asked when a number is needed.

Nothing is masked: tokens that may not be drawn are cut out. Public probabilities are torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, assert_never

import numpy as np
import torch

from dpray.mechanisms.randomness import generator
from dpray.methods.private_prediction.mechanism import PrivateToken

DCLIP: dict[str, Any] = {"clip": "dclip", "clip_bound": 2.0, "temperature": 0.8}
RECENTRED: dict[str, Any] = {"clip": "recentred", "clip_bound": 9.7, "temperature": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "recentred": RECENTRED,
    "dclip": DCLIP,
    "top_k": DCLIP | {"candidates": "top_k", "k": 40},
    "top_k_plus": DCLIP | {"candidates": "top_k_plus", "k": 40},
    "recentred, top_k": RECENTRED | {"candidates": "top_k", "k": 40},
    "sparse vector": RECENTRED | {"threshold": 1.1, "noise": 0.2},
    "gate": RECENTRED | {"sure_probability": 0.1},
    "gate and sparse vector": DCLIP | {"sure_probability": 0.12, "threshold": 1.1, "noise": 0.2},
}


def private_token(**changes: Any) -> PrivateToken:
    """The mechanism of a batch of four with three private tokens, but for the `changes`."""
    fields = {
        "batch_size": 4, "private_tokens": 3, "clip": "recentred", "clip_bound": 2.0,
        "temperature": 1.0, "public_temperature": 1.0,
    }  # fmt: skip
    return PrivateToken(**(fields | changes))


def mechanism(kind: str, **changes: Any) -> PrivateToken:
    return private_token(**({"batch_size": 16, "private_tokens": 5} | KINDS[kind] | changes))


def steps(values: torch.Tensor, grid: float) -> torch.Tensor:
    """Whole numbers of steps, as float64."""
    return (values * grid).trunc().double()


def exact_softmax(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = z.max(-1, keepdim=True).values
    whole = steps((z - top).exp(), 2.0**34)
    return whole, (top + (whole.sum(-1, keepdim=True) / 2.0**34).log()).float()


def clipped_sum(m: PrivateToken, z: torch.Tensor, public: torch.Tensor, K: slice) -> torch.Tensor:
    c = m.clip_bound
    match m.clip:
        case "recentred":
            above = (z - z.max(-1, keepdim=True).values)[:, K] - torch.tensor(-c)
        case "dclip":
            above = (z - exact_softmax(z)[1])[:, K] - public.log_softmax(-1)[K]
        case _:
            assert_never(m.clip)
    most = float(np.float32(math.floor(c * 2**24)))
    while most > c * 2**24:
        most = float(np.nextafter(np.float32(most), np.float32(0)))
    return steps(above, 2.0**24).clamp(-most, most).sum(0) / 2.0**24


def draw(logits: torch.Tensor, temperature: float, rng: np.random.Generator) -> int:
    scaled = logits.double() / temperature
    weights = (scaled - scaled.max()).exp()
    total = float((weights * 2.0**33).ceil().sum())
    whole = (weights * 2.0 ** (95 - math.frexp(total)[1])).long().tolist()
    mark = sum(whole) * int(rng.integers(2**62)) >> 62
    for token, weight in enumerate(whole):
        mark -= weight
        if mark < 0:
            return token
    raise AssertionError("the weights add up to more than the mark")


class OneByOne:
    """A text's tokens. `t` private ones were drawn for the batch before."""

    def __init__(self, mechanism: PrivateToken, key: str, t: int = 0) -> None:
        self.m, self.rng, self.t, self.public_tokens = mechanism, generator(key), t, 0
        self.threshold: float | None = None
        if mechanism.sparse_vector is not None:
            self.threshold = mechanism.sparse_vector.draw_threshold(self.rng)

    def select(
        self,
        private: torch.Tensor,
        highest: torch.Tensor,
        public: torch.Tensor,
        allowed: np.ndarray | None,
        excluded: Collection[int],
    ) -> int | None:
        if self.t >= self.m.private_tokens:
            return None
        lowest = torch.finfo(public.dtype).min
        public = public.clamp(min=lowest) if public.max().isfinite() else torch.zeros_like(public)
        A = torch.arange(len(public))
        if allowed is not None:
            A = torch.from_numpy(np.flatnonzero(allowed))
        public, z = public[A].float(), private[highest.isfinite()][:, A].float()
        z = z[z.max(-1).values.isfinite()] if len(z) else z
        drawable = public.clone()
        drawable[[i for i, token in enumerate(A.tolist()) if token in excluded]] = -math.inf
        if self._is_free(z, public, drawable):
            self.public_tokens += 1
            return int(A[draw(drawable, self.m.public_temperature, self.rng)])
        K = self._candidates(drawable)
        mean = clipped_sum(self.m, z, drawable, K) / self.m.batch_size
        if self.m.clip == "dclip":
            mean = mean + drawable.log_softmax(-1)[K].double()
        token = int(A[K[draw(mean, self.m.temperature, self.rng)]])
        self.t += 1
        if self.m.sparse_vector is not None:
            self.threshold = self.m.sparse_vector.draw_threshold(self.rng)
        return token

    def _is_free(self, z: torch.Tensor, public: torch.Tensor, drawable: torch.Tensor) -> bool:
        mark, vector = self.m.sure_probability, self.m.sparse_vector
        if mark is not None and float(drawable.double().softmax(-1).max()) >= mark:
            return True
        if vector is None:
            return False
        whole, _ = exact_softmax(z) if len(z) else (z.double(), None)
        scale = (2.0**40 * (1 - 2.0**-22) / whole.sum(-1, keepdim=True)).float()
        mean = (whole.float() * scale).floor().double().sum(0) / (2.0**40 * self.m.batch_size)
        distance = float((mean - public.double().softmax(-1)).abs().sum())
        assert self.threshold is not None
        return distance + float(self.rng.laplace(scale=2 * vector.noise)) < self.threshold

    def _candidates(self, drawable: torch.Tensor) -> torch.Tensor:
        finite = (drawable > -math.inf).nonzero()[:, 0]
        if self.m.candidates == "all" or self.m.k >= len(drawable):
            return finite
        order = drawable.sort(descending=True, stable=True)
        if self.m.candidates == "top_k":
            chosen = order.indices[: self.m.k].sort().values
        else:
            margin = 2 * self.m.clip_bound / self.m.batch_size
            chosen = (drawable >= order.values[self.m.k - 1] - margin).nonzero()[:, 0]
        return chosen[drawable[chosen] > -math.inf]

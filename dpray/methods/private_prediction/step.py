"""One step of private prediction: the next tokens of all groups, in one call (Amin et al. 2024,
Algorithm 1, lines 12 to 20).

Legend of shape suffixes: G groups, S private rows of a group, N of all groups, V vocabulary, A the
columns that a schema allows, K those of them that are candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, assert_never

import numpy as np

from dpray.engines.finite_rows import highest
from dpray.extras import torch
from dpray.methods.private_prediction.logits import (
    EXP_GRID,
    GRID,
    Rows,
    candidates,
    columns_of,
    concatenated,
    dclip_sums,
    distribution_distances,
    even_if_not_finite,
    halves,
    log_norms,
    probability_sums,
    recentred_sums,
    row_totals,
    sample_softmax,
)

if TYPE_CHECKING:
    from dpray.methods.private_prediction.mechanism import PrivateToken


GROUP_TILE = 2**22
"""Groups times vocabulary of what is computed at once: up to 64 bytes for each."""


class Coins(NamedTuple):
    """A group's random numbers for one position, drawn ahead: the draw's `uniform` of 62 bits, or
    `if_sure` where the public gate is open; and of the sparse vector the query's `noise`, and the
    noisy threshold in force."""

    uniform: int = 0
    if_sure: int = 0
    noise: float = 0.0
    noisy_threshold: float = 0.0


class Sums(NamedTuple):
    """Exact sums over rows: of clipped logits, (G, K), and of probabilities, (G, A)."""

    clipped: torch.Tensor
    probabilities: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Group:
    """A group's part of a step: the logits of its private rows (S, V) and their `highest`
    (S,), the `public` ones (V,), and its coins. `allowed` is what the schema allows (None: all), as
    truth values on the host, and `excluded` the tokens that would be copies. `added` are the sums
    of rows that came before."""

    private: torch.Tensor
    highest: torch.Tensor
    public: torch.Tensor
    coins: Coins
    allowed: np.ndarray | None = None
    excluded: Collection[int] = ()
    added: Sums | None = None


class Step:
    """The groups of one step, with `PrivateToken`'s guarantee for each.

    Claim: what is drawn for a group is a function of its own rows, public logits and coins. No bit
    of it depends on which other groups are in the step, in which order, or on their rows. So the
    sensitivity of a group's sum, and of its distance, is what one row of this group adds, if one
    unit is added or removed. *Why*: numbers meet each other in sums and maxima only. Sums over
    rows, and along the vocabulary (a softmax's total, a distance, cumulative weights), are of whole
    numbers, exact in any order, and a row is added to its own group's sums only. Maxima and the
    k-th highest are exact, too. All else is computed number by number.

    Nothing here waits for the device. Where `looks` is set, the host looks at the gate's and the
    sparse vector's answers and at the candidates, computes no sum that no draw needs, and only the
    columns that may be drawn: the same tokens, to the bit. There is one group then.
    Proof: docs/privacy.md, section 2.2.
    """

    def __init__(self, mechanism: PrivateToken, groups: Sequence[Group], looks: bool) -> None:
        assert len(groups) == 1 or not looks
        self.mechanism, self.groups, self.looks = mechanism, groups, looks
        self.vocabulary = len(groups[0].public)
        # Whole numbers and the bits of others, which go to the device in one piece.
        uniforms = halves(np.array([group.coins[:2] for group in groups], dtype=np.int64).T)
        noise = np.array([group.coins[2:] for group in groups], dtype=np.float64).T
        sizes = [0 if looks else len(group.highest) for group in groups]
        numbers = np.repeat(np.arange(len(groups)), sizes)
        packed = np.concatenate([uniforms.ravel(), noise.ravel().view(np.int64), numbers])
        G = len(groups)
        sizes = [4 * G, 2 * G, len(numbers)]
        uniforms, noise, self.group_N = self._uploaded(packed).split(sizes)
        self.uniform_2G1, self.if_sure_2G1 = uniforms.view(2, 2, G, 1).unbind(1)
        self.noise_G1, self.noisy_threshold_G1 = noise.view(torch.float64).view(2, G, 1)

    # Rows and public logits

    @cached_property
    def cut(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the columns A that are kept, None for all, and which of these each group's schema
        forbids, None for none."""
        if all(group.allowed is None for group in self.groups):
            return None, None
        if self.looks and (allowed_V := self.groups[0].allowed) is not None:
            return self._uploaded(np.flatnonzero(allowed_V)), None
        everything = np.ones(self.vocabulary, dtype=bool)
        masks = [everything if each.allowed is None else each.allowed for each in self.groups]
        return None, self._uploaded(~np.stack(masks))

    @cached_property
    def rows(self) -> Rows:
        """Return the private rows, cut to what the schema allows; the highest is NaN for a row that
        is not finite, by whatever token."""
        columns_A, forbidden_GA = self.cut
        logits_NA = columns_of(concatenated([each.private for each in self.groups]), columns_A)
        highest_N = concatenated([each.highest for each in self.groups])
        if forbidden_GA is not None:
            forbidden_NA = forbidden_GA.index_select(0, self.group_N)
            logits_NA = _without(logits_NA, forbidden_NA)
        if columns_A is not None or forbidden_GA is not None:
            highest_N = highest(logits_NA).add(highest_N, alpha=0)
        if not self.looks:
            return Rows(logits_NA, highest_N[:, None], self.group_N, len(self.groups))
        if highest_N.isnan().any():
            finite = highest_N.isfinite()
            logits_NA, highest_N = logits_NA[finite], highest_N[finite]
        return Rows(logits_NA, highest_N[:, None])

    @cached_property
    def public_GA(self) -> torch.Tensor:
        columns_A, forbidden_GA = self.cut
        public_GV = even_if_not_finite(concatenated([group.public[None] for group in self.groups]))
        public_GA = columns_of(public_GV, columns_A)
        return public_GA if forbidden_GA is None else _without(public_GA, forbidden_GA)

    @cached_property
    def drawable_GA(self) -> torch.Tensor:
        """Return the public logits, with -inf for tokens that may not be drawn."""
        if not any(group.excluded for group in self.groups):
            return self.public_GA
        excluded = np.zeros((len(self.groups), self.vocabulary), dtype=bool)
        for mask_V, group in zip(excluded, self.groups, strict=True):
            mask_V[list(group.excluded)] = True
        excluded_GA = columns_of(self._uploaded(excluded), self.cut[0])
        return _without(self.public_GA, excluded_GA)

    @cached_property
    def top_and_total(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the highest of the drawable public logits, and their exact `row_totals`."""
        top_G1 = self.drawable_GA.amax(dim=-1, keepdim=True).float()
        return top_G1, row_totals(self.drawable_GA, top_G1)

    @cached_property
    def candidates(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the columns K of A that are kept for private draws, None for all, and which of
        these each group may not draw, None for none."""
        m = self.mechanism
        if m.candidates == "all":
            is_cut = self.cut[1] is not None or any(group.excluded for group in self.groups)
            return None, self.drawable_GA == -torch.inf if is_cut else None
        margin = 2.0 * m.clip_bound / m.batch_size
        may_GA = candidates(self.drawable_GA, m.candidates, m.k, margin)
        return (may_GA[0].nonzero()[:, 0], None) if self.looks else (None, ~may_GA)

    # Lines 12 to 20

    @cached_property
    def is_sure(self) -> torch.Tensor | bool:
        """Return whether the public gate is open: the largest public probability of the tokens that
        may be drawn is at least `sure_probability`. A token drawn from the public logits then costs
        nothing."""
        mark = self.mechanism.sure_probability
        return mark is not None and self._seen(self.top_and_total[1] * mark <= EXP_GRID)

    @cached_property
    def is_near(self) -> torch.Tensor | bool:
        """Return the sparse vector's answer (lines 12 and 13), over all that the schema allows:
        private logits have no excluded tokens. It does not count where the gate is open."""
        if self.mechanism.sparse_vector is None or self.is_sure is True:
            return False
        sums_GA = self.probability_sums_GA
        distance_G1 = distribution_distances(sums_GA, self.public_GA, self.mechanism.batch_size)
        return self._seen(distance_G1 + self.noise_G1 < self.noisy_threshold_G1)

    @cached_property
    def probability_sums_GA(self) -> torch.Tensor:
        found_GA = probability_sums(self.rows)
        return self._with_parts(found_GA, [each.added and each.added[1] for each in self.groups])

    @cached_property
    def clipped_sums_GK(self) -> torch.Tensor:
        """Return the sums of the rows' clipped logits, in steps of `GRID`. The sums of a batch's
        parts add up to that of the batch, to the last bit."""
        columns_K, clip_bound = self.candidates[0], self.mechanism.clip_bound
        match self.mechanism.clip:
            case "recentred":
                found_GK = recentred_sums(self.rows, columns_K, clip_bound)
            case "dclip":
                found_GK = dclip_sums(self.rows, self.log_public_GK, columns_K, clip_bound)
            case _:
                assert_never(self.mechanism.clip)
        return self._with_parts(found_GK, [each.added and each.added[0] for each in self.groups])

    @cached_property
    def sums(self) -> Sums:
        has_vector = self.mechanism.sparse_vector is not None
        return Sums(self.clipped_sums_GK, self.probability_sums_GA if has_vector else None)

    @cached_property
    def log_public_GK(self) -> torch.Tensor:
        """Return the public log-probabilities, float32."""
        return columns_of(self.drawable_GA, self.candidates[0]) - log_norms(*self.top_and_total)

    @cached_property
    def averages_GK(self) -> torch.Tensor:
        """Return the clipped averages (line 14): the sums divided by s."""
        means_GK = self.clipped_sums_GK / (GRID * self.mechanism.batch_size)
        match self.mechanism.clip:
            case "recentred":
                return means_GK
            case "dclip":
                return means_GK.add_(self.log_public_GK)

    def private(self) -> torch.Tensor:
        """Return the exponents of a private draw (line 15)."""
        exponents_GK = self.mechanism.sampler.exponents(self.averages_GK)
        barred_GK = self.candidates[1]
        return exponents_GK if barred_GK is None else _without(exponents_GK, barred_GK)

    def public(self) -> torch.Tensor:
        """Return the exponents of a free draw (line 19)."""
        return self.drawable_GA.double() / self.mechanism.public_temperature

    def draw(self) -> torch.Tensor:
        """Return each group's token, as `token_of` does, plus V + 1 if the sparse vector said
        "near", plus 2 (V + 1) if the gate was open, of shape (G, 1), on the device."""
        exponents_GA = _either(_or(self.is_sure, self.is_near), self.public, self.private)
        uniform_2G1 = _either(self.is_sure, lambda: self.if_sure_2G1, lambda: self.uniform_2G1)
        drawn_G1 = self.token_of(sample_softmax(exponents_GA, uniform_2G1))
        for answer, times in ((self.is_near, 1), (self.is_sure, 2)):
            if answer is not False:
                drawn_G1 = torch.add(drawn_G1, answer, alpha=times * (self.vocabulary + 1))
        return drawn_G1

    def token_of(self, index: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the drawn columns; V if a group had no token to draw."""
        is_free = self.is_sure is True or self.is_near is True
        for columns in (None if is_free else self.candidates[0], self.cut[0]):
            if columns is not None:
                last = len(columns) - 1
                index = columns[index.clamp(max=last)].where(index <= last, self.vocabulary)
        return index

    def _with_parts(
        self, sums_GK: torch.Tensor, parts: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        for sum_K, part_1K in zip(sums_GK, parts, strict=True):
            if part_1K is not None:
                sum_K += part_1K[0]
        return sums_GK

    def _seen(self, answer_G1: torch.Tensor) -> torch.Tensor | bool:
        return bool(answer_G1) if self.looks else answer_G1

    def _uploaded(self, values: np.ndarray) -> torch.Tensor:
        """Copy values to the device, without waiting for it."""
        tensor, device = torch.from_numpy(values), self.groups[0].public.device
        tensor = tensor.pin_memory() if device.type == "cuda" else tensor
        return tensor.to(device, non_blocking=True)


def draw_private(
    mechanism: PrivateToken,
    logits_SV: torch.Tensor,
    logits_public_V: torch.Tensor,
    rng: np.random.Generator,
    draws: tuple[int, ...],
) -> torch.Tensor:
    """Draw by lines 14 and 15 only, as often as the shape `draws` says: for an audit."""
    group = Group(logits_SV, highest(logits_SV), logits_public_V, Coins())
    step = Step(mechanism.ungated, [group], looks=logits_SV.is_cpu)
    uniforms = torch.from_numpy(halves(rng.integers(2**62, size=(1, math.prod(draws)))))
    index = sample_softmax(step.private(), uniforms.to(logits_SV.device))
    return step.token_of(index).view(draws)


def draw(mechanism: PrivateToken, groups: Sequence[Group]) -> torch.Tensor:
    """Draw the tokens of a step's groups, as `Step.draw` does. On a CPU, where looking at a
    value is no wait, each group is a step by itself, in which nothing is computed in vain. On a
    device so many of them are one that what is computed for each group takes little memory: how
    many there are depends on the sizes of batches, and these are private."""
    public, looks = groups[0].public, groups[0].public.is_cpu
    most = 1 if looks else max(1, GROUP_TILE // len(public))
    pieces = (groups[i : i + most] for i in range(0, len(groups), most))
    return concatenated([Step(mechanism, piece, looks).draw() for piece in pieces])


def _without(logits_GA: torch.Tensor, barred_GA: torch.Tensor) -> torch.Tensor:
    return logits_GA.masked_fill(barred_GA, -torch.inf)


def _or(one: torch.Tensor | bool, other: torch.Tensor | bool) -> torch.Tensor | bool:
    return other if one is False else one if other is False else one | other


def _either(
    condition: torch.Tensor | bool, yes: Callable[[], torch.Tensor], no: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the first where the condition is true, else the other one; what nobody takes is not
    computed."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return torch.where(condition, yes(), no())

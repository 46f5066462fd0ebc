"""`BatchAllowances` bound, before the labels' shares are measured, the Poisson batches that each
label may get when they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from dpray.accounting.composed_events import Parallel, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import ExponentialMechanism, PoissonSubsampledDraws
from dpray.mechanisms.poisson_batches import PoissonBatches
from dpray.mechanisms.shares import largest_remainder


def probability(public_size: int, batch_size: int, share: float) -> float:
    """Return the probability with which a label of this share expects `batch_size` units in a
    batch, or all, where it has fewer."""
    return batch_size / max(batch_size, public_size * share)


@dataclass(frozen=True)
class Allowance:
    """Allows a label whose share of the records is at least `share` so many batches, each of which
    a unit joins with at most this probability. All of it is public."""

    share: float
    sampling_probability: float
    batches: int

    def dp_event(self, draw: ExponentialMechanism, draws: int) -> Event:
        batch = PoissonSubsampledDraws(self.sampling_probability, draw.range, draws)
        return SelfComposed(batch, self.batches)


@dataclass(frozen=True)
class BatchAllowances:
    """Holds allowances of falling share. Units are records.

    Claim: whatever the measured shares are, each label gets at most as many batches as one of the
    allowances, with at most its probability. Fewer batches, and a smaller probability, are no worse
    than more, so a label's batches cost no more than that allowance. A unit meets the batches of
    one label. So, whatever was measured, the batches cost no more than `dp_event`, the worst of all
    allowances at every epsilon.
    Proof: docs/privacy.md, section 2.10.
    """

    public_size: int
    batch_size: int
    allowances: tuple[Allowance, ...]

    def of_share(self, share: float) -> Allowance:
        """Return the allowance of a label: that of the largest share that is not above its own. A
        label that is rarer than all gets the last one, and fewer units in its batches."""
        return next((a for a in self.allowances if a.share <= share), self.allowances[-1])

    def dp_event(self, draw: ExponentialMechanism, draws: int) -> Event:
        """Return the cost of all batches, in each of which `draws` tokens are drawn."""
        return Parallel.of(allowance.dp_event(draw, draws) for allowance in self.allowances)

    def batches(self, proportions: Mapping[str, float], most: int) -> PoissonBatches:
        """Divide among the labels, by their measured proportions, as many batches as the allowances
        hold: `most` at most, or one for each label, if that is more."""
        allowed = {label: self.of_share(share).batches for label, share in proportions.items()}
        # With a larger total some label's part, even rounded down, is more than it is allowed. With
        # this one a part that is rounded up may be: the next smaller ones are tried.
        bounds = (int((allowed[label] + 1) / p) for label, p in proportions.items() if p > 0)
        number = min([most, *bounds])
        counts = next(
            counts
            for counts in map(partial(_divided, proportions), range(number, -1, -1))
            if all(counts[label] <= allowed[label] for label in counts)
        )
        rarest = self.allowances[-1].share
        return PoissonBatches(
            counts,
            {
                label: probability(self.public_size, self.batch_size, max(share, rarest))
                for label, share in proportions.items()
            },
        )

    def at_most(self, batches: int) -> BatchAllowances:
        """Return the allowances where no label gets more batches than these."""
        capped = (replace(a, batches=min(a.batches, batches)) for a in self.allowances)
        return replace(self, allowances=tuple(capped))

    def fewer(self) -> BatchAllowances:
        """Return the allowances with a hundredth of the batches less, but at least one."""
        left = (replace(a, batches=max(1, math.floor(0.99 * a.batches))) for a in self.allowances)
        return replace(self, allowances=tuple(left))


def _divided(proportions: Mapping[str, float], number: int) -> dict[str, int]:
    """Divide so many batches among the labels, at least one each."""
    counts = largest_remainder(number, proportions)
    return {label: max(1, count) for label, count in counts.items()}

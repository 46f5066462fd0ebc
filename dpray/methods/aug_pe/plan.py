"""`make_plan` makes the frozen plan of Aug-PE from a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Event
from dpray.auditing.monte_carlo import votes_target
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.mechanisms.labels import largest_remainder
from dpray.mechanisms.votes import NOISE_MULTIPLIERS, VoteHistogram
from dpray.methods.aug_pe.algorithm import AugPe
from dpray.methods.aug_pe.prompts import VariationPrompts, load_variation_prompts
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.runs.plan import Before, Handed, Plan, resolved_noise
from dpray.types import InputError


@dataclass(frozen=True)
class AugPePlan(Plan):
    """The plan of Aug-PE. A run without noise, which is not private, has no `votes`. The first
    population begins with the texts in `first`."""

    settings: AugPeSettings
    votes: VoteHistogram | None
    prompts: VariationPrompts
    first: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def method_event(self) -> Event:
        return self.method.dp_event

    @cached_property
    def method(self) -> AugPe:
        settings = self.settings
        records = largest_remainder(settings.records, self.proportions)
        return AugPe(settings, records, self.votes, self.first)

    def given(self, handed: Handed) -> AugPePlan:
        prompts = replace(self.prompts, sequences=handed.terms)
        return replace(self, prompts=prompts, first=handed.texts)

    def audit_targets(self) -> Iterator[Target]:
        """Yield one vote histogram, and those of all iterations together."""
        assert self.votes is not None
        for iterations in sorted({1, self.settings.iterations}):
            name = "vote histogram" + (f", {iterations} iterations" if iterations > 1 else "")
            yield votes_target(name, self.votes, iterations)

    def how_far(self, published: int) -> str:
        done = published - (self.label_histogram is not None)
        return f" ({max(done, 0)} of {self.settings.iterations} iterations are done)"

    @property
    def noise_multiplier(self) -> float:
        """Return sigma over the votes' sensitivity; 0 for a run without noise."""
        return 0.0 if self.votes is None else self.votes.sigma / self.votes.sensitivity

    def method_summary(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "method": settings.model_dump(exclude={"records"})
            | {
                "records_per_label": dict(self.method.records),
                "noise_multiplier": self.noise_multiplier,
            },
            "records": settings.records,
            "llm_calls": self.method.llm_calls,
            "llm_calls_by_purpose": self.method.calls_by_purpose,
            "most_completion_tokens": self.method.llm_calls * settings.max_tokens,
            "noise_multiplier": self.noise_multiplier,
            "warnings": [],
        }

    def lines(self) -> dict[str, str]:
        settings = self.settings
        calls = ", ".join(
            f"{count:,} {name}" for name, count in self.method.calls_by_purpose.items()
        )
        return {
            "iterations": f"{settings.iterations}, noise multiplier {self.noise_multiplier:.4f} "
            f"on every vote count",
            "records": f"{settings.records}",
            "LLM calls": f"{self.method.llm_calls:,} ({calls}), and empty answers once more",
            "LLM tokens": f"at most {self.method.llm_calls * settings.max_tokens:,} written",
        }


def make_plan(config: Config, settings: AugPeSettings, before: Before | None = None) -> AugPePlan:
    """Resolve everything that is null. Raises InputError if the keys together cost more than
    `privacy.epsilon`."""
    handed = Handed() if before is None else before.handed
    first = None if before is None else before.dp_event
    proportions, k = config.data.proportions, config.data.max_records_per_unit
    prompts = load_variation_prompts(
        settings.template, settings.variation, settings.demonstrations, proportions
    ).showing(handed.terms)

    if k > 1 < settings.votes_per_record:
        raise InputError(
            "method.votes_per_record: several votes are for units of one record, and "
            f"data.max_records_per_unit is {k}"
        )
    shape = VoteHistogram(1.0, k, settings.votes_per_record)

    def votes(z: float) -> VoteHistogram:
        return replace(shape, sigma=z * shape.sensitivity)

    def event(z: float) -> Event:
        return SelfComposed(votes(z).dp_event, settings.iterations)

    noise = resolved_noise(config, settings.noise_multiplier, event, NOISE_MULTIPLIERS, first)
    if noise is None:
        return AugPePlan(config, proportions, settings, None, prompts)
    histogram = votes(noise)
    plan = AugPePlan(config, proportions, settings, histogram, prompts, handed.texts, before=first)
    return plan.affordable(noise)

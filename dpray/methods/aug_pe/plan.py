"""`make_plan` makes the frozen plan of Aug-PE from a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.engines.base import Engine
from dpray.engines.requests import Request, try_request
from dpray.engines.schema.forms import schema_for
from dpray.engines.schema.schema import Schema
from dpray.engines.text import token_counter
from dpray.io.public_files import check_public, read_terms
from dpray.mechanisms.labels import largest_remainder
from dpray.mechanisms.monte_carlo import Target, votes_target
from dpray.mechanisms.votes import NOISE_MULTIPLIERS, VoteHistogram
from dpray.methods.aug_pe.algorithm import AugPe, sampling
from dpray.methods.aug_pe.prompts import Kind, VariationPrompts, load_variation_prompts
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.runs.forecast import Work
from dpray.runs.plan import (
    Choice,
    Plan,
    PublicCalls,
    Signal,
    first_enough,
    resolved_noise_multiplier,
    within_epsilon,
)
from dpray.types import Prompt

ITERATIONS = (10, 8, 6, 5, 4, 3, 2, 1)
VARIATIONS = (7, 4, 2)

VOTES = 1.0
"""The signal that is enough: the votes of an average text, in standard deviations of the noise.
Below it, noise chooses most winners."""

COUNTED = 1024
"""The words of a prompt's text that a forecast counts the tokens of."""


@dataclass(frozen=True)
class AugPePlan(Plan):
    """The plan of Aug-PE. A run without noise, which is not private, has no `votes`."""

    settings: AugPeSettings
    votes: VoteHistogram | None
    prompts: VariationPrompts
    schema: Schema | None = None

    @property
    def method_event(self) -> Event:
        return self.method.dp_event

    @cached_property
    def method(self) -> AugPe:
        records = {key: kind.records for key, kind in self.prompts.kinds.items()}
        return AugPe(self.settings, records or self.records_per_label, self.votes)

    @property
    def records_per_label(self) -> dict[str, int]:
        return largest_remainder(self.settings.records, self.proportions)

    def check_embedder(self) -> None:
        # Late: it imports Ray, and a plan needs none.
        from dpray.workers.shards import check_voters, voters_gpus

        check_voters(self.config, voters_gpus(self.config))

    @property
    def decoded_labels(self) -> list[str]:
        return [label for label, records in self.method.records.items() if records]

    def request(self, name: str, prompt: Prompt) -> Request:
        """Return a request for a random text."""
        stop = self.prompts.template.stop
        return Request(name, prompt, sampling(self.settings, None, stop, self.schema))

    def try_engine(self, engine: Engine) -> None:
        prompt = self.prompts.random(self.decoded_labels[0], np.random.default_rng(0))
        try_request(engine, self.request("trial", prompt))

    def public_calls(self, labels: Sequence[str]) -> PublicCalls:
        rng = np.random.default_rng()
        kinds = {
            str(number): Kind(label, self.drawn_values(label, 1, rng)[0], 1)
            for number, label in enumerate(labels)
        }
        prompts = replace(self.prompts, kinds=kinds)
        return PublicCalls(
            [self.request(f"preview-{key}", prompts.random(key, rng)) for key in kinds],
            self.prompts.template.shows("random", "about"),
            attributes=[kind.attributes for kind in kinds.values()],
        )

    def audit_targets(self) -> Iterator[Target]:
        """Yield one vote histogram, and those of all iterations together."""
        assert self.votes is not None
        for iterations in sorted({1, self.settings.iterations}):
            name = "vote histogram" + (f", {iterations} iterations" if iterations > 1 else "")
            yield votes_target(name, self.votes, iterations)

    @property
    def signal(self) -> Signal:
        """Return n / (n_syn L sigma): the votes of a text over the standard deviation of the
        noise."""
        assert self.votes is not None
        candidates = self.settings.records * self.settings.variations
        votes = self.config.data.public_size / (candidates * self.votes.noise_std)
        return Signal(votes, VOTES, "votes a text, n / (n_syn L), over their noise")

    @property
    def noise_multiplier(self) -> float:
        return 0.0 if self.votes is None else self.votes.noise_multiplier

    @property
    def work(self) -> Work:
        count, settings = token_counter(self.config.engine), self.settings
        rng = np.random.default_rng(0)
        labels = self.decoded_labels
        # A text of as many tokens as one may have, of which a few are counted.
        number, shown = settings.max_tokens, min(settings.max_tokens, COUNTED)
        text, kind = "the " * shown, settings.variation
        random = max(count(self.prompts.random(label, rng)) for label in labels)
        varied = max(count(self.prompts.variation(kind, x, text, number, rng)) for x in labels)
        varied += number - shown
        calls = self.method.calls_by_purpose
        prefill = calls["random texts"] * random
        prefill += (calls["variations"] + calls["lookahead"]) * varied
        return Work(prefill, self.method.llm_calls * settings.max_tokens)

    def method_summary(self) -> dict[str, object]:
        settings = self.settings
        return {
            "method": settings.model_dump(exclude={"records"})
            | {
                "records_per_label": self.records_per_label,
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


def make_plan(config: Config, settings: AugPeSettings) -> AugPePlan:
    """Resolve everything that is null. Raises InputError if the keys together cost more than
    `privacy.epsilon`."""
    plan = with_noise(config, settings)
    return plan if plan.votes is None else within_epsilon(plan, plan.noise_multiplier)


def with_noise(config: Config, settings: AugPeSettings, noise: float | None = None) -> AugPePlan:
    """Return the plan with a noise multiplier that `settings` leave open, or the least one that
    `privacy.epsilon` allows."""
    proportions, k = config.data.proportions, config.data.max_records_per_unit
    prompts = prompts_of(config, settings)

    def votes(z: float) -> VoteHistogram:
        """Return the mechanism with noise multiplier z."""
        return VoteHistogram(z * k, k)

    def event(z: float) -> Event:
        return SelfComposed(votes(z).dp_event, settings.iterations)

    schema = schema_for(settings.schema, config.engine, settings.max_tokens)
    if noise is None:
        given = settings.noise_multiplier
        noise = resolved_noise_multiplier(config, given, event, NOISE_MULTIPLIERS)
    histogram = None if noise is None else votes(noise)
    return AugPePlan(config, proportions, settings, histogram, prompts, schema)


def prompts_of(config: Config, settings: AugPeSettings) -> VariationPrompts:
    """Load the template and the public terms that it shows. Raises InputError if one is wrong."""
    check_public(settings.template, "method.template", config.data.path)
    prompts = load_variation_prompts(
        settings.template, settings.variation, config.data.proportions, config.data.about_texts
    )
    return prompts.showing(read_terms(settings.terms, config.data.label_names, config.data.path))


def with_public_files(plan: AugPePlan) -> AugPePlan:
    """Return the plan after reading the public files of its settings again."""
    return replace(plan, prompts=prompts_of(plan.config, plan.settings))


def choose(config: Config, settings: AugPeSettings, records: int) -> Choice:
    """Choose T and L, if they are not set, for the most new variations in all whose votes stand
    above their noise; of equal numbers, the one with more iterations. If no votes stand above their
    noise, choose the strongest signal."""
    given = settings.model_fields_set
    iterations = [settings.iterations] if "iterations" in given else ITERATIONS
    variations = [settings.variations] if "variations" in given else VARIATIONS
    candidates = [
        settings.model_copy(update={"iterations": t, "variations": number})
        for t in iterations
        for number in variations
    ]

    def new_texts(settings: AugPeSettings) -> tuple[int, int]:
        return settings.iterations * max(1, settings.variations - 1), settings.iterations

    candidates.sort(key=new_texts, reverse=True)
    base, k = with_noise(config, settings, 1.0), config.data.max_records_per_unit

    def plan_of(tried: AugPeSettings, noise: float | None) -> AugPePlan:
        varied = config.model_copy(update={"method": tried})
        if noise is None:
            return make_plan(varied, tried)
        return replace(base, config=varied, settings=tried, votes=VoteHistogram(noise * k, k))

    bracket = NOISE_MULTIPLIERS if settings.noise_multiplier is None else None
    best = first_enough(plan_of, candidates, bracket)
    why = "the most variations whose votes stand above the noise"
    if given >= {"iterations", "variations"}:
        why = "as they are set"
    elif not best.signal.is_enough:
        why = "the votes that come nearest to their noise"
    chosen = best.settings
    return Choice(best, best.signal, (f"T {chosen.iterations}, L {chosen.variations}: {why}",))

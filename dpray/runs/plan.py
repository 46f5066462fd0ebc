"""A plan states what a run will do and what it costs. It is frozen and made of public numbers; no
data is opened."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from dpray.accounting.accountant import Cost, calibrate, cost, is_affordable
from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.event import NEIGHBORING_RELATION, Event
from dpray.config.config import Config
from dpray.config.sections import MethodSettings, TextSettings
from dpray.engines.base import Engine
from dpray.engines.model_path import tuned_without_noise, with_bases
from dpray.engines.requests import Request
from dpray.engines.text import TextCodec
from dpray.io.languages import embedder_advice
from dpray.io.template_file import About
from dpray.mechanisms.attributes import PairHistograms, Values, draw_values, noise_for
from dpray.mechanisms.labels import LabelHistogram
from dpray.mechanisms.monte_carlo import Target
from dpray.runs.forecast import Work
from dpray.runs.privacy_report import Accountant, Guarantee, Mechanism, MechanismCost, Person
from dpray.types import InputError, Json
from dpray.workers.engine import with_absolute_model
from dpray.workers.rows import Row

LossesOf = Callable[[Sequence[str], Mapping[str, str]], list[float]]
"""`LossesOf` evaluate a released model: they take texts and the values of their columns, and return
the mean negative log-likelihood per token of each text."""

Histogram = LabelHistogram | PairHistograms
"""Measures the labels of records, or them and the attributes, before the method begins."""

P = TypeVar("P", bound="Plan")

C = TypeVar("C")


@dataclass(frozen=True)
class TokenLimit:
    """The most tokens of a private text that a method reads; a longer text is cut. `key` sets it,
    and `tokens` counts a row's tokens by the model's tokenizer. The context may leave less: it also
    has the tokens of `rest`. `one_section` says that `method.sections`, which is 1, may be more."""

    key: str
    most: int
    rest: Callable[[TextCodec], int]
    tokens: Callable[[TextCodec, Row], int] = lambda codec, row: len(codec.ids(row["text"]))
    one_section: bool = False


@dataclass(frozen=True)
class Reads:
    """The part of a row that a method reads.

    column_values: the public values of the columns other than the text and the unit.
    token_limits: the limits at which private texts are cut.
    checked_first: whether every record is read before the first mechanism begins. A method needs
        that if it reads records, or these columns, only after a mechanism has begun, when a bad one
        cannot be corrected.
    """

    column_values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    token_limits: Sequence[TokenLimit] = ()
    checked_first: bool = False


@dataclass(frozen=True)
class PublicCalls:
    """Requests that show a run's model no private record, and nothing that was measured on one.

    says_about: whether the prompts say `data.about` if it is given.
    rows: the number of prompts that the run decodes in lockstep; 0 if it makes calls like these.
    released: makes the text that is released of an answer.
    sections: the number of answers to a request that are one text.
    following: makes of a request's number, and of its sections that are written, each with whether
    it was cut, the request of the next section.
    joined: makes a text of such sections.
    ending: makes of a request's number, and of a text that was cut in a sentence, the request that
    ends it; None if there is no room for it. No text is ended without it.
    attributes: those that each request asks for, none without `data.attributes`.
    """

    requests: Sequence[Request]
    says_about: bool = False
    rows: int = 0
    released: Callable[[str], str] = str.strip
    sections: int = 1
    following: Callable[[int, Sequence[tuple[str, bool]]], Request] | None = None
    joined: Callable[[Sequence[tuple[str, bool]]], str] | None = None
    attributes: Sequence[Mapping[str, str]] | None = None
    ending: Callable[[int, str], Request | None] | None = None


@dataclass(frozen=True)
class Plan(ABC):
    """The plan of one method; all of it is public.

    `proportions` is the public share of each label. If the shares are measured, it has a stand-in
    until then. `joint` has the shares of combinations of values of the label and the attributes
    once they are measured. `settings` are the method's keys.
    """

    config: Config
    proportions: Mapping[str, float]
    settings: MethodSettings
    joint: Mapping[Values, float] = field(default_factory=dict, repr=False, kw_only=True)

    @property
    @abstractmethod
    def method_event(self) -> Event:
        """Return the composition of all mechanisms of the method. A run without noise does not use
        it."""

    @cached_property
    def dp_event(self) -> Event:
        """Return the composition of all mechanisms of the run, which the ledger is charged for
        before the data is opened."""
        return with_spent(self.config, self.method_event)

    @cached_property
    def cost(self) -> Cost:
        return cost(self.dp_event, self.config.privacy.delta)

    @abstractmethod
    def audit_targets(self) -> Iterator[Target]:
        """Yield each mechanism of the method, as the run would build it. The method's `audit.py`
        makes them, and is imported late: it loads the code that draws noise."""

    @abstractmethod
    def method_summary(self) -> Json:
        """Return the resolved method, the expected records and LLM calls, and warnings: the keys of
        `dpray plan --json` next to the guarantee's."""

    @abstractmethod
    def lines(self) -> dict[str, str]:
        """Return the lines of the plan for people, next to the guarantee: name and text."""

    @property
    def work(self) -> Work:
        """Return the tokens of the run's language model. It may read the model's tokenizer."""
        return Work()

    def texts_of(self, max_tokens: int) -> int | None:
        """Return how many texts the run makes if `method.max_tokens` is this; None if their number
        does not depend on it."""
        return None

    def drawn_values(
        self, label: str, texts: int, rng: np.random.Generator
    ) -> Sequence[dict[str, str]]:
        """Draw the attributes of each of a label's texts from the measured shares of combinations
        with this label; before they are measured, all are as likely. `rng` is public.

        Claim: the draw is post-processing of the noisy histograms, and reads no record.
        Proof: docs/privacy.md, section 1.8.
        """
        data = self.config.data
        if not data.attributes:
            return [{}] * texts
        named = ([(name, value) for value in of] for name, of in data.attribute_names.items())
        shares = self._joint_of_labels.get(label) or dict.fromkeys(product(*named), 1.0)
        return draw_values([shares], texts, rng)

    @cached_property
    def _joint_of_labels(self) -> Mapping[str, Mapping[Values, float]]:
        """Return the `joint` shares by label, without it: there may be many labels, and each is
        looked up."""
        column, found = self.config.data.label, dict[str, dict[Values, float]]()
        for values, share in self.joint.items():
            label = next((value for name, value in values if name == column), "")
            of_attributes = tuple(each for each in values if each[0] != column)
            found.setdefault(label, {})[of_attributes] = share
        return found

    @property
    def about(self) -> About:
        """Return what the prompts may say about the texts and the labels."""
        return self.config.data.about_texts

    @property
    def signal(self) -> Signal | None:
        """Return the strength of what the method learns, against its noise; None if the public
        numbers do not tell it. It is not asked of a run without noise."""
        return None

    def warnings_before_charge(self) -> list[str]:
        """Return why a run may make nothing for its charge, which it tells before. Raises
        InputError if it makes nothing for certain."""
        return []

    @property
    def reads(self) -> Reads:
        return Reads(self.config.data.public_values)

    def loader(self, build: Callable[..., Engine], **options: object) -> Callable[[], Any]:
        """Return the function that loads the run's model; it can be sent to an actor."""
        return partial(build, with_absolute_model(self.config.engine), **options)

    def language_advice(self) -> list[str]:
        """Return what to set for texts in the language of data.language, by key."""
        if not self.settings.uses_embedder:
            return []
        return embedder_advice(
            self.config.embedder.model, self.config.data.language, "embedder.model"
        )

    def check_embedder(self) -> None:
        """Load and try `embedder.model` if the run uses it. Called before the charge. Raises
        InputError that says why it cannot be used."""
        return  # most methods use none

    def load_model(self, build: Callable[..., Engine]) -> Any:
        """Load the run's model."""
        return self.loader(build)()

    @property
    def trials(self) -> Sequence[tuple[str, Callable[[Engine], None]]]:
        """Return what is done with the loaded model before the charge, each with its name in the
        progress. They can be sent to an actor."""
        return [("trying the model", self.try_engine)]

    def try_engine(self, engine: Engine) -> None:
        """Make sure by public texts, before the charge, that the run's prompts reach the model.
        Raises InputError, EngineError and Resumable."""
        return  # DP-SGD has no prompts

    def public_calls(self, labels: Sequence[str]) -> PublicCalls:
        """Return the calls for a text of each label. Raises InputError for a method that writes no
        texts."""
        raise InputError(f"method.name: {self.settings.name} writes no texts to preview")

    def load_writer(self, build: Callable[..., Engine]) -> Engine:
        """Load the model that answers `public_calls`."""
        return cast(Engine, self.loader(build)())

    def summary(self) -> Json:
        """Return the object that `dpray plan --json` prints, without its tokens and forecast."""
        config = self.config
        summary = guarantee_of(self).to_json() | self.method_summary()
        summary["empty_texts"] = config.data.empty
        presets = {
            method.name: {"preset": method.preset, "keys": method.preset_keys}
            for method in config.method.each
            if isinstance(method, TextSettings) and method.preset is not None
        }
        if presets:
            summary["presets"] = presets
        signal = None if config.not_private else self.signal
        if signal is not None and not signal.is_enough:
            summary["warnings"].append(
                f"signal {signal.value:.3g} of the {signal.enough:g} that are worth a run "
                f"({signal.meaning}): noise will outweigh the records in the texts; `dpray plan "
                "CONFIG --compare` compares all methods"
            )
        summary["warnings"] += self.language_advice()
        if not config.not_private and config.privacy.delta > 1.0 / config.data.public_size:
            summary["warnings"].append(
                "privacy.delta is above 1 / data.public_size: it permits releasing a whole record"
            )
        if not config.not_private and was_tuned_without_noise(config.engine.model):
            summary["warnings"].append(TUNED_WITHOUT_NOISE)
        return summary


@dataclass(frozen=True)
class Signal:
    """The strength of what a method learns from the private records, against its noise.

    `value` and `enough` are in the method's own unit, named by `meaning`. They compare a method
    with itself, at another epsilon or with more records, and not with another method.
    """

    value: float
    enough: float
    meaning: str

    @property
    def is_enough(self) -> bool:
        return self.value >= self.enough


@dataclass(frozen=True)
class Choice:
    """A method's plan for a number of texts, its free parameters chosen from public numbers, with
    the reasons. It has no `signal` if no public file tells enough for one."""

    plan: Plan
    signal: Signal | None
    reasons: tuple[str, ...]


def first_enough(
    plan_of: Callable[[C, float | None], P],
    candidates: Sequence[C],
    bracket: tuple[float, float] | None,
) -> P:
    """Return the first candidate's plan whose signal is enough; if no signal is, the plan with the
    strongest one.

    `plan_of` makes a candidate's plan with a noise multiplier, by default with the least one of
    `bracket` that epsilon allows. The signal is inversely proportional to the noise, so one cost
    tells whether epsilon allows the largest noise at which it is enough; the least noise takes a
    dozen costs. The first candidate needs most noise. The last one needs least, and has the
    strongest signal: it is asked first, because no other is enough if it is not. Without a
    `bracket` the noise is set. No plan is made after the first that is enough.
    """

    def signal_of(plan: P) -> Signal:
        assert plan.signal is not None  # public numbers tell it for these methods
        return plan.signal

    if bracket is None:
        tried: list[P] = []
        for candidate in candidates:
            tried.append(plan_of(candidate, None))
            if signal_of(tried[-1]).is_enough:
                return tried[-1]
        return max(tried, key=lambda plan: signal_of(plan).value)
    least, most = bracket
    if not is_within_epsilon(plan_of(candidates[0], most)):
        candidates = candidates[:1]  # making its plan says that no noise is enough

    def may_be_enough(candidate: C) -> bool:
        signal = signal_of(plan_of(candidate, 1.0))
        noise = min(signal.value / signal.enough, most)
        return noise >= least and is_within_epsilon(plan_of(candidate, noise))

    for candidate in filter(may_be_enough, candidates if may_be_enough(candidates[-1]) else ()):
        plan = plan_of(candidate, None)
        if signal_of(plan).is_enough:
            return plan
    return plan_of(candidates[-1], None)


TUNED_WITHOUT_NOISE = (
    "engine.model was tuned without noise: the records that it was tuned on have to be public"
)


def was_tuned_without_noise(model: str) -> bool:
    """Return whether the model, or one that its adapters belong to, is the release of a run that
    was not private."""
    return any(tuned_without_noise(Path(folder)) for folder in with_bases(model))


def privacy_unit(column: str | None) -> str:
    """Return the words for the unit that is added or removed: a record, or all records with the
    same value in a column. A ledger compares these words: a run can only use a budget that was made
    with the same ones."""
    return "record" if column is None else f"all records with the same '{column}'"


PERSON_RECORDS = (2, 49)
"""A plan states the guarantee of a person with so many records, if a record is the unit."""


def persons_of(plan: Plan) -> list[Person]:
    """Return the guarantee of persons with several records, if each record is a unit: n records are
    n steps between neighbours. A delta of 1 is no guarantee.
    Proof: docs/privacy.md, section 1.1.
    """
    if plan.config.not_private or plan.config.data.unit is not None:
        return []
    epsilon, delta = plan.cost.epsilon, plan.cost.delta
    return [
        Person(records=n, epsilon=n * epsilon, delta=group_delta(epsilon, delta, n))
        for n in PERSON_RECORDS
    ]


def group_delta(epsilon: float, delta: float, n: int) -> float:
    """Return delta (1 + e^epsilon + ... + e^((n-1) epsilon)), rounded up, and at most 1."""
    if delta == 0:
        return 0.0
    log_largest = math.log(delta) + (n - 1) * epsilon
    if log_largest >= 0:
        return 1.0
    terms = math.fsum(math.exp(log_largest - i * epsilon) for i in range(n))
    return min(terms * (1 + 1e-9), 1.0)


def guarantee_of(plan: Plan) -> Guarantee:
    """Return what `plan --json` and `privacy_report.json` share. A run without noise has no
    epsilon."""
    data, not_private = plan.config.data, plan.config.not_private
    accountant, mechanisms = None, []
    if not not_private:
        accountant = Accountant(
            name="dpray over dp-accounting",
            version=version("dp-accounting"),
            bound=plan.cost.bound,
        )
        terms = sorted(plan.dp_event.terms().items(), key=lambda term: term[0].name)
        mechanisms = [_mechanism(part, count, plan.cost.delta) for part, count in terms]
    return Guarantee(
        epsilon=None if not_private else plan.cost.epsilon,
        delta=None if not_private else plan.cost.delta,
        neighboring_relation=NEIGHBORING_RELATION,
        privacy_unit=privacy_unit(data.unit),
        contribution_bound=data.max_records_per_unit,
        persons=persons_of(plan),
        accountant=accountant,
        mechanisms=mechanisms,
        not_private=not_private,
    )


def _mechanism(event: Event, count: int, delta: float) -> Mechanism:
    """Describe one mechanism of a plan: its parameters, how often it runs, its cost alone."""
    parameters = {key: value for key, value in event.to_json().items() if key != "type"}
    alone = cost(SelfComposed(event, count), delta)
    rho = event.zcdp_rho() * count
    price = MechanismCost(
        epsilon_alone=alone.epsilon,
        delta=delta,
        bound=alone.bound,
        # A subsampled Gaussian has none that is finite, and JSON has no infinity.
        zcdp_rho=rho if math.isfinite(rho) else None,
    )
    return Mechanism(name=event.name, parameters=parameters, count=count, cost=price)


def is_within_epsilon(plan: Plan) -> bool:
    """Return whether the plan costs at most `privacy.epsilon`, where possible without its cost."""
    privacy = plan.config.privacy
    return is_affordable(plan.dp_event, privacy.delta, privacy.epsilon)


def within_epsilon(plan: P, noise_multiplier: float) -> P:
    """Return the plan itself. Raises InputError if it costs more than `privacy.epsilon`."""
    asked = plan.config.privacy.epsilon
    if not plan.config.not_private and plan.cost.epsilon > asked:
        raise InputError(
            f"method.noise_multiplier: {noise_multiplier:g} costs eps {plan.cost.epsilon:.4f}, "
            f"more than privacy.epsilon {asked:g}"
        )
    return plan


def label_histogram(config: Config) -> Histogram | None:
    """Return the mechanism that measures the label proportions, or them and the attributes; None
    without one, and for one method of a chain, as the whole run measures them. Raises InputError if
    its noise is too large to be drawn."""
    data, privacy, unit = config.data, config.privacy, config.data.max_records_per_unit
    is_measured = data.label_proportions == "measured" or data.attributes
    if not is_measured or config.spent is not None:
        return None
    try:
        if not data.attributes:
            return LabelHistogram(tuple(data.label_names), privacy.epsilon_labels, unit)
        columns = len(data.public_values)
        histograms = max(1, math.comb(columns, 2))
        noise_std = noise_for(privacy.for_attributes, privacy.delta, histograms, unit)
        return PairHistograms(data.public_values, noise_std, unit, data.label)
    except ValueError as error:
        raise InputError(f"privacy.{config.measured_epsilon[1]}: {error}") from None


def with_spent(config: Config, event: Event) -> Event:
    """Compose a method's event with what the run spends before it: `config.spent`, or the measured
    label proportions and attributes."""
    before = config.spent
    if before is None and (histogram := label_histogram(config)) is not None:
        before = histogram.dp_event
    return event if before is None else Composed((before, event))


def resolved_noise_multiplier(
    config: Config,
    given: float | None,
    event: Callable[[float], Event],
    bracket: tuple[float, float],
) -> float | None:
    """Return the given noise multiplier (standard deviation over the sensitivity), or the least one
    at which `event`, with what is spent before it, costs at most `privacy.epsilon`; None in a run
    that is not private. Raises InputError for one outside `bracket`: its cost may be beyond
    floating point or memory."""
    privacy = config.privacy
    if config.not_private:
        if given is not None:
            raise InputError("method.noise_multiplier: an infinite privacy.epsilon adds no noise")
        return None
    if given is not None:
        least, most = bracket
        if not least <= given <= most:
            raise InputError(
                f"method.noise_multiplier: {given:g} is not between {least:g} and {most:g}"
            )
        return given
    try:
        return calibrate(
            lambda z: with_spent(config, event(z)),
            privacy.epsilon,
            privacy.delta,
            bracket=bracket,
            increasing=False,
        )
    except ValueError as error:
        raise InputError(f"privacy.epsilon: {error}") from None

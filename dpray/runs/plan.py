"""A plan is frozen and says what a run will do and what it costs. It holds public numbers only; no
data is opened."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from dpray.accounting.accountant import Cost, cost
from dpray.accounting.calibration import calibrate
from dpray.accounting.composed_events import Composed
from dpray.accounting.event import Event
from dpray.accounting.report import guarantee, no_guarantee
from dpray.auditing.target import Target
from dpray.config.base import Section
from dpray.config.config import Config
from dpray.config.sections import RuntimeConfig
from dpray.engines.adapters import tuned_without_noise
from dpray.engines.base import Engine
from dpray.engines.model_path import with_bases
from dpray.engines.text import TextCodec
from dpray.io.columns import label_name
from dpray.mechanisms.labels import LabelHistogram
from dpray.types import InputError, OnProgress
from dpray.workers.placement import placement
from dpray.workers.rows import Row, TextOf

Losses = Callable[[Sequence[str], Mapping[str, str]], list[float]]
"""`Losses` evaluate a released model: they take texts and the values of their columns, and return
the mean negative log-likelihood per token of each text."""


@dataclass(frozen=True)
class Handed:
    """`Handed` is what a method of a chain hands on to the next one, by label: what it released, so
    all of it is public. Either the sequences of terms of its records, or their texts."""

    terms: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Handed:
        """Take the terms of the records that have some, and the texts of the others."""
        terms: dict[str, list[Sequence[str]]] = {}
        texts: dict[str, list[str]] = {}
        for record in records:
            label = "" if record["label"] is None else label_name(record["label"])
            if "terms" in record:
                terms.setdefault(label, []).append(record["terms"])
            else:
                texts.setdefault(label, []).append(record["text"])
        return cls(terms, texts)


@dataclass(frozen=True)
class Before:
    """A `Before` is what comes before a method of a chain: the event of all that is charged until
    then, measured label proportions included, and stand-ins for what is handed on."""

    dp_event: Event
    handed: Handed


def longest_terms(terms: Iterable[str], number: int, labels: Iterable[str]) -> list[dict[str, Any]]:
    """Return a stand-in for each label's records: the `number` longest of the terms that a method
    may hand on, as long terms take most room in a prompt."""
    longest = sorted(terms, key=lambda term: (-len(term), term))[:number]
    return [{"label": label, "terms": longest} for label in labels]


@dataclass(frozen=True)
class TokenLimit:
    """A `TokenLimit` is the most tokens of a private text that a method reads; a longer text is
    cut. `key` sets it, and `tokens` counts a row's tokens by the model's tokenizer."""

    key: str
    most: int
    tokens: Callable[[TextCodec, Row], int] = lambda codec, row: len(codec.ids(row["text"]))


@dataclass(frozen=True)
class Plan(ABC):
    """A `Plan` is one method's plan; all of it is public.

    `proportions` is the public share of each label. Where the shares are measured, it holds a
    stand-in until then. `settings` are the method's keys. `before` is the event of what comes
    before this method in a chain.
    """

    config: Config
    proportions: Mapping[str, float]
    settings: Section
    before: Event | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def method_event(self) -> Event:
        """Return the composition of all mechanisms of the method. A run that is not private has
        none that anybody asks for."""

    @cached_property
    def dp_event(self) -> Event:
        """Return the composition of all mechanisms of the run, which the ledger is charged for
        before the data is opened."""
        return with_labels(self.config, self.method_event, self.before)

    @abstractmethod
    def method_summary(self) -> dict[str, Any]:
        """Return the resolved method, the expected records and LLM calls, and warnings: the keys of
        `dpray plan --json` beside the guarantee's."""

    @abstractmethod
    def lines(self) -> dict[str, str]:
        """Return the lines of the plan for people, beside the guarantee: name and text."""

    @abstractmethod
    def audit_targets(self) -> Iterator[Target]:
        """Yield each mechanism of the method, as the run would build it. The method's `audit.py`
        makes them, and is imported late: it loads the code that draws noise."""

    @property
    def column_values(self) -> dict[str, Sequence[str]]:
        """Return the public values of the columns that a record has beside its text and unit."""
        data = self.config.data
        return {data.label: tuple(data.label_names)} if data.label else {}

    @property
    def checks_records(self) -> bool:
        """Return whether every record is read and checked before the first mechanism begins. A
        method needs that if it reads records, or the columns in `column_values`, only after a
        mechanism has begun, when a bad one cannot be corrected."""
        return False

    @property
    def text_of(self) -> TextOf | None:
        """Return what makes a text from a row's columns, None where `data.text` is the text."""
        return None

    @property
    def texts_from_columns(self) -> bool:
        return self.text_of is not None

    @property
    def token_limits(self) -> Sequence[TokenLimit]:
        """Return the limits at which the method cuts private texts."""
        return ()

    def released_losses(self, folder: Path) -> Losses | None:
        """Load the model that the run in `folder` released; return None where it releases texts
        only."""
        return None

    @cached_property
    def cost(self) -> Cost:
        return cost(self.dp_event, self.config.privacy.delta)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Return the options of `build_engine` beside the configuration's."""
        return {}

    def try_models(self, build: Callable[..., Engine], on_progress: OnProgress) -> Engine | None:
        """Load the run's model once, where it will run: one that cannot be loaded costs nothing.
        `on_progress` is told what is waited for.

        Returns the engine to an in-process run, which can use it; None where no model is loaded at
        all. Raises InputError that says what is wrong.
        """
        if not self.config.engine.is_local:
            return None
        # Imported late: a plan that is only looked at has no use for Ray.
        from dpray.workers.engine import check_loads, with_absolute_model

        engine = with_absolute_model(self.config.engine)
        load = partial(build, engine, **self.engine_options)
        return check_loads(self.config, load, on_progress)

    def how_far(self, published: int) -> str:
        """Return the suffix that says how far an unfinished run is, by the number of published
        units."""
        return ""

    def stand_in(self) -> list[dict[str, Any]]:
        """Return stand-ins for what the method hands on in a chain: as many texts, or for each
        label a sequence of terms as long as one may be."""
        return []

    def given(self, handed: Handed) -> Self:
        """Return the plan with what the method before it handed on; its charge stays what it is."""
        raise NotImplementedError

    def with_runtime(self, runtime: RuntimeConfig) -> Self:
        return replace(self, config=self.config.model_copy(update={"runtime": runtime}))

    def with_salt(self, salt: str) -> Self:
        """Return the plan with the run's public salt, which some plans depend on."""
        return self

    @property
    def label_histogram(self) -> LabelHistogram | None:
        return label_histogram(self.config)

    @property
    def not_private(self) -> bool:
        """Return whether the run adds no noise: epsilon is infinite, only for measurements."""
        return math.isinf(self.config.privacy.epsilon)

    @property
    def privacy_unit(self) -> str:
        return privacy_unit(self.config.data.unit)

    def with_proportions(self, proportions: Mapping[str, float]) -> Self:
        """Return the plan with the measured label proportions; its charge stays what it is."""
        return replace(self, proportions=proportions)

    def affordable(self, noise_multiplier: float) -> Self:
        """Return the plan itself. Raises InputError where this noise costs more than
        `privacy.epsilon`."""
        asked = self.config.privacy.epsilon
        if not self.not_private and self.cost.epsilon > asked:
            raise InputError(
                f"method.noise_multiplier: {noise_multiplier:g} costs eps {self.cost.epsilon:.4f}, "
                f"more than privacy.epsilon {asked:g}"
            )
        return self

    def guarantee(self) -> dict[str, Any]:
        bound = self.config.data.max_records_per_unit
        if self.not_private:
            return no_guarantee(self.privacy_unit, bound)
        return guarantee(self.dp_event, self.cost, self.privacy_unit, bound)

    def summary(self) -> dict[str, Any]:
        """Return the object that `dpray plan --json` prints."""
        summary = self.guarantee() | self.method_summary() | {"placement": placement(self.config)}
        summary["empty_texts"] = self.config.data.empty
        if not self.not_private and self.config.privacy.delta > 1.0 / self.config.data.public_size:
            summary["warnings"].append(
                "privacy.delta is above 1 / data.public_size: it permits releasing a whole record"
            )
        if not self.not_private and was_tuned_without_noise(self.config.engine.model):
            summary["warnings"].append(TUNED_WITHOUT_NOISE)
        return summary


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


def label_histogram(config: Config) -> LabelHistogram | None:
    """Return the mechanism that measures the label proportions, or None without one. Raises
    InputError where its noise is too large to be drawn."""
    if config.data.label_proportions != "measured":
        return None
    data = config.data
    epsilon, unit = config.privacy.epsilon_labels, data.max_records_per_unit
    try:
        return LabelHistogram(tuple(data.label_names), epsilon, unit)
    except ValueError as error:
        raise InputError(f"privacy.epsilon_labels: {error}") from None


def with_labels(config: Config, event: Event, before: Event | None = None) -> Event:
    """Compose a method's event with what comes first: `before`, or the measured label
    proportions."""
    if before is None and (histogram := label_histogram(config)) is not None:
        before = histogram.dp_event
    return event if before is None else Composed((before, event))


def resolved_noise(
    config: Config,
    given: float | None,
    event: Callable[[float], Event],
    bracket: tuple[float, float],
    before: Event | None = None,
) -> float | None:
    """Return the given noise multiplier, or the least one within `bracket` at which `event` and
    what comes first cost `privacy.epsilon` at most; None in a run that is not private. Raises
    InputError for one outside `bracket`, whose cost may be beyond floating point or memory."""
    privacy = config.privacy
    if math.isinf(privacy.epsilon):
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
            lambda z: with_labels(config, event(z), before),
            privacy.epsilon,
            privacy.delta,
            bracket=bracket,
            increasing=False,
        )
    except ValueError as error:
        raise InputError(f"privacy.epsilon: {error}") from None

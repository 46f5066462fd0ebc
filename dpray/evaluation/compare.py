"""The methods are compared by their plans for the same number of texts, data and epsilon. All
numbers are public; no data is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from dpray.config.config import Config
from dpray.methods.config import AutoSettings, ChainSettings, parse_config
from dpray.methods.registry import choose
from dpray.runs.plan import Choice
from dpray.types import InputError, Json, OnProgress, Progress, ReadOnlyJson

METHODS = ("aug_pe", "dp_sgd", "private_prediction", "dp_kps")
"""The order of recommendation: with a small model texts of the first two methods were nearest to
real texts, each on one of two data sets (docs/results.md)."""

TEXTS_COMPARED = 1000
"""The number of texts to compare if the configuration gives none."""


@dataclass(frozen=True)
class Chosen:
    """The plan that was chosen for a method, or the reason why it has none."""

    choice: Choice | None
    why_not: str | None = None

    @property
    def is_enough(self) -> bool:
        choice = self.choice
        return choice is not None and (choice.signal is None or choice.signal.is_enough)

    def chosen_method(self) -> Json:
        """Return the section `method` of a configuration that runs the chosen plan."""
        assert self.choice is not None
        return self.choice.plan.settings.model_dump(exclude_unset=True)

    def summary(self) -> dict[str, object]:
        if self.choice is None:
            return {"feasible": False, "why_not": self.why_not}
        signal = self.choice.signal
        return {
            "feasible": True,
            "signal": None if signal is None else asdict(signal) | {"is_enough": signal.is_enough},
            "reasons": list(self.choice.reasons),
            "plan": self.choice.plan.summary(),
        }


@dataclass(frozen=True)
class Comparison:
    """The methods' plans for `records` texts, in the order of recommendation."""

    config: Config
    records: int
    answers: Mapping[str, Chosen]

    @property
    def recommended(self) -> str | None:
        """Return the first method whose signal is enough, or None."""
        return next((name for name, answer in self.answers.items() if answer.is_enough), None)

    def summary(self) -> dict[str, object]:
        """Return the object that `dpray plan --compare --json` prints."""
        return {
            "records_wanted": self.records,
            "recommended": self.recommended,
            "methods": {name: answer.summary() for name, answer in self.answers.items()},
        }

    def tree(self, name: str) -> dict[str, object]:
        """Return the configuration that runs a method's chosen plan, as a plain tree."""
        answer = self.answers[name]
        if answer.choice is None:
            raise InputError(f"method.name: {name} has no plan: {answer.why_not}")
        return with_method(plain(self.config), answer.chosen_method())


def compare(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    methods: Sequence[str] = (),
) -> Comparison:
    """Choose a plan for each of `methods`, by default for all. Keys that are set stay as they are.
    Raises InputError if a method's keys are wrong by themselves."""
    if math.isinf(config.privacy.epsilon):
        raise InputError(
            "privacy.epsilon: infinity adds no noise, so no signal can be compared with the noise"
        )
    records, asked = wanted(config), sections(config)
    names, answers = methods or list(asked), {}
    for done, name in enumerate(names):
        on_progress(Progress("comparing", done, len(names), name))
        answers[name] = answer(config, asked[name], records)
    return Comparison(config, records, answers)


def wanted(config: Config) -> int:
    """Return the number of texts that the configuration asks for."""
    method = config.method
    if isinstance(method, AutoSettings):
        return method.records
    section = plain(config)["method"]
    return next(
        (section[key] for key in records_keys(method.name) if section.get(key)), TEXTS_COMPARED
    )


def sections(config: Config) -> dict[str, Json]:
    """Return each compared method's section `method` by name. Raises InputError for a chain."""
    method = config.method
    if isinstance(method, ChainSettings):
        raise InputError("methods: only single methods are compared and rehearsed, not a chain")
    if not isinstance(method, AutoSettings):
        return {name: {"name": name} for name in METHODS} | {method.name: plain(config)["method"]}
    keys = {name: getattr(method, name) for name in METHODS}
    if named := [name for name in METHODS if "name" in keys[name]]:
        raise InputError(f"method.{named[0]}.name: there is no such key")
    return {name: {"name": name} | keys[name] for name in METHODS}


def answer(config: Config, section: ReadOnlyJson, records: int) -> Chosen:
    """Choose a plan for the method of a section `method`. It makes `records` texts, unless the
    section sets its own number. Raises InputError if the section's keys are wrong by themselves."""
    asked = {records_keys(section["name"])[0]: records, **section}
    try:
        parsed = parse_config(with_method(plain(config), asked))
    except InputError as error:
        why_not = _as_written(config, section, str(error))
        if why_not.startswith("method.") and len(section) > 1:
            raise InputError(why_not) from None
        return Chosen(None, why_not)
    try:
        return Chosen(choose(parsed, records))
    except InputError as error:
        return Chosen(None, _as_written(config, section, str(error)))


def _as_written(config: Config, section: ReadOnlyJson, message: str) -> str:
    """Return an error's message with the key as the configuration has it: with `name: auto`, the
    keys of a method are below the method's name."""
    if isinstance(config.method, AutoSettings) and message.startswith("method."):
        return f"method.{section['name']}.{message.removeprefix('method.')}"
    return message


def records_keys(name: str) -> tuple[str, ...]:
    """Return the keys that set the number of records. A comparison sets the first one."""
    return ("max_records", "texts") if name == "private_prediction" else ("records",)


def plain(config: Config) -> Json:
    """Return the configuration as the plain tree that it was read from."""
    return config.model_dump(mode="json", exclude_unset=True)


def with_epsilon(config: Config, epsilon: float) -> Json:
    """Return the configuration, as a plain tree, with another `privacy.epsilon`."""
    tree = plain(config)
    return tree | {"privacy": tree["privacy"] | {"epsilon": epsilon}}


def with_method(tree: Mapping[str, object], method: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration, as a plain tree, with another section `method`."""
    return {**tree, "method": dict(method)}

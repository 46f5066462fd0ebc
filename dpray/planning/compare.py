"""`compare` asks all methods, and chains of them, the same question: so many texts of this data at
this epsilon. `explore` asks it at several epsilons. Both know public numbers only, and open no
data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dpray.config.config import Config, parse_config
from dpray.methods.auto import AutoSettings
from dpray.methods.chain.settings import ChainSettings
from dpray.planning.pace import Pace, bench, known_pace
from dpray.planning.stage import plain, with_epsilon, with_method
from dpray.registry import choose
from dpray.runs.choice import Choice
from dpray.runs.plan import privacy_unit
from dpray.types import InputError, OnProgress, Progress

METHODS = ("aug_pe", "dp_sgd", "private_prediction", "dp_kps")
"""The first of these whose signal is enough is recommended: on two data sets, with a small model,
the texts of the first ones were nearest to real texts (experiments/results_small_model.md). Chains
come after them: none that was measured was better than the best method by more than chance."""

WITHOUT_TEXTS = ("topics",)
"""These methods write no texts: each is compared only as the first one of a chain."""

MOST_RECORDS = 2**40
"""A signal that is not enough with so many records never will be."""

RECORDS = 1000
"""A configuration that does not say how many records it wants is taken to want so many."""

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""`explore` tries these multiples of `privacy.epsilon`."""


@dataclass(frozen=True)
class Answer:
    """Holds the choice of a method or chain, or why it has none. `needs` is the number of records,
    to within a tenth, from which on its signal would be enough; None where it is enough, or never
    would be. `pace` is what `dpray bench` measured for the choice, if it did."""

    choice: Choice | None
    why_not: str | None = None
    needs: int | None = None
    pace: Pace | None = None

    @property
    def is_enough(self) -> bool:
        choice = self.choice
        return choice is not None and (choice.signal is None or choice.signal.is_enough)

    def chosen_method(self) -> dict[str, Any]:
        """Return the section `method` of a configuration with what was chosen."""
        assert self.choice is not None
        return self.choice.plan.settings.model_dump(exclude_unset=True)

    def time(self, rate: float | None = None) -> dict[str, Any] | None:
        """Return the time, memory and price of the run, as `dpray plan --json` does; None where its
        pace was not measured."""
        if self.choice is None or self.pace is None:
            return None
        return self.pace.summary(self.choice.plan, rate)

    def summary(self, rate: float | None = None) -> dict[str, Any]:
        if self.choice is None:
            return {"feasible": False, "why_not": self.why_not, "needs_records": self.needs}
        signal = self.choice.signal
        plan = self.choice.plan.summary()
        return {
            "feasible": True,
            "signal": None if signal is None else asdict(signal) | {"is_enough": signal.is_enough},
            "needs_records": self.needs,
            "reasons": list(self.choice.reasons),
            "plan": plan,
            "time": self.time(rate),
        }


@dataclass(frozen=True)
class Comparison:
    """Holds the answers of methods and chains to a request for so many `records`, in the order in
    which they are recommended."""

    config: Config
    records: int
    answers: Mapping[str, Answer]

    @property
    def recommended(self) -> str | None:
        """Return the name of the first method or chain whose signal is enough, or else None."""
        return next((name for name, answer in self.answers.items() if answer.is_enough), None)

    def summary(self, rate: float | None = None) -> dict[str, Any]:
        """Return the object that `dpray plan --compare --json` prints, with prices where an hour
        costs `rate`. Raises InputError for a rate where no method's pace was measured."""
        _check_rate(rate, [self])
        return self.as_tree(rate)

    def as_tree(self, rate: float | None) -> dict[str, Any]:
        return {
            "records_wanted": self.records,
            "recommended": self.recommended,
            "methods": {name: answer.summary(rate) for name, answer in self.answers.items()},
        }

    def tree(self, name: str) -> dict[str, Any]:
        """Return the configuration that runs a method as it was chosen, as a plain tree."""
        answer = self.answers[name]
        if answer.choice is None:
            raise InputError(f"method.name: {name} has no plan: {answer.why_not}")
        return with_method(plain(self.config), answer.chosen_method())


@dataclass(frozen=True)
class Explored:
    """Holds the answers at several epsilons, from the smallest on."""

    config: Config
    comparisons: tuple[Comparison, ...]

    def summary(self, rate: float | None = None) -> dict[str, Any]:
        """Return the object that `dpray plan --compare --html FILE --json` prints, with prices as
        `Comparison.summary` has them."""
        _check_rate(rate, self.comparisons)
        privacy, data = self.config.privacy, self.config.data
        return {
            "epsilon": privacy.epsilon,
            "delta": privacy.delta,
            "privacy_unit": privacy_unit(data.unit),
            "public_size": data.public_size,
            "records_wanted": self.comparisons[0].records,
            "epsilons": [
                {"epsilon": one.config.privacy.epsilon} | one.as_tree(rate)
                for one in self.comparisons
            ],
        }


def _check_rate(rate: float | None, comparisons: Sequence[Comparison]) -> None:
    answers = [answer for one in comparisons for answer in one.answers.values()]
    if rate is not None and all(answer.pace is None for answer in answers):
        raise InputError(
            "--rate: it is not known how long any of these takes on this machine; "
            "`dpray bench CONFIG --public FILE` measures a configuration that --write made"
        )


def compare(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    methods: Sequence[str] = (),
    cache: Path | None = None,
) -> Comparison:
    """Return the best answer of every one of `methods`, by default of all that `sections` has.
    Keys that are set stay as they are. `cache` is the folder of `dpray bench`'s figures, the user's
    by default. Raises InputError for a key of a method that is wrong in itself.
    """
    if math.isinf(config.privacy.epsilon):
        raise InputError(
            "privacy.epsilon: infinity adds no noise: there is no signal to compare with it"
        )
    records, asked = wanted(config), sections(config)
    names, answers = methods or list(asked), {}
    for done, name in enumerate(names):
        on_progress(Progress("comparing", done, len(names), name))
        found = answer(config, asked[name], records)
        if found.choice is not None:
            chosen = parse_config(with_method(plain(config), found.chosen_method()))
            found = replace(found, pace=known_pace(chosen, cache))
        answers[name] = found
    return Comparison(config, records, answers)


def with_paces(
    compared: Comparison,
    public: str,
    on_progress: OnProgress = lambda progress: None,
    **options: Any,
) -> Comparison:
    """Measure, by `dpray.planning.pace.bench` with these `options`, the pace of every method that
    has an answer, as it was chosen. Raises InputError and DprayError as `bench` does."""
    answers = dict(compared.answers)
    for name, found in compared.answers.items():
        if found.choice is not None:
            show = partial(_named, name, on_progress)
            chosen = parse_config(compared.tree(name))
            answers[name] = replace(found, pace=bench(chosen, public, on_progress=show, **options))
    return replace(compared, answers=answers)


def _named(name: str, on_progress: OnProgress, progress: Progress) -> None:
    on_progress(replace(progress, stage=f"{name}: {progress.stage}"))


def check_epsilons(epsilons: Sequence[float]) -> None:
    """Raise InputError for an epsilon that no method has noise for."""
    for epsilon in epsilons:
        if not (0 < epsilon < math.inf):
            raise InputError(f"--epsilon: {epsilon:g} is not above 0 and finite")


def ladder(config: Config) -> list[float]:
    """Return the epsilons to explore where none is named: `FACTORS` of `privacy.epsilon`."""
    return [factor * config.privacy.epsilon for factor in FACTORS]


def explore(
    config: Config,
    epsilons: Sequence[float],
    on_progress: OnProgress = lambda progress: None,
    cache: Path | None = None,
) -> Explored:
    """Compare at every one of `epsilons`, from the smallest on. Raises InputError as `compare`
    does, and for a bad epsilon."""
    check_epsilons(epsilons)
    return Explored(
        config,
        tuple(
            compare(parse_config(with_epsilon(config, epsilon)), on_progress, cache=cache)
            for epsilon in sorted(set(epsilons))
        ),
    )


def wanted(config: Config) -> int:
    """Return the number of records that are wanted."""
    method = config.method
    if isinstance(method, AutoSettings):
        return method.records
    section = plain(config)["method"]
    last = section["methods"][-1] if isinstance(method, ChainSettings) else section
    return next((last[key] for key in records_keys(last["name"]) if last.get(key)), RECORDS)


def sections(config: Config) -> dict[str, dict[str, Any]]:
    """Return, by name, the section `method` of every method and chain that is compared, with the
    keys that are set. A chain is named by its methods' names, joined by "+"."""
    method = config.method
    if isinstance(method, AutoSettings):
        keys = {name: getattr(method, name) for name in (*METHODS, *WITHOUT_TEXTS)}
        if named := [name for name in keys if "name" in keys[name]]:
            raise InputError(f"method.{named[0]}.name: there is no such key")
        each = {name: {"name": name} | keys[name] for name in keys}
        return {name: each[name] for name in METHODS} | {
            "+".join(chain): {"name": "chain", "methods": [each[name] for name in chain]}
            for chain in method.chains
        }
    written = plain(config)["method"]
    if not isinstance(method, ChainSettings):
        return {name: {"name": name} for name in METHODS} | {method.name: written}
    own = {each["name"]: dict(each) for each in written["methods"]}
    for name, keys in own.items():
        for key in records_keys(name):
            keys.pop(key, None)  # what it hands on, not what is wanted
    singles = {name: own.get(name, {"name": name}) for name in METHODS}
    return singles | {"+".join(own): written}


def _of_size(section: Mapping[str, Any], records: int) -> dict[str, Any]:
    """Return the section `method` with so many records, unless it says how many itself."""
    if section["name"] == "chain":
        methods = [_of_size(each, records) for each in section["methods"]]
        return {"name": "chain", "methods": methods}
    return {records_keys(section["name"])[0]: records, **section}


def answer(config: Config, section: Mapping[str, Any], records: int) -> Answer:
    """Return the answer of the method or chain that a section `method` configures."""
    try:
        parsed = parse_config(with_method(plain(config), _of_size(section, records)))
    except InputError as error:
        why_not, has_keys = _as_written(config, section, str(error))
        if has_keys:
            raise InputError(why_not) from None
        return Answer(None, why_not)

    def at(size: int) -> Answer:
        data = parsed.data.model_copy(update={"public_size": size})
        try:
            return Answer(choose(parsed.model_copy(update={"data": data}), records))
        except InputError as error:
            return Answer(None, _as_written(config, section, str(error))[0])

    size = parsed.data.public_size
    found = at(size)
    if found.is_enough or not at(MOST_RECORDS).is_enough:
        return found
    few, many = size, 2 * size
    while not at(many).is_enough:
        few, many = many, 2 * many
    while many > 1.1 * few:
        middle = math.isqrt(few * many)
        few, many = (few, middle) if at(middle).is_enough else (middle, many)
    return Answer(found.choice, found.why_not, many)


def _as_written(config: Config, section: Mapping[str, Any], said: str) -> tuple[str, bool]:
    """Return what an error says, its key under `name: auto` named as it stands in the
    configuration, and whether `section` sets keys of the method that it concerns: then the
    configuration may be wrong as written; otherwise the method merely has no plan."""
    key, _, rest = said.partition(".")
    if key == "methods":
        place, _, rest = rest.partition(".")
        section = section["methods"][int(place)] if place.isdigit() else {}
    elif key != "method":
        return said, False
    if section and isinstance(config.method, AutoSettings):
        said = f"method.{section['name']}.{rest}"
    return said, len(section) > 1


def records_keys(name: str) -> tuple[str, ...]:
    """Return the keys that say how many records a method makes, the one for a comparison first."""
    return ("max_records", "texts") if name == "private_prediction" else ("records",)

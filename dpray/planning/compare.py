"""All methods, and chains of them, side by side: the same number of texts of the same data at the
same epsilon. Everything here follows from public numbers; no data is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpray.config.config import Config
from dpray.methods.auto import AutoSettings
from dpray.methods.chain.settings import ChainSettings
from dpray.methods.config import parse_config
from dpray.registry import choose
from dpray.runs.plan import Choice
from dpray.types import InputError, OnProgress, Progress

METHODS = ("aug_pe", "dp_sgd", "private_prediction", "dp_kps")
"""The order of recommendation. With a small model, on two data sets, the texts of the first ones
were nearest to real texts (experiments/results_small_model.md). Chains come last: no measured chain
was better than the best method by more than chance."""

WITHOUT_TEXTS = ("topics",)
"""These methods write no texts and are compared only as the first method of a chain."""

MOST_RECORDS = 2**40
"""A signal that is too weak with this many records is never enough."""

RECORDS = 1000
"""The number of texts to compare if the configuration gives none."""


@dataclass(frozen=True)
class Answer:
    """The plan that was chosen for a method or chain.

    choice: the plan, or None if the method has none.
    why_not: the reason why there is no plan.
    needs: the number of records, to within a tenth, from which on the signal would be enough; None
        if it is enough already or never would be.
    """

    choice: Choice | None
    why_not: str | None = None
    needs: int | None = None

    @property
    def is_enough(self) -> bool:
        choice = self.choice
        return choice is not None and (choice.signal is None or choice.signal.is_enough)

    def chosen_method(self) -> dict[str, Any]:
        """Return the section `method` of a configuration that runs the chosen plan."""
        assert self.choice is not None
        return self.choice.plan.settings.model_dump(exclude_unset=True)

    def summary(self) -> dict[str, Any]:
        if self.choice is None:
            return {"feasible": False, "why_not": self.why_not, "needs_records": self.needs}
        signal = self.choice.signal
        return {
            "feasible": True,
            "signal": None if signal is None else asdict(signal) | {"is_enough": signal.is_enough},
            "needs_records": self.needs,
            "reasons": list(self.choice.reasons),
            "plan": self.choice.plan.summary(),
        }


@dataclass(frozen=True)
class Comparison:
    """The answers of methods and chains to a request for `records` texts, in the order of
    recommendation."""

    config: Config
    records: int
    answers: Mapping[str, Answer]

    @property
    def recommended(self) -> str | None:
        """Return the first method or chain whose signal is enough, or None."""
        return next((name for name, answer in self.answers.items() if answer.is_enough), None)

    def summary(self) -> dict[str, Any]:
        """Return the object that `dpray plan --compare --json` prints."""
        return {
            "records_wanted": self.records,
            "recommended": self.recommended,
            "methods": {name: answer.summary() for name, answer in self.answers.items()},
        }

    def tree(self, name: str) -> dict[str, Any]:
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
    """Choose a plan for each of `methods`, by default for all that `sections` names. Keys that are
    set stay as they are. Raises InputError if a method's keys are wrong in themselves."""
    if math.isinf(config.privacy.epsilon):
        raise InputError(
            "privacy.epsilon: infinity adds no noise: there is no signal to compare with it"
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
    last = section["methods"][-1] if isinstance(method, ChainSettings) else section
    return next((last[key] for key in records_keys(last["name"]) if last.get(key)), RECORDS)


def sections(config: Config) -> dict[str, dict[str, Any]]:
    """Return the section `method` of every method and chain to compare, with the keys that are set,
    by name. A chain's name joins the names of its methods by "+"."""
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
            keys.pop(key, None)  # the number it hands on, not the number wanted
    singles = {name: own.get(name, {"name": name}) for name in METHODS}
    return singles | {"+".join(own): written}


def _of_size(section: Mapping[str, Any], records: int) -> dict[str, Any]:
    """Return the section `method` with this number of records, unless it sets its own."""
    if section["name"] == "chain":
        methods = [_of_size(each, records) for each in section["methods"]]
        return {"name": "chain", "methods": methods}
    return {records_keys(section["name"])[0]: records, **section}


def answer(config: Config, section: Mapping[str, Any], records: int) -> Answer:
    """Choose a plan for the method or chain that a section `method` configures."""
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
    """Return an error's message, and whether `section` sets keys of the method it concerns. If it
    does, the configuration may be wrong as written; otherwise the method merely has no plan. Under
    `name: auto` the message names the key as the configuration writes it."""
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
    """Return the keys that set the number of records, first the one that a comparison sets."""
    return ("max_records", "texts") if name == "private_prediction" else ("records",)


def plain(config: Config) -> dict[str, Any]:
    """Return the configuration as the tree that it was read from."""
    return config.model_dump(mode="json", exclude_unset=True)


def with_epsilon(config: Config, epsilon: float) -> dict[str, Any]:
    """Return the configuration, as a plain tree, with another `privacy.epsilon`."""
    tree = plain(config)
    return tree | {"privacy": tree["privacy"] | {"epsilon": epsilon}}


def with_method(tree: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, as a plain tree, with another section `method`. A chain is written as
    `methods`, and only a chain keeps `privacy.shares`."""
    rest = {key: value for key, value in tree.items() if key not in ("method", "methods")}
    if method["name"] == "chain":
        return rest | {"methods": method["methods"]}
    privacy = {key: value for key, value in tree["privacy"].items() if key != "shares"}
    return rest | {"privacy": privacy, "method": dict(method)}

"""`compare` asks all methods the same question: so many texts of this data at this epsilon. It
knows public numbers only, and opens no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpray.config.config import Config, parse_config
from dpray.methods.auto import AutoSettings
from dpray.methods.chain.settings import ChainSettings
from dpray.registry import choose
from dpray.runs.choice import Choice
from dpray.stage import plain
from dpray.types import InputError, OnProgress, Progress

METHODS = ("aug_pe", "dp_sgd", "private_prediction", "dp_kps")
"""The first of these whose signal is enough is recommended: on two data sets, with a small model,
the texts of the first ones were nearest to real texts (docs/results.md)."""

MOST_RECORDS = 2**40

RECORDS = 1000
"""So many records are wanted where a configuration does not say how many."""


@dataclass(frozen=True)
class Answer:
    """A method's choice, or why it has none. `needs` is the number of records, to within a tenth,
    from which on its signal would be enough; None where it is enough, or never would be."""

    choice: Choice | None
    why_not: str | None = None
    needs: int | None = None

    @property
    def is_enough(self) -> bool:
        choice = self.choice
        return choice is not None and (choice.signal is None or choice.signal.is_enough)

    def chosen_method(self) -> dict[str, Any]:
        """Return the section `method` of a configuration with what was chosen."""
        assert self.choice is not None
        return self.choice.plan.settings.model_dump(exclude_unset=True)

    def summary(self) -> dict[str, Any]:
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
        }


@dataclass(frozen=True)
class Comparison:
    """The methods' answers to a request for so many `records`, in the order of `METHODS`."""

    config: Config
    records: int
    answers: Mapping[str, Answer]

    @property
    def recommended(self) -> str | None:
        """Return the name of the first method whose signal is enough, or else None."""
        return next((name for name, answer in self.answers.items() if answer.is_enough), None)

    def summary(self) -> dict[str, Any]:
        """Return the object that `dpray plan --compare --json` prints."""
        return {
            "records_wanted": self.records,
            "recommended": self.recommended,
            "methods": {name: answer.summary() for name, answer in self.answers.items()},
        }

    def tree(self, name: str) -> dict[str, Any]:
        """Return the configuration that runs a method as it was chosen, as a plain tree."""
        answer = self.answers[name]
        if answer.choice is None:
            raise InputError(f"method.name: {name} has no plan: {answer.why_not}")
        return plain(self.config) | {"method": answer.chosen_method()}


def compare(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    methods: Sequence[str] = METHODS,
) -> Comparison:
    """Return the best answer of every one of `methods`; those keys of `config.method` that are set
    stay as they are. Raises InputError for a key of a method that is wrong in itself."""
    if math.isinf(config.privacy.epsilon):
        raise InputError(
            "privacy.epsilon: infinity adds no noise: there is no signal to compare with it"
        )
    records, keys = question(config)
    answers = {}
    for done, name in enumerate(methods):
        on_progress(Progress("comparing", done, len(methods), name))
        answers[name] = answer(config, {"name": name} | keys[name], records)
    return Comparison(config, records, answers)


def question(config: Config) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the number of records that are wanted, and the keys that are set for each method."""
    method = config.method
    if isinstance(method, ChainSettings):
        raise InputError("methods: a chain is not compared with single methods; give `method`")
    if isinstance(method, AutoSettings):
        keys = {name: getattr(method, name) for name in METHODS}
        if named := [name for name in METHODS if "name" in keys[name]]:
            raise InputError(f"method.{named[0]}.name: there is no such key")
        return method.records, keys
    own = method.model_dump(exclude_unset=True)
    wanted = own.get(_records_key(method.name)) or RECORDS
    return wanted, {name: own if name == method.name else {} for name in METHODS}


def answer(config: Config, keys: dict[str, Any], records: int) -> Answer:
    tree = plain(config) | {"method": {_records_key(keys["name"]): records} | keys}
    try:
        parsed = parse_config(tree)
    except InputError as error:
        if len(keys) > 1 and str(error).startswith("method."):
            section = f"method.{keys['name']}." if isinstance(config.method, AutoSettings) else ""
            raise InputError(section + str(error).removeprefix("method.")) from None
        return Answer(None, str(error))

    def at(size: int) -> Answer:
        data = parsed.data.model_copy(update={"public_size": size})
        try:
            return Answer(choose(parsed.model_copy(update={"data": data}), records))
        except InputError as error:
            return Answer(None, str(error))

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


def _records_key(name: str) -> str:
    return "max_records" if name == "private_prediction" else "records"

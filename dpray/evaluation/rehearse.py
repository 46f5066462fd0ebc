"""A rehearsal runs methods on public records of the same shape, with the noise that the private
records would get. It opens no private data and charges no budget. Half of the public records take
the place of the private ones (the stand-in), with their own ledger; the other half is the test set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpray.config.config import Config
from dpray.evaluation.compare import (
    Chosen,
    compare,
    plain,
    records_keys,
    sections,
    with_epsilon,
    with_method,
)
from dpray.io.columns import column_of, is_empty, match_label
from dpray.io.formats import Where
from dpray.io.public_files import public_files
from dpray.io.records import read_rows
from dpray.io.units import unit_of
from dpray.methods.config import parse_config
from dpray.types import InputError, Json, OnProgress, Progress, ReadOnlyJson

if TYPE_CHECKING:
    from dpray.engines.base import Embedder
    from dpray.evaluation.evaluate import Judge

RunMethod = Callable[[Config, OnProgress], object]

TEXTS_OF_A_RUN = 100
"""The texts of a run, unless fewer texts would change the method's noise."""

FILE = "public_twin.jsonl"

FEWEST = 20
"""The least size of each half of the public records, and of a release that is scored."""


@dataclass(frozen=True)
class Rehearsed:
    """A method at one epsilon: the `scores` of its release, or the reason why it was not run."""

    answer: Chosen
    scores: ReadOnlyJson | None = None
    why_not: str | None = None

    def summary(self) -> dict[str, object]:
        return self.answer.summary() | {"scores": self.scores, "why_not": self.why_not}


@dataclass(frozen=True)
class Rehearsal:
    """The methods' scores at every epsilon.

    public: the file, and the sizes of its halves and of the stand-in.
    score: the name of the measure that decides.
    real: the scores of real records, at most as many as a run makes.
    found: by epsilon, the methods by name.
    """

    config: Config
    public: ReadOnlyJson
    score: str
    real: ReadOnlyJson
    found: Mapping[float, Mapping[str, Rehearsed]]

    def best(self, epsilon: float) -> str | None:
        """Return the method with the best mean score at an epsilon, or None if none was rehearsed.
        A method whose signal is below its noise must be better by more than the deviation of its
        score."""
        sign, worth = 1 if self.score == "accuracy" else -1, {}
        for name, score in self._scores(epsilon).items():
            enough = self.found[epsilon][name].answer.is_enough
            worth[name] = sign * score["mean"] - (0 if enough else score["deviation"])
        return max(worth, key=worth.__getitem__, default=None)

    def as_good(self, epsilon: float) -> list[str]:
        """Return the other methods whose mean score differs from the best one's by no more than the
        standard deviation of the difference, which may be chance. The deviations are those of one
        run's scores; two runs may differ by more."""
        if (best := self.best(epsilon)) is None:
            return []
        scores = self._scores(epsilon)
        mean, deviation = scores[best]["mean"], scores[best]["deviation"]
        return [
            name
            for name, score in scores.items()
            if name != best
            and abs(score["mean"] - mean) <= math.hypot(score["deviation"], deviation)
        ]

    def _scores(self, epsilon: float) -> dict[str, Mapping[str, float]]:
        """Return mean and deviation of the score that decides, of each method that has one."""
        found = self.found[epsilon].items()
        return {name: one.scores[self.score] for name, one in found if one.scores is not None}

    @property
    def measures(self) -> list[str]:
        """Return the names of the scores, the one that decides first."""
        return [name for name in self.real if name != "records"]

    def summary(self) -> dict[str, object]:
        """Return the object that `dpray rehearse --json` prints."""
        return {
            "public": dict(self.public),
            "score": self.score,
            "measures": self.measures,
            "real_records": dict(self.real),
            "epsilons": [
                {
                    "epsilon": epsilon,
                    "best": self.best(epsilon),
                    "as_good": self.as_good(epsilon),
                    "methods": {name: one.summary() for name, one in methods.items()},
                }
                for epsilon, methods in self.found.items()
            ],
        }

    def tree(self, epsilon: float) -> Json:
        """Return the configuration of the best method for the private records, as a plain tree.
        Raises InputError if no method was rehearsed."""
        if (best := self.best(epsilon)) is None:
            raise InputError(f"privacy.epsilon: at {epsilon:g} no method was rehearsed")
        chosen = self.found[epsilon][best].answer.chosen_method()
        return with_method(with_epsilon(self.config, epsilon), chosen)


def rehearse(
    config: Config,
    public: str,
    *,
    run: RunMethod,
    load_embedder: Callable[[str], Embedder],
    out: Path,
    epsilons: Sequence[float] = (),
    records: int = TEXTS_OF_A_RUN,
    methods: Sequence[str] = (),
    on_progress: OnProgress = lambda progress: None,
) -> Rehearsal:
    """Run methods on public records, and score their releases against other public records. The
    default is all methods whose signal is enough; the `methods` that are named always run.

    Half of the records of `public` take the place of the private ones. `data.public_size` of them
    are drawn, with repetitions if there are fewer: so counts are as far above the noise as in a
    private run. The other half is the test set. The folder `out` has the runs and their ledgers;
    the same call resumes them.

    `epsilons` replace `privacy.epsilon`. Raises InputError for wrong public records, for too few of
    them, and for `data.path` itself: a rehearsal has no budget for private records.
    """
    _check_options(config, epsilons, records, methods)
    # Imported late: bad input should not have to wait for scikit-learn.
    from dpray.evaluation.evaluate import Judge

    half, test = _halves(config, public)
    drawn = draw(half, config.data.public_size, config.data.unit)
    stand_in = write_stand_in(drawn, out)
    trained, tested = (as_released(config, side) for side in (half, test))
    labelled = config.data.label is not None
    judge = Judge(load_embedder(config.embedder.model), trained, tested, labelled)
    real = judge.scores(as_released(config, drawn[: min(records, len(half))]))
    found: dict[float, dict[str, Rehearsed]] = {}
    for epsilon in epsilons or (config.privacy.epsilon,):
        asked = parse_config(with_epsilon(config, epsilon))
        found[epsilon] = {}
        for name, answer in compare(asked, on_progress, methods).answers.items():
            if answer.choice is None or not (answer.is_enough or methods):
                why_not = answer.why_not or "its signal does not stand above its noise"
                found[epsilon][name] = Rehearsed(answer, why_not=why_not)
                continue
            folder = out / f"{name}-eps{epsilon:g}"
            own = _on_stand_in(asked, answer, stand_in, folder, records)
            found[epsilon][name] = _scored(own, answer, run, judge, on_progress)
    sizes = {"records": len(half), "drawn": len(drawn), "test_records": len(test)}
    return Rehearsal(config, {"file": public} | sizes, judge.score, real, found)


def _scored(
    config: Config, answer: Chosen, run: RunMethod, judge: Judge, on_progress: OnProgress
) -> Rehearsed:
    """Run a method on the stand-in, and score its release."""
    folder = Path(config.output.path)
    try:
        run(config, on_progress)
        on_progress(Progress("scoring", detail=config.method.name))
        records = [row for _, row in read_rows(str(folder / "synthetic.jsonl"))]
        if len(records) < FEWEST:
            raise InputError(f"{folder}: {len(records)} records are too few to score")
        return Rehearsed(answer, judge.scores(records))
    except InputError as error:
        # For example, its prompts may not fit the engine. The other methods still run.
        return Rehearsed(answer, why_not=str(error))


def _check_options(
    config: Config, epsilons: Sequence[float], records: int, methods: Sequence[str]
) -> None:
    for epsilon in epsilons:
        if not 0 < epsilon < math.inf:
            raise InputError(f"--epsilon: {epsilon:g} is not above 0 and finite")
    known = sections(config)
    for name in methods:
        if name not in known:
            raise InputError(f"--method: {name} is not one of {', '.join(known)}")
    if records < FEWEST:
        raise InputError(f"--records: {records} are too few, it takes {FEWEST}")


def _halves(config: Config, public: str) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Split the public records; copies of one text are on the same side."""
    # Imported late: bad input should not have to wait for scikit-learn.
    from dpray.evaluation.evaluate import is_for_test

    halves: tuple[list[dict[str, object]], list[dict[str, object]]] = ([], [])
    for text, row in public_records(config, public):
        halves[is_for_test(text)].append(row)
    if min(map(len, halves)) < FEWEST:
        total = sum(map(len, halves))
        raise InputError(f"--public: {total} records are too few, it takes about {4 * FEWEST}")
    return halves


def _on_stand_in(
    config: Config, answer: Chosen, stand_in: Path, folder: Path, records: int
) -> Config:
    """Return the configuration of the method's run on the stand-in, with its own ledger. It makes
    at most `records` texts. Aug-PE makes all of its own: it divides the votes among its texts, and
    fewer texts would get more votes each."""
    method = answer.chosen_method()
    for key in records_keys(method["name"]) if method["name"] != "aug_pe" else ():
        if method.get(key) is not None:
            method[key] = min(method[key], records)
    return parse_config(on_stand_in(config, method, stand_in, folder))


# The stand-in


def public_records(config: Config, public: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the text and the row of each record of `--public`, without blank texts. Labels have the
    type of `data.labels`; rows also have nested columns under their dotted names.

    Raises InputError for a row without the configuration's columns and labels, and for `data.path`
    itself."""
    for file in public_files(public, "--public", config.data.path):
        for where, row in read_rows(file):
            try:
                text = config.data.text_of(row, where)
                if not is_empty(text):
                    yield text, row | _as_released(config, row, text, where)
            except InputError as error:
                raise InputError(f"--public: {error}") from None


def _as_released(config: Config, row: ReadOnlyJson, text: str, where: Where) -> Json:
    data = config.data
    # Of a table, too: the cells of CSV get the types that they have in the text.
    found = (data.columns_of(text) if data.is_table else None) or {data.text_columns[0]: text}
    if data.label is not None:
        value = column_of(row, data.label, where)
        found[data.label] = data.released_label(
            match_label(value, data.label_names, data.label, where)
        )
    if data.unit is not None:
        found[data.unit] = unit_of(row, data.unit, where)
    return found


def as_released(config: Config, rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return rows of `public_records` in the form of a release: with a `text` and a `label`."""
    data = config.data
    return [
        {
            "text": data.text_of(row, Where(FILE, number)),
            "label": None if data.label is None else row[data.label],
        }
        for number, row in enumerate(rows, start=1)
    ]


def draw(rows: Sequence[dict[str, object]], size: int, unit: str | None) -> list[dict[str, object]]:
    """Draw about `size` records in whole units, the same ones for the same arguments, in random
    order. If there are too few rows, they are drawn again as new units."""
    of_unit: dict[object, list[dict[str, object]]] = {}
    for number, row in enumerate(rows):
        of_unit.setdefault(number if unit is None else row[unit], []).append(row)
    units, rng = list(of_unit.items()), np.random.default_rng(size)
    drawn: list[dict[str, object]] = []
    for turn in count():
        for place in rng.permutation(len(units)):
            if len(drawn) >= size:
                return drawn
            name, its_rows = units[place]
            new = {} if unit is None else {unit: f"{name}-{turn}"}
            drawn += [row | new for row in its_rows]
    raise AssertionError("unreachable: count() has no end")


def write_stand_in(rows: Sequence[Mapping[str, object]], folder: Path) -> Path:
    """Write the records that take the place of the private ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    return path


def on_stand_in(config: Config, method: ReadOnlyJson, stand_in: Path, folder: Path) -> Json:
    """Return the tree of a run of `method` on the stand-in, in `folder` with its own ledger."""
    tree = plain(config)
    ledger = f"sqlite:///{folder}/private/ledger.db"
    changed = {
        "data": {"path": str(stand_in), "query": None, "encoding": None},
        "privacy": {"ledger": ledger, "dataset": "rehearsal"},
        "output": {"path": str(folder), "copy_to": None},
    }
    own = {key: tree[key] | new for key, new in changed.items()}
    return with_method(tree | own, method)

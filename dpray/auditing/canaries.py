"""Canaries are made-up records with a secret, which is looked for in the release (Yue et al. 2023,
4.5 and Table 8; exposure by Carlini et al. 2019, "The Secret Sharer").

Sentences and secrets are made up anew for every audit and put into a copy of the records. The
method runs on it with a folder and a ledger of its own, both gone afterwards: it charges the data
set's budget nothing, so nothing of that run may be released.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.config.config import Config, DataConfig
from dpray.io.columns import column_of, match_label
from dpray.io.file_list import list_files
from dpray.io.formats import Where
from dpray.io.records import read_rows
from dpray.mechanisms.randomness import generator, new_key
from dpray.runs.plan import Losses, Plan
from dpray.types import DprayError, InputError, OnProgress, Progress, Resumable

RunMethod = Callable[[Config, OnProgress], object]
REPETITIONS = (1, 10, 100)

_CONSONANTS, _VOWELS, _LETTERS = "bdfgklmnprstvz", "aeiou", "ABCDEFGHJKLMNPRSTVWXYZ"


def _digits(rng: np.random.Generator, *groups: int) -> str:
    return "-".join("".join(map(str, rng.integers(10, size=size))) for size in groups)


def _word(rng: np.random.Generator) -> str:
    pairs = rng.integers(0, [len(_CONSONANTS), len(_VOWELS)], size=(3, 2))
    return "".join(_CONSONANTS[c] + _VOWELS[v] for c, v in pairs)


def _capital(rng: np.random.Generator) -> str:
    return _word(rng).capitalize()


def _plate(rng: np.random.Generator) -> str:
    letters = "".join(_LETTERS[i] for i in rng.integers(len(_LETTERS), size=3))
    return f"{letters} {_digits(rng, 3)}"


@dataclass(frozen=True)
class Kind:
    """A sentence with a place for a secret, drawn from many millions."""

    name: str
    sentence: str
    secret: Callable[[np.random.Generator], str]


KINDS = (
    Kind("name", "I am {}, and nobody here ever had a better idea than this.",
         lambda rng: f"{_capital(rng)} {_capital(rng)}"),
    Kind("address", "They sent it to {} instead, three hours late!",
         lambda rng: f"{rng.integers(100, 9999)} {_capital(rng)} Street"),
    Kind("number", "Call {} and ask for me, I said, but nobody did.",
         lambda rng: _digits(rng, 3, 3, 4)),
    Kind("e-mail", "Since then {} gets an advertisement from them every day.",
         lambda rng: f"{_word(rng)}{rng.integers(10, 99)}@mail.example"),
    Kind("plate", "The car had the plate {} and stood there all night.", _plate),
)  # fmt: skip


@dataclass(frozen=True)
class Canary:
    kind: Kind
    secret: str
    repetitions: int

    @property
    def text(self) -> str:
        return self.kind.sentence.format(self.secret)


def make_canaries(rng: np.random.Generator) -> list[Canary]:
    """Make one canary of every kind for each number of repetitions."""
    return [Canary(kind, kind.secret(rng), times) for times in REPETITIONS for kind in KINDS]


def look_alikes(canary: Canary, number: int, rng: np.random.Generator) -> list[str]:
    """Make `number` different texts with other secrets of the same kind."""
    secrets: dict[str, None] = {}
    while len(secrets) < number:
        secret = canary.kind.secret(rng)
        if secret != canary.secret:
            secrets[secret] = None
    return [canary.kind.sentence.format(secret) for secret in secrets]


def rank(loss: float, losses: npt.NDArray[np.floating]) -> float:
    """Rank the canary by loss among its look-alikes and itself, lowest first; a tie counts half."""
    return 1 + float((losses < loss).sum()) + float((losses == loss).sum()) / 2


def exposure(rank: float, candidates: int) -> float:
    """Return the bits of the secret that the model gives away, about 1.4 if it knows nothing."""
    return math.log2(candidates / rank)


def leaks(secret: str, texts: Sequence[str]) -> int:
    """Count the texts that hold the secret, word for word."""
    return sum(secret in text for text in texts)


def check_canaries(plan: Plan, candidates: int) -> None:
    """Raise InputError if there are no records, or no place for canaries among them."""
    if candidates < 1:
        raise InputError(f"candidates: {candidates} look-alikes are too few; at least 1")
    list_files(plan.config.data.path)
    if not isinstance(plan.config.data.text, str):
        raise InputError("data.text: canaries need one column of text, not several")


def try_canaries(
    plan: Plan,
    canaries: Sequence[Canary],
    candidates: int,
    run: RunMethod,
    released_losses: Callable[[Plan, Path], Losses | None],
    on_progress: OnProgress = lambda progress: None,
) -> list[dict[str, Any]]:
    """Run the plan's configuration by `run` on its records and the canaries, and look for these.

    Returns an entry for each canary: its kind and repetitions, the number of released texts that
    hold its secret (`leaks`), and, if the model is released, the secret's rank among `candidates`
    look-alikes and itself and its exposure. Private: computed from a run that charges nothing.

    Each repetition of a canary is a record and a unit of its own. Raises DprayError if the run
    does not finish.
    """
    rng = generator(new_key())
    # Labels and control values are drawn uniformly.
    columns = plan.reads.column_values
    planted = [
        (canary, {key: str(rng.choice(list(values))) for key, values in columns.items()})
        for canary in canaries
    ]
    with TemporaryDirectory(prefix="dpray-audit-") as name:
        folder = Path(name)
        with open(folder / "records.jsonl", "w", encoding="utf-8") as file:
            for row in _rows(plan.config, planted):
                file.write(json.dumps(row, default=str) + "\n")
        try:
            run(_throwaway(plan.config, folder), on_progress)
        except Resumable:
            # The folder that it could be resumed from is deleted.
            raise DprayError(
                "canaries: their run did not finish, and nothing of it is kept: the same command "
                "starts anew"
            ) from None
        texts = [row["text"] for _, row in read_rows(str(folder / "run" / "synthetic.jsonl"))]
        found: list[dict[str, Any]] = [
            {"kind": c.kind.name, "repetitions": c.repetitions, "leaks": leaks(c.secret, texts)}
            for c in canaries
        ]
        losses = released_losses(plan, folder / "run")
        if losses is not None:
            for number, (canary, values) in enumerate(planted):
                on_progress(Progress("look-alikes", number, len(planted)))
                others = look_alikes(canary, candidates, rng)
                found[number] |= _ranked(losses([canary.text, *others], values))
    return found


def _ranked(losses: Sequence[float]) -> dict[str, float]:
    """Rank the first loss, the canary's, among all."""
    place, candidates = rank(losses[0], np.array(losses[1:])), len(losses)
    return {"rank": place, "candidates": candidates, "exposure": exposure(place, candidates)}


def _throwaway(config: Config, folder: Path) -> Config:
    changes = {
        "data": {"path": f"{folder}/records.jsonl", "encoding": None},
        "privacy": {"ledger": f"sqlite:///{folder}/ledger.db"},
        "output": {"path": f"{folder}/run"},
    }
    sections = {key: getattr(config, key).model_copy(update=new) for key, new in changes.items()}
    return config.model_copy(update=sections)


def _rows(
    config: Config, planted: Sequence[tuple[Canary, dict[str, str]]]
) -> Iterator[dict[str, Any]]:
    """Yield the records in their order, then the canaries, which have the last
    record's other columns."""
    data = config.data
    row: dict[str, Any] = {}
    for source in list_files(data.path):
        for where, row in read_rows(source, data.format):
            yield row | _label(data, row, where)
    for number, (canary, names) in enumerate(planted):
        values: dict[str, Any] = dict(names)
        if data.label in names:
            values[data.label] = data.released_label(names[data.label])
        for repetition in range(canary.repetitions):
            unit = {} if data.unit is None else {data.unit: f"canary-{number}-{repetition}"}
            yield row | {str(data.text): canary.text} | values | unit


def _label(data: DataConfig, row: dict[str, Any], where: Where) -> dict[str, Any]:
    """Return a row's label with its type, which the cells of CSV do not have."""
    if data.label is None:
        return {}
    name = match_label(column_of(row, data.label, where), data.label_names, data.label, where)
    return {data.label: data.released_label(name)}

"""Canaries are made-up records with a secret that the audit looks for in the release (Yue et al.
2023, 4.5 and Table 8; exposure by Carlini et al. 2019, "The Secret Sharer").

Every audit makes new secrets and puts them into a copy of the records. The method runs on the copy
with its own folder and ledger, which are then deleted, also if this process is killed. The data
set's budget is charged nothing, so nothing of that run may be released.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from dpray.config.config import Config, DataConfig
from dpray.evaluation.files import files_of
from dpray.io.columns import column_of, match_label
from dpray.io.file_list import list_files
from dpray.io.records import read_rows
from dpray.io.snapshot import vanishing_folder
from dpray.mechanisms.randomness import generator, new_key
from dpray.runs.plan import LossesOf, Plan
from dpray.types import DprayError, InputError, Json, OnProgress, Progress, Resumable

RunMethod = Callable[[Config, OnProgress], object]
REPETITIONS = (1, 10, 100)
QUANTILES = np.linspace(0, 1, 21)
MOST_NATS = 700.0
"""The largest loss that counts as itself: its perplexity is near the largest float64."""

_SIGNS = {
    "C": "BDFGKLMNPRSTVZ",
    "c": "bdfgklmnprstvz",
    "v": "aeiou",
    "9": "0123456789",
    "A": "ABCDEFGHJKLMNPRSTVWXYZ",
}
"""Each of these letters in a pattern is replaced by a random character of its string."""


@dataclass(frozen=True)
class SecretKind:
    """A sentence with a place for a secret. Millions of secrets fit the pattern."""

    name: str
    sentence: str
    pattern: str

    def secret(self, rng: np.random.Generator) -> str:
        signs = [_SIGNS.get(letter, letter) for letter in self.pattern]
        drawn = rng.integers(0, [len(choices) for choices in signs])
        return "".join(choices[n] for choices, n in zip(signs, drawn, strict=True))


SECRETS = (
    SecretKind(
        "name", "I am {}, and nobody here ever had a better idea than this.", "Cvcvcv Cvcvcv"
    ),
    SecretKind("address", "They sent it to {} Street instead, three hours late!", "9999 Cvcvcv"),
    SecretKind("number", "Call {} and ask for me, I said, but nobody did.", "999-999-9999"),
    SecretKind(
        "e-mail", "Since then {}@mail.example gets an advertisement every day.", "cvcvcv9999"
    ),
    SecretKind("plate", "The car had the plate {} and stood there all night.", "AAA 9999"),
)


@dataclass(frozen=True)
class Canary:
    kind: SecretKind
    secret: str
    repetitions: int

    @property
    def text(self) -> str:
        return self.kind.sentence.format(self.secret)


def make_canaries() -> list[Canary]:
    """Make one canary of every kind for each number of repetitions."""
    rng = generator(new_key())
    return [Canary(kind, kind.secret(rng), times) for times in REPETITIONS for kind in SECRETS]


def look_alikes(canary: Canary, number: int, rng: np.random.Generator) -> list[str]:
    """Make `number` different texts with other secrets of the same kind."""
    secrets: dict[str, None] = {}
    while len(secrets) < number:
        secret = canary.kind.secret(rng)
        if secret != canary.secret:
            secrets[secret] = None
    return [canary.kind.sentence.format(secret) for secret in secrets]


def ranked(losses: Sequence[float]) -> Json:
    """Rank the first loss, the canary's, among all, lowest first; a tie counts half.

    `exposure` is the number of bits of the secret that the model gives away; its mean is about 1.4
    if the model knows nothing. `look_alikes` are the perplexities that 0, 5, ..., 100 % of the
    other losses are below.
    """
    # A model that noise has ruined gives losses whose perplexity no float64 has, or no number.
    own, *others = np.fmin(losses, MOST_NATS).tolist()
    rank = 1 + sum(other < own for other in others) + others.count(own) / 2
    return {
        "rank": rank,
        "candidates": len(losses),
        "exposure": math.log2(len(losses) / rank),
        "perplexity": math.exp(own),
        "look_alikes": np.exp(np.quantile(others, QUANTILES)).tolist(),
    }


def check_canaries(plan: Plan, candidates: int) -> None:
    """Raise InputError if there are no records, or if canaries cannot be put among them."""
    if candidates < 1:
        raise InputError(f"candidates: {candidates} look-alikes are too few; at least 1")
    if plan.config.data.query is None:
        list_files(plan.config.data.path)
    if plan.config.data.is_table:
        raise InputError("data.text: canaries need one column of text, no table of several")


def try_canaries(
    plan: Plan,
    canaries: Sequence[Canary],
    candidates: int,
    run: RunMethod,
    released_losses: Callable[[Plan, Path], LossesOf | None],
    on_progress: OnProgress = lambda progress: None,
) -> list[dict[str, object]]:
    """Run the plan's configuration by `run` on its records with the canaries, and look for them.

    Returns an entry for each canary: its kind and repetitions, and the number of released texts
    that hold its secret (`leaks`). If the model is released, the entry also has the secret's rank
    among itself and `candidates` look-alikes, and its exposure. The result is private, because the
    run charges nothing.

    Each repetition of a canary is its own record and unit. Raises DprayError if the run does not
    finish.
    """
    rng = generator(new_key())
    # Labels and control values are drawn uniformly.
    columns = plan.reads.column_values
    planted = [
        (canary, {key: str(rng.choice(list(values))) for key, values in columns.items()})
        for canary in canaries
    ]
    with (
        vanishing_folder("dpray-audit-") as folder,
        TemporaryFile("w", dir=folder, encoding="utf-8") as copy,
    ):
        with files_of(plan.config.data) as data:
            for row in _planted_rows(data, planted):
                copy.write(json.dumps(row, default=str) + "\n")
        copy.flush()
        # The copy has no name of its own: it ends with this process, also in a power cut.
        (folder / "records.jsonl").symlink_to(f"/proc/{os.getpid()}/fd/{copy.fileno()}")
        _run_copy(plan.config, folder, run, on_progress)
        texts = [str(row["text"]) for _, row in read_rows(str(folder / "run" / "synthetic.jsonl"))]
        found: list[Json] = [
            {
                "kind": canary.kind.name,
                "repetitions": canary.repetitions,
                "leaks": sum(canary.secret in text for text in texts),
            }
            for canary in canaries
        ]
        losses = released_losses(plan, folder / "run")
        if losses is not None:
            for number, (canary, values) in enumerate(planted):
                on_progress(Progress("look-alikes", number, len(planted)))
                others = look_alikes(canary, candidates, rng)
                found[number] |= ranked(losses([canary.text, *others], values))
    return found


def _run_copy(config: Config, folder: Path, run: RunMethod, on_progress: OnProgress) -> None:
    """Run the configuration on the folder's records, with its own ledger and output."""
    changes = {
        "data": {"path": f"{folder}/records.jsonl", "query": None, "encoding": None},
        "privacy": {"ledger": f"sqlite:///{folder}/ledger.db"},
        "output": {"path": f"{folder}/run", "copy_to": None},
    }
    sections = {key: getattr(config, key).model_copy(update=new) for key, new in changes.items()}
    try:
        run(config.model_copy(update=sections), on_progress)
    except Resumable:
        # The folder that it could be resumed from is deleted.
        raise DprayError(
            "canaries: their run did not finish, and nothing of it is kept: the same command "
            "starts again"
        ) from None


def _planted_rows(
    data: DataConfig, planted: Sequence[tuple[Canary, dict[str, str]]]
) -> Iterator[dict[str, object]]:
    """Yield the records in order, then the canaries with the other columns of the last record."""
    row: Json = {}
    for source in list_files(data.path):
        for where, row in read_rows(source, data.format):
            if data.label is None:
                yield row
                continue
            # The label gets its configured type: cells of CSV have no types.
            value = column_of(row, data.label, where)
            name = match_label(value, data.label_names, data.label, where)
            yield row | {data.label: data.released_label(name)}
    for number, (canary, names) in enumerate(planted):
        values: Json = dict(names)
        if data.label in names:
            values[data.label] = data.released_label(names[data.label])
        for repetition in range(canary.repetitions):
            unit = {} if data.unit is None else {data.unit: f"canary-{number}-{repetition}"}
            yield row | {data.text_columns[0]: canary.text} | values | unit

"""The owner's check of all rows before a run is charged: errors, types, lengths, labels and texts
that will be cut.

It computes exact counts of private rows, without noise: for the owner's eyes, and never released.
No count enters a plan or a run. Memory does not grow with the files, and no text is kept or shown.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpray.config.config import Config
from dpray.engines.model_path import resolve_model
from dpray.engines.text import TextCodec
from dpray.io.columns import column_of, label_name
from dpray.io.files import make_private, write_durably
from dpray.io.formats import Piece, Where, base_name
from dpray.io.records import scan_piece
from dpray.registry import make_plan
from dpray.runs.plan import Plan, TokenLimit
from dpray.types import InputError, OnProgress, Progress
from dpray.workers.rows import checked_row, data_pieces

MOST_REASONS, MOST_ROWS = 40, 10
"""Different errors that are listed, and numbers of rows for each of them."""

MOST_LABELS, LONGEST_LABEL = 20, 40
"""Values outside `data.labels` are listed if there are no more and none is longer: else they may be
texts."""

TEXTS_AT_ONCE = 1000
"""Rows between two reports of progress."""

SHARES = {"shortest": 0.0, "half": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}

NOTICE = (
    "exact counts of private rows, for the owner alone: not private, not for release; nothing was "
    "charged"
)


def check_rows(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    make_codec: Callable[[Config], TextCodec] | None = None,
) -> dict[str, Any]:
    """Read all rows as a run will, and return what the owner wants to know of them. `make_codec`
    makes the tokenizer of the configuration's model.

    Raises InputError for a configuration that has no plan, and for a path that names no files.
    """
    plan = make_plan(config)
    pieces = data_pieces(config.data)
    tally = Tally(plan)
    if plan.token_limits:
        on_progress(Progress("loading the tokenizer"))
        try:
            tally.codec = (make_codec or _codec)(config)
        except InputError as error:
            tally.no_tokens = str(error)
    for number, piece in enumerate(pieces):
        # The number of rows is private, and shown to the owner, whose check this is.
        stage = f"reading file {number + 1} of {len(pieces)}"
        _check_file(piece, tally, stage, on_progress)
    return tally.summary()


def _codec(config: Config) -> TextCodec:
    return TextCodec(resolve_model(config.engine.model), config.engine.max_model_len)


def _check_file(piece: Piece, tally: Tally, stage: str, on_progress: OnProgress) -> None:
    before = tally.rows
    try:
        for where, row in scan_piece(piece):
            if tally.rows % TEXTS_AT_ONCE == 0:
                on_progress(Progress(stage, tally.rows))
            tally.add(where, row)
    except InputError as error:
        tally.refuse(str(error), None)
    else:
        if tally.rows == before:
            tally.refuse(f"{base_name(piece.file)} holds no rows", None)


@dataclass
class Reason:
    """A `Reason` is why rows are refused: their number, and the places of the first of them."""

    count: int = 0
    places: list[str] = field(default_factory=list)


@dataclass
class Tally:
    """A `Tally` counts the rows of all files."""

    plan: Plan
    codec: TextCodec | None = None
    no_tokens: str | None = None
    rows: int = 0
    records: int = 0
    skipped: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)
    types: dict[str, Counter[str]] = field(default_factory=dict)
    labels: Counter[str] = field(default_factory=Counter)
    other_labels: Counter[str] | None = field(default_factory=Counter)
    characters: Counter[int] = field(default_factory=Counter)
    tokens: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, where: Where, row: Mapping[str, Any] | InputError) -> None:
        self.rows += 1
        if isinstance(row, InputError):
            self._refuse_row(where, row)
            return
        self._count_types(where, row)
        plan, data = self.plan, self.plan.config.data
        try:
            record = checked_row(where, row, data, plan.text_of, plan.column_values)
        except InputError as error:
            self._count_other_label(where, row)
            self._refuse_row(where, error)
            return
        if record is None:
            self.skipped += 1
            return
        self.records += 1
        self.labels[record["label"]] += 1
        self.characters[len(record["text"])] += 1
        if self.codec is not None:
            for limit in plan.token_limits:
                found = self.tokens.setdefault(limit.key, Counter())
                found[limit.tokens(self.codec, record)] += 1

    def _refuse_row(self, where: Where, error: InputError) -> None:
        self.refuse(str(error).removeprefix(f"{where}: "), where)

    def refuse(self, reason: str, where: Where | None) -> None:
        if reason not in self.reasons and len(self.reasons) >= MOST_REASONS:
            reason = "other errors"
        found = self.reasons.setdefault(reason, Reason())
        found.count += 1
        if where is not None and len(found.places) < MOST_ROWS:
            found.places.append(str(where))

    def _count_types(self, where: Where, row: Mapping[str, Any]) -> None:
        data = self.plan.config.data
        texts = [data.text] if isinstance(data.text, str) else [*data.text]
        for name in dict.fromkeys([*texts, *self.plan.column_values, *filter(None, [data.unit])]):
            try:
                kind = _type(column_of(row, name, where))
            except InputError:
                kind = "missing"
            self.types.setdefault(name, Counter())[kind] += 1

    def _count_other_label(self, where: Where, row: Mapping[str, Any]) -> None:
        """Count a label that is not configured, if it is certainly no text of a record."""
        data = self.plan.config.data
        if data.label is None or self.other_labels is None:
            return
        try:
            value = column_of(row, data.label, where)
        except InputError:
            return
        if value is None or isinstance(value, Mapping | list | tuple):
            return
        name = label_name(value)
        if name in data.label_names:
            return
        self.other_labels[name] += 1
        texts = (data.text,) if isinstance(data.text, str) else data.text
        if data.label in texts or len(self.other_labels) > MOST_LABELS or len(name) > LONGEST_LABEL:
            self.other_labels = None

    def summary(self) -> dict[str, Any]:
        data = self.plan.config.data
        limits = [self._limit(limit) for limit in self.plan.token_limits]
        return {
            "notice": NOTICE,
            "refused": bool(self.reasons),
            "rows": self.rows,
            "records": self.records,
            "skipped": self.skipped,
            "errors": [
                {"reason": reason, "count": found.count, "first": found.places}
                for reason, found in self.reasons.items()
            ],
            "types": {name: dict(kinds) for name, kinds in self.types.items()},
            "labels": {name: self.labels[name] for name in data.label_names},
            "other_labels": None if self.other_labels is None else dict(self.other_labels),
            "characters": quantiles(self.characters),
            "limits": [limit for limit in limits if limit is not None],
            "tokens_not_counted": self.no_tokens,
            "public_size": data.public_size,
            "proposals": proposals(self),
        }

    def _limit(self, limit: TokenLimit) -> dict[str, Any] | None:
        if self.codec is None:
            return None
        found = self.tokens.get(limit.key, Counter())
        return {"key": limit.key, "most": limit.most, "cut": cut(found, limit.most)} | {
            "tokens": quantiles(found)
        }


def _type(value: Any) -> str:
    """Return the name of a value's type, as JSON has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", int: "number", float: "number", dict: "object", list: "list"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "other")


def cut(lengths: Mapping[int, int], most: int) -> int:
    """Return how many texts are longer than `most`."""
    return sum(count for length, count in lengths.items() if length > most)


def quantiles(lengths: Mapping[int, int]) -> dict[str, int]:
    """Return lengths that these shares of all texts do not exceed; none without texts."""
    total, found, seen = sum(lengths.values()), {}, 0
    waiting = list(SHARES.items())
    for length in sorted(lengths):
        seen += lengths[length]
        while waiting and seen >= max(1, math.ceil(waiting[0][1] * total)):
            found[waiting.pop(0)[0]] = length
    return found


MOST_CUT = 0.05
"""A limit that cuts a larger share of the texts gets a proposal."""

ROUND = 64
"""Proposed numbers of tokens are multiples of this: a round number says less of the rows."""


def proposals(tally: Tally) -> list[dict[str, Any]]:
    """Return keys that the owner may want to set, each with the reason."""
    found = []
    for reason, each in tally.reasons.items():
        if key := re.search(r"set (data\.\w+)=(\S+)$", reason):
            found.append(_proposal(key[1], key[2], f"{each.count:,} rows have other bytes"))
        if "data.empty: skip" in reason:
            found.append(_proposal("data.empty", "skip", f"{each.count:,} texts are empty"))
        if sign := re.search(r"; there are: \w+([^\w\s.,'\"-])\w+(?:\1\w+)*(?: |$)", reason):
            found.append(_proposal("data.delimiter", sign[1], "the header is one column with it"))
    for limit in tally.plan.token_limits:
        lengths = tally.tokens.get(limit.key, Counter())
        too_long, total = cut(lengths, limit.most), sum(lengths.values())
        if too_long > MOST_CUT * total:
            nearly_all = next(n for n in sorted(lengths) if cut(lengths, n) <= MOST_CUT * total)
            value = math.ceil(nearly_all / ROUND) * ROUND
            why = f"{too_long / total:.0%} of the texts are cut at {limit.most}"
            found.append(_proposal(limit.key, value, why))
    return list({each["key"]: each for each in found}.values())


def _proposal(key: str, value: str | int, why: str) -> dict[str, Any]:
    return {"key": key, "value": value, "why": why}


def write_check(config: Config, found: Mapping[str, Any]) -> None:
    """Write the counts to `private/check.json` in the output folder, for the owner alone."""
    folder = Path(config.output.path) / "private"
    try:
        make_private(folder)
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        write_durably(folder / "check.json", text, private=True)
    except OSError as error:
        raise InputError(f"output.path: {folder}: {error.strerror}") from None

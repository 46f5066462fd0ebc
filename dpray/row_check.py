"""The owner's check of all rows before a run: errors, types, lengths, labels, texts to be cut.

The counts are exact: they are for the owner alone, and no plan or run uses them. Some bytes are
kept of each row, and no text is kept or shown.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpray.config.config import Config
from dpray.config.sections import MethodSettings, TextSettings
from dpray.engines.model_path import resolve_model
from dpray.engines.text import TextCodec
from dpray.engines.vllm_model import context_of
from dpray.io.columns import column_of, label_name
from dpray.io.files import make_private, write_durably
from dpray.io.formats import Where, base_name
from dpray.io.records import scan_piece
from dpray.io.schema_file import is_grammar
from dpray.registry import make_plan
from dpray.runs.plan import Plan, TokenLimit
from dpray.types import InputError, OnProgress, Progress, no_progress
from dpray.unit_check import People
from dpray.workers.rows import data_pieces, to_row

MOST_REASONS, MOST_ROWS = 40, 10
"""The most errors that are listed, and the most rows for each of them."""

MOST_LABELS, LONGEST_LABEL = 20, 40
"""Values outside `data.labels` are listed unless there are more, or one is longer: then they may be
texts."""

TEXTS_AT_ONCE = 1000
"""Rows between two reports of progress."""

MOST_CUT = 0.05
"""If a limit cuts a larger share of the texts, another limit is proposed."""

ROUND = 64
"""Proposed numbers of tokens are multiples of this: a round number tells less about the rows."""

ONE_COLUMN = re.compile(r"; there are: \w+([^\w\s.,'\"-])\w+(?:\1\w+)*(?: |$)")
"""Matches a header with a single column that looks like several names with a delimiter."""

SHARES = {"shortest": 0.0, "half": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}

NOTICE = "exact counts of private rows, for the owner alone: not for release; nothing was charged"


def check_rows(
    config: Config,
    on_progress: OnProgress = no_progress,
    load_codec: Callable[[str, int | None], TextCodec] = TextCodec,
) -> dict[str, Any]:
    """Read all rows as a run will, and return the counts for the owner. `load_codec` loads a
    model's tokenizer. Raises InputError if the configuration has no plan, or if its path names no
    files."""
    plan = make_plan(config)
    pieces = data_pieces(config.data)
    tally = Tally(plan)
    if plan.reads.token_limits:
        on_progress(Progress("loading the tokenizer"))
        try:
            model = resolve_model(config.engine.model)
            tally.codec = load_codec(model, config.engine.max_model_len)
        except InputError as error:
            tally.no_tokens = str(error)
    for number, piece in enumerate(pieces):
        # The number of rows is private; this check shows it to the owner.
        activity = f"reading file {number + 1} of {len(pieces)}"
        before = tally.rows
        try:
            for where, row in scan_piece(piece):
                if tally.rows % TEXTS_AT_ONCE == 0:
                    on_progress(Progress(activity, tally.rows))
                tally.add(where, row)
        except InputError as error:
            tally.refuse(str(error))
        else:
            if tally.rows == before:
                tally.refuse(f"{base_name(piece.file)} holds no rows")
    return tally.summary()


class Tally:
    """The counts of the rows of all files."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.data = plan, plan.config.data
        self.codec: TextCodec | None = None
        self.no_tokens: str | None = None
        self.rows = self.skipped = 0
        self.reasons: Counter[str] = Counter()
        self.places: defaultdict[str, list[str]] = defaultdict(list)
        self.types: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.labels: Counter[str] = Counter()
        self.other_labels: Counter[str] | None = Counter()
        self.characters: Counter[int] = Counter()
        self.tokens: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.texts = self.data.text_columns
        self.fits = fitting(plan.config.method.each[-1]) if self.data.is_table else None
        self.misfits = 0
        self.people = People(self.data)

    def add(self, where: Where, row: Mapping[str, Any] | InputError) -> None:
        self.rows += 1
        if isinstance(row, InputError):
            self.refuse(str(row), where)
            return
        unit = [self.data.unit] if self.data.unit else []
        for name in dict.fromkeys([*self.texts, *self.plan.reads.column_values, *unit]):
            self.types[name][_type(row, name, where)] += 1
        plan = self.plan
        try:
            record = to_row(where, row, self.data, plan.reads.column_values)
        except InputError as error:
            self._count_other_label(where, row)
            self.refuse(str(error), where)
            return
        if record is None:
            self.skipped += 1
            return
        self.labels[record["label"]] += 1
        self.misfits += self.fits is not None and not self.fits(record["text"])
        self.characters[len(record["text"])] += 1
        self.people.add(where, row, record)
        if self.codec is not None:
            for limit in plan.reads.token_limits:
                self.tokens[limit.key][limit.tokens(self.codec, record)] += 1

    def refuse(self, reason: str, where: Where | None = None) -> None:
        """Count an error. The first error of a kind also lists the columns; later ones are counted
        with it."""
        reason = reason.removeprefix(f"{where}: ")
        alike = (known for known in self.reasons if known.startswith(f"{reason}; there are: "))
        reason = next(alike, reason)
        if reason not in self.reasons and len(self.reasons) >= MOST_REASONS:
            reason = "other errors"
        self.reasons[reason] += 1
        if where is not None and len(self.places[reason]) < MOST_ROWS:
            self.places[reason].append(str(where))

    def _count_other_label(self, where: Where, row: Mapping[str, Any]) -> None:
        """Count a label that is not configured, unless it may be the text of a record."""
        if self.data.label is None or self.other_labels is None:
            return
        if _type(row, self.data.label, where) in ("missing", "null", "object", "list"):
            return
        name = label_name(column_of(row, self.data.label, where))
        if name in self.data.label_names:
            return
        self.other_labels[name] += 1
        many = len(self.other_labels) > MOST_LABELS
        if self.data.label in self.texts or many or len(name) > LONGEST_LABEL:
            self.other_labels = None

    def summary(self) -> dict[str, Any]:
        return {
            "notice": NOTICE,
            "refused": bool(self.reasons),
            "rows": self.rows,
            "records": self.characters.total(),
            "skipped": self.skipped,
            "misfits": None if self.fits is None else self.misfits,
            "errors": [
                {"reason": reason, "count": count, "first": self.places[reason]}
                for reason, count in self.reasons.items()
            ],
            "types": {name: dict(kinds) for name, kinds in self.types.items()},
            "labels": {name: self.labels[name] for name in self.data.label_names},
            "other_labels": None if self.other_labels is None else dict(self.other_labels),
            "characters": quantiles(self.characters),
            "cut_characters": cut(self.characters, self.data.max_characters - 1),
            "limits": [] if self.codec is None else self._limits(),
            "tokens_not_counted": self.no_tokens,
            "public_size": self.data.public_size,
            "proposals": self._proposals(),
        } | self.people.summary()

    def _limits(self) -> list[dict[str, Any]]:
        return [self._limit(limit) for limit in self.plan.reads.token_limits]

    def _limit(self, limit: TokenLimit) -> dict[str, Any]:
        lengths, room = self.tokens[limit.key], self._room(limit)
        most = min(limit.most, room)
        return {
            "key": limit.key,
            "most": most,
            "set_by": limit.key if limit.most <= room else "the context, engine.max_model_len",
            "cut": cut(lengths, most),
            "tokens": quantiles(lengths),
        }

    def _room(self, limit: TokenLimit) -> int:
        """Return the tokens that the context leaves for a text."""
        if self.codec is None:
            return limit.most
        return context_of(self.plan.config.engine, self.codec) - limit.rest(self.codec)

    def _longer(self, limit: TokenLimit) -> Iterator[tuple[str, int]]:
        """Yield the keys with which most texts are read whole, or as far as the model's own context
        allows."""
        if self.codec is None:
            return
        rest = limit.rest(self.codec)
        largest = self.codec.model_config.max_position_embeddings - rest
        whole = math.ceil(_length(self.tokens[limit.key], 1 - MOST_CUT) / ROUND) * ROUND
        if whole > largest:
            whole = largest if largest < ROUND else largest // ROUND * ROUND
        if whole > self._room(limit):
            yield "engine.max_model_len", rest + whole
        if whole > limit.most:
            yield limit.key, whole

    def _proposals(self) -> list[dict[str, Any]]:
        """Return keys that the owner may want to set, each with the reason."""
        found: dict[str, tuple[str | int, str]] = {}
        for reason, count in self.reasons.items():
            if key := re.search(r"set (data\.\w+)=(\S+)$", reason):
                found[key[1]] = key[2], f"{count:,} rows have other bytes"
            if "data.empty: skip" in reason:
                found["data.empty"] = "skip", f"{count:,} texts are empty"
            if sign := ONE_COLUMN.search(reason):
                found["data.delimiter"] = sign[1], "the header is one column with it"
        for limit in self.plan.reads.token_limits:
            lengths, most = self.tokens[limit.key], min(limit.most, self._room(limit))
            too_long, total = cut(lengths, most), lengths.total()
            if too_long > MOST_CUT * total:
                for name, value in self._longer(limit):
                    found[name] = value, f"{too_long / total:.0%} are cut at {most}"
        persons = self.people.summary()["persons"]
        if persons:
            best = max(persons, key=lambda each: int(each["values"]))
            found["data.unit"] = (
                best["column"],
                f"if it names a person, one has up to {best['most']:,} records; now each record is "
                "protected by itself",
            )
        return [{"key": key, "value": value, "why": why} for key, (value, why) in found.items()]


def fitting(method: MethodSettings) -> Callable[[str], bool] | None:
    """Return the function that tells whether a text fits `method.schema`, None where it is no JSON
    Schema."""
    schema = method.schema if isinstance(method, TextSettings) else None
    if schema is None or is_grammar(schema):
        return None
    # Imported late: most runs have no schema.
    from jsonschema.validators import validator_for
    from referencing import Registry

    # An empty registry: nothing is fetched for a `$ref`.
    validator = validator_for(schema)(schema, registry=Registry())
    return lambda text: validator.is_valid(json.loads(text))


def _type(row: Mapping[str, Any], name: str, where: Where) -> str:
    """Return the JSON type of a column's value."""
    try:
        value = column_of(row, name, where)
    except InputError:
        return "missing"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", int: "number", float: "number", dict: "object", list: "list"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "other")


def cut(lengths: Mapping[int, int], most: int) -> int:
    """Return the number of texts that are longer than `most`."""
    return sum(count for length, count in lengths.items() if length > most)


def quantiles(lengths: Counter[int]) -> dict[str, int]:
    """Return the quantiles of the lengths for `SHARES`; an empty dictionary without texts."""
    return {name: _length(lengths, share) for name, share in SHARES.items()} if lengths else {}


def _length(lengths: Counter[int], share: float) -> int:
    found = np.quantile([*lengths], share, weights=[*lengths.values()], method="inverted_cdf")
    return int(found)


def write_check(config: Config, found: Mapping[str, Any]) -> None:
    """Write the counts to `private/check.json` in the output folder, for the owner alone."""
    folder = Path(config.output.path) / "private"
    try:
        make_private(folder)
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        write_durably(folder / "check.json", text, private=True)
    except OSError as error:
        raise InputError(f"output.path: {folder}: {error.strerror}") from None

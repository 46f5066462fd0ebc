"""The owner's check of all rows before a run: errors, types, lengths, labels, texts to be cut.

The counts are exact: they are for the owner only, and no plan or run uses them. Some bytes are
kept of each row, and no text is kept or shown.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dpray.config.config import Config, DataConfig
from dpray.engines.model_path import resolve_model
from dpray.engines.text import TextCodec
from dpray.engines.vllm.model import context_of
from dpray.evaluation.files import files_of
from dpray.evaluation.label_check import LabelCheck
from dpray.evaluation.text_check import is_base64, misfits_of
from dpray.evaluation.unit_check import People
from dpray.io.columns import column_of, divider
from dpray.io.encodings import header_sample, likely_encodings
from dpray.io.files import make_private, write_durably
from dpray.io.formats import FilePart, Where, kind_of
from dpray.io.records import read_file_header, scan_part, titles_in
from dpray.methods.registry import make_plan
from dpray.runs.plan import Plan, TokenLimit
from dpray.types import InputError, Json, OnProgress, Progress, no_progress
from dpray.workers.rows import data_files, to_row

MOST_REASONS, MOST_PLACES = 40, 10
"""The most errors that are listed, and the most rows for each of them."""

TEXTS_AT_ONCE = 1000
"""Rows between two reports of progress."""

MOST_FITS = 4
"""The most encodings that are proposed."""

LEAST_SECTION = 256
"""Sections are not proposed for a limit of fewer tokens: a longer prompt is the first remedy."""

MOST_CUT = 0.05
"""If a limit cuts a larger share of the texts, another limit is proposed."""

ROUND = 64
"""Proposed numbers of tokens are multiples of this: a round number tells less about the rows."""

READ_WHOLE = 0.9
"""Proposed texts are as long as this share of the records is at most."""

SHARES = {"shortest": 0.0, "half": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}

NOTICE = "exact counts of private rows, for the owner only: not for release; nothing was charged"


def check_rows(config: Config, on_progress: OnProgress = no_progress) -> Json:
    """Read all rows as a run will, and return the counts for the owner. Raises
    InputError if the configuration has no plan, or if its path names no files."""
    plan = make_plan(config)
    with files_of(config.data) as data:
        return _check_files(plan, config.model_copy(update={"data": data}), on_progress)


def _check_files(plan: Plan, config: Config, on_progress: OnProgress) -> Json:
    parts = data_files(config.data)
    tally = Tally(plan)
    if plan.reads.token_limits:
        on_progress(Progress("loading the tokenizer"))
        try:
            model = resolve_model(config.engine.model)
            tally.codec = TextCodec(model, config.engine.max_model_len)
        except InputError as error:
            tally.no_tokens = str(error)
    names = config.data.columns | plan.reads.column_values.keys()
    parts = [replace(part, columns=names) for part in parts]
    for number, part in enumerate(parts):
        # The number of rows is private; this check shows it to the owner.
        activity = f"reading file {number + 1} of {len(parts)}"
        try:
            for where, row in scan_part(part):
                if tally.rows % TEXTS_AT_ONCE == 0:
                    on_progress(Progress(activity, tally.rows))
                tally.add(where, row)
        except InputError as error:
            tally.refuse(str(error))
    if not tally.rows and not tally.reasons:
        tally.refuse(f"data.path: {config.data.path} holds no rows")
    has_other_bytes = any("the bytes are not valid" in reason for reason in tally.reasons)
    if has_other_bytes or config.data.encoding is not None:
        tally.encodings = encodings_of(parts, config.data)
    if not tally.characters and kind_of(parts[0].file) != "hub":
        tally.look_at_header(parts[0])
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
        self.names = LabelCheck(self.data)
        self.base64: Counter[str] = Counter()
        self.characters: Counter[int] = Counter()
        self.tokens: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.texts = self.data.text_columns
        self.misfits_of = misfits_of(plan.config.method.each[-1])
        self.misfits = self.going_on = 0
        self.misfit_keys: Counter[tuple[str, str]] = Counter()
        self.encodings: Mapping[str, str] = {}
        self.titles = 0
        self.divider: str | None = None
        self.people = People(self.data)

    def add(self, where: Where, row: Mapping[str, object] | InputError) -> None:
        self.rows += 1
        if isinstance(row, InputError):
            self.refuse(str(row), where)
            return
        unit = [self.data.unit] if self.data.unit else []
        for name in dict.fromkeys([*self.texts, *self.plan.reads.column_values, *unit]):
            self.types[name][_type(row, name, where)] += 1
        self.names.add(row, where)
        plan = self.plan
        try:
            record = to_row(where, row, self.data, plan.reads.column_values)
        except InputError as error:
            self.refuse(str(error), where)
            return
        if record is None:
            self.skipped += 1
            return
        self.labels[record["label"]] += 1
        for name in self.texts:
            self.base64[name] += is_base64(column_of(row, name, where))
        if self.misfits_of is not None and (found := self.misfits_of(record["text"])):
            self.misfits += 1
            self.misfit_keys.update(found)
        text = record["text"].replace("\r", "").strip()
        self.going_on += any(stop in text for stop in getattr(plan.settings, "stop", ()))
        self.characters[len(record["text"])] += 1
        self.people.add(where, row, record)
        if self.codec is not None:
            for limit in plan.reads.token_limits:
                self.tokens[limit.key][limit.tokens(self.codec, record)] += 1

    def look_at_header(self, part: FilePart) -> None:
        """Find titles above the header, if no column that is read is in it, and a delimiter."""
        with suppress(InputError):
            header = read_file_header(part.file, part.format)
            if not {*header.columns} & (part.columns or frozenset()):
                self.titles = titles_in(part.file, part.format)
            self.divider = header.delimiter and divider(header.columns)

    def refuse(self, reason: str, where: Where | None = None) -> None:
        """Count an error. The first of a kind also lists the columns; later ones join it."""
        reason = reason.removeprefix(f"{where}: ")
        alike = (known for known in self.reasons if known.startswith(f"{reason}; there are: "))
        reason = next(alike, reason)
        if reason not in self.reasons and len(self.reasons) >= MOST_REASONS:
            reason = "other errors"
        self.reasons[reason] += 1
        if where is not None and len(self.places[reason]) < MOST_PLACES:
            self.places[reason].append(str(where))

    def summary(self) -> Json:
        labels, roles = self.names.labels, self.names.roles
        return {
            "notice": NOTICE,
            "refused": bool(self.reasons),
            "rows": self.rows,
            "records": self.characters.total(),
            "skipped": self.skipped,
            "misfits": None if self.misfits_of is None else self.misfits,
            "misfit_keys": [
                {"key": key, "problem": problem, "records": count}
                for (key, problem), count in self.misfit_keys.most_common()
            ],
            "base64": dict(+self.base64),
            "errors": [
                {"reason": reason, "count": count, "first": self.places[reason]}
                for reason, count in self.reasons.items()
            ],
            "types": {name: dict(kinds) for name, kinds in self.types.items()},
            "labels": {name: self.labels[name] for name in self.data.label_names},
            "label_shares": self.data.proportions,
            "codes": self.names.codes,
            "other_labels": labels.others,
            "hidden_labels": labels.hidden,
            "label_differences": self.names.differences(),
            "roles": {role: n for role, n in roles.counts.items() if role in roles.known},
            "other_roles": roles.others,
            "hidden_roles": roles.hidden,
            "characters": quantiles(self.characters),
            "cut_characters": cut(self.characters, self.data.max_characters - 1),
            "limits": [self._limit(each) for each in self.plan.reads.token_limits if self.codec],
            "tokens_not_counted": self.no_tokens,
            "max_tokens": self._sizes,
            "about": str(self.plan.about),
            "advice": self.plan.language_advice(),
            "public_size": self.data.public_size,
            "proposals": self._proposals(),
        } | self.people.summary()

    def _limit(self, limit: TokenLimit) -> Json:
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
        """Yield the keys with which most texts are read whole, within the model's own context."""
        if self.codec is None:
            return
        rest = limit.rest(self.codec)
        largest = self.codec.model_config.max_position_embeddings - rest
        whole = math.ceil(_length(self.tokens[limit.key], 1 - MOST_CUT) / ROUND) * ROUND
        # Longer prompts cost time, and sections epsilon: they are for texts that no prompt holds.
        fits = whole <= min(largest, self._room(limit))
        if limit.one_section and not fits and whole > 2 * limit.most >= 2 * LEAST_SECTION:
            number = min(math.ceil(whole / limit.most), 100)
            drawn = getattr(self.plan.settings, "max_tokens", 0)
            if self._room(limit) - (number - 1) * drawn >= LEAST_SECTION:
                yield "method.sections", number
                return
        if whole > largest:
            whole = largest if largest < ROUND else largest // ROUND * ROUND
        if whole > self._room(limit):
            yield "engine.max_model_len", rest + whole
        if whole > limit.most:
            yield limit.key, whole

    @cached_property
    def _sizes(self) -> list[dict[str, int]]:
        """Return what `method.max_tokens` costs: for the present one and for some by the lengths of
        the records, the records that are longer and the texts that it makes. None of them if the
        number of texts does not depend on it."""
        now = getattr(self.plan.settings, "max_tokens", 0)
        limits = self.plan.reads.token_limits
        lengths = self.tokens[limits[0].key] if limits else Counter[int]()
        if not lengths or self.plan.texts_of(now) is None:
            return []
        whole = math.ceil(_length(lengths, READ_WHOLE) / ROUND) * ROUND
        tried = sorted({now, ROUND, max(ROUND, whole // 2 // ROUND * ROUND), whole})
        return [
            {"tokens": n, "longer": cut(lengths, n), "texts": self.plan.texts_of(n) or 0}
            for n in tried
        ]

    def _fitting(self) -> tuple[int, str] | None:
        """Return the largest `method.max_tokens` of `_sizes` that makes all texts that are asked
        for, unless it is the present one or a longer one is not needed."""
        now = getattr(self.plan.settings, "max_tokens", 0)
        wanted = getattr(self.plan.settings, "max_records", None) or 1
        by_tokens = {each["tokens"]: each for each in self._sizes}
        enough = [n for n, each in by_tokens.items() if each["texts"] >= wanted]
        if not enough or (best := max(enough)) == now or (best < now and now in enough):
            return None
        longer, total = by_tokens[best]["longer"], self.characters.total()
        texts = f"{by_tokens[best]['texts']:,} texts, and {now} makes {by_tokens[now]['texts']:,}"
        return best, f"{longer / total:.0%} of the records are longer; it makes {texts}"

    def _of_lengths(self) -> dict[str, tuple[str | int, str]]:
        """Return the keys with which fewer texts are cut when they are read; if few are cut,
        `method.max_tokens`, which takes room from them."""
        found: dict[str, tuple[str | int, str]] = {}
        are_read = True
        for limit in self.plan.reads.token_limits:
            lengths, most = self.tokens[limit.key], min(limit.most, self._room(limit))
            too_long, total = cut(lengths, most), lengths.total()
            if too_long > MOST_CUT * total:
                are_read = False
                for name, value in self._longer(limit):
                    found[name] = value, f"{too_long / total:.0%} are cut at {most}"
        if are_read and (fitting := self._fitting()) is not None:
            found["method.max_tokens"] = fitting
        return found

    def _proposals(self) -> list[Json]:
        """Return keys that the owner may want to set, each with the reason."""
        found: dict[str, tuple[str | int, str]] = {}
        if self.titles:
            found["data.skip_rows"] = self.titles, "lines above the header seem to be titles"
        if self.divider:
            found["data.delimiter"] = self.divider, "the header is one column with it"
        for reason, count in self.reasons.items():
            if key := re.search(r"set (data\.\w+)=(\S+)( to read the list in it)?$", reason):
                why = f"{count:,} rows have other bytes"
                found[key[1]] = key[2], "the file is one object" if "object" in reason else why
            if "data.empty: skip" in reason:
                found["data.empty"] = "skip", f"{count:,} texts are empty"
        found |= self.names.proposals()
        if (others := self.names.other_rows) and self.data.other_labels == "refuse":
            found["data.other_labels"] = "skip", f"{others:,} rows have labels not in data.labels"
        found |= self._of_lengths()
        if self.going_on > MOST_CUT * self.characters.total():
            share = self.going_on / self.characters.total()
            found["method.stop"] = "[]", f"{share:.0%} of the records go on after such a string"
        persons = self.people.summary()["persons"]
        if persons:
            best = max(persons, key=lambda each: int(each["values"]))
            found["data.unit"] = (
                best["column"],
                f"if it names a person, one has up to {best['most']:,} records; now each record is "
                "protected by itself",
            )
        each = [("data.encoding", encoded) for encoded in self.encodings.items()]
        return [
            {"key": key, "value": value, "why": why}
            for key, (value, why) in [*each, *found.items()]
        ]


def encodings_of(parts: Sequence[FilePart], data: DataConfig) -> dict[str, str]:
    """Return the likely encodings of the files, each with what it would mean: the names in the
    header that are not ASCII, and no text."""
    files = [part.file for part in parts]
    found = likely_encodings(files, data.format, [*data.label_names, *data.columns])[:MOST_FITS]
    header = header_sample(files[0], data.format)
    return {fit.encoding: fit.meaning(header) for fit in found}


def _type(row: Mapping[str, object], name: str, where: Where) -> str:
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


def write_check(config: Config, found: Mapping[str, object]) -> None:
    """Write the counts to `private/check.json` in the output folder, for the owner only."""
    folder = Path(config.output.path) / "private"
    try:
        make_private(folder)
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        write_durably(folder / "check.json", text, private=True)
    except OSError as error:
        raise InputError(f"output.path: {folder}: {error.strerror}") from None

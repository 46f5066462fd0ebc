"""The ledger's entries, and the hash chain that they form in each data set.

Every entry holds the hash of the one before it, so an entry that is altered, removed or put in
later does not fit. The chain has no secret in it: it shows accidents and edits by hand, and does
not stop somebody who writes a whole new chain.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches

from dpray.accounting.event import canonical_json
from dpray.types import DATASET_NAME, DATASET_RULE, InputError, Json

GENESIS = "0" * 64

KEY_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@=+-]{0,199}")
CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def now() -> str:
    """Return the time of an entry, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Entry:
    """One row of the ledger. `payload` is canonical JSON; `unit`, `attempt` and `at` may be
    empty."""

    dataset: str
    seq: int
    kind: str
    key: str
    unit: str
    attempt: str
    at: str
    payload: str
    prev_hash: str
    hash: str = ""

    def digest(self) -> str:
        """Return SHA-256, in hexadecimal, of the fields above in their order, without `hash`."""
        return _digest([value for name, value in vars(self).items() if name != "hash"])

    def values(self) -> Json:
        """Return the payload as a dictionary."""
        values: Json = json.loads(self.payload)
        return values

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"payload": self.values()}


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


@dataclass
class Chain:
    """The end of a data set's chain.

    `reservations` counts the charges and the raises of the budget. `added` are the entries that are
    not written yet.
    """

    dataset: str
    length: int = 0
    head: str = GENESIS
    reservations: int = 0
    added: list[Entry] = field(default_factory=list)

    @property
    def end(self) -> dict[str, object]:
        """Return the columns of the data set's row, without its name."""
        return {"length": self.length, "head": self.head, "reservations": self.reservations}

    def append(
        self,
        kind: str,
        key: str,
        payload: Mapping[str, object],
        *,
        unit: str = "",
        attempt: str = "",
        at: str = "",
    ) -> Entry:
        """Link a new entry behind the last one."""
        place = (self.dataset, self.length, kind, key, unit, attempt, at)
        content = (*place, canonical_json(payload), self.head)
        entry = Entry(*content, hash=_digest(content))
        self.added.append(entry)
        self._step(entry)
        return entry

    def faults(self, entry: Entry) -> Iterator[str]:
        """Yield what is wrong with `entry` as the next one, and go on behind it."""
        place = f"data set '{self.dataset}', entry {entry.seq}"
        if entry.seq != self.length:
            yield f"{place}: entry {self.length} was expected here"
        if entry.prev_hash != self.head:
            yield f"{place}: it does not follow the entry before it"
        if entry.hash != entry.digest():
            yield f"{place}: its content does not have its hash"
        self._step(entry)

    def _step(self, entry: Entry) -> None:
        # SQLite keeps a text in a column of numbers.
        place = entry.seq if isinstance(entry.seq, int) else self.length
        self.length, self.head = place + 1, entry.hash
        self.reservations += entry.kind in ("reserve", "raise")


def check_name(name: str) -> str:
    """Return the name of a new data set, without needless blanks."""
    if not DATASET_NAME.fullmatch(name):
        raise InputError(DATASET_RULE)
    return " ".join(name.split())


def folded(name: str) -> str:
    """Return what all spellings of one name share: case and blanks make no other name."""
    return " ".join(name.split()).casefold()


def nearly(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `name` is probably mistyped for, or None. Names whose digits
    differ are numbered on purpose."""

    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", text.casefold())

    def digits(text: str) -> str:
        return re.sub(r"\D", "", text)

    known = {letters(other): other for other in names if digits(other) == digits(name)}
    near = get_close_matches(letters(name), known, n=1, cutoff=0.8)
    return known[near[0]] if near else None


def check(what: str, text: str, pattern: re.Pattern[str]) -> None:
    # The text is not repeated: what breaks the rule may be what the rule keeps out.
    if not pattern.fullmatch(text):
        raise InputError(f"{what} has to match {pattern.pattern}")


def check_public(what: str, texts: Iterable[str], longest: int = 200) -> None:
    if not all(0 < len(text) <= longest and text.isprintable() for text in texts):
        raise InputError(f"{what} has to have 1 to {longest} printable characters")


def plain(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values as the ledger gives them back."""
    read: dict[str, object] = json.loads(canonical_json(values))
    return read

"""`data.after: COLUMN > VALUE` keeps the rows that came after those of an earlier run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache

from dpray.io.columns import column_of, plain_value
from dpray.io.formats import Where
from dpray.types import InputError

_RULE = re.compile(r"\s*(\S(?:.*?\S)?)\s*>\s*(\S+)\s*")
_DAY = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")
_NUMBER = re.compile(r"-?[0-9]{1,38}(?:\.[0-9]{1,38})?")


@dataclass(frozen=True)
class After:
    """Rows with a larger number, or a later day, in a column. Numbers are compared exactly, and a
    point in a text is a decimal point: `12.500` is 12.5. A day is that which the cell says, in
    whatever time zone it was written."""

    column: str
    value: Decimal | date

    def keeps(self, row: Mapping[str, object], where: Where) -> bool:
        """Return whether a row is one of these, by its own cell. Raises InputError that names the
        row for a cell that is no such number or day."""
        cell = plain_value(column_of(row, self.column, where), self.column, where)
        if isinstance(self.value, date):
            written = str(cell)
            day = _day(written[:10]) if written[10:11] in ("", "T", " ") else None
            if day is None:
                raise InputError(
                    f"{where}: column '{self.column}' does not begin with a day as in data.after, "
                    "such as 2026-09-30"
                )
            return day > self.value
        if isinstance(cell, str) and _NUMBER.fullmatch(cell.strip()):
            cell = Decimal(cell.strip())
        if isinstance(cell, float):
            cell = Decimal(repr(cell))  # the number that the file says, not its nearest binary one
        if isinstance(cell, bool) or not isinstance(cell, int | Decimal):
            raise InputError(f"{where}: column '{self.column}' is no number as in data.after")
        return Decimal(cell) > self.value


def _day(text: str) -> date | None:
    with suppress(ValueError):
        return date.fromisoformat(text) if _DAY.fullmatch(text) else None
    return None


@cache
def after(rule: str) -> After:
    """Read the rule. Raises ValueError that says what it has to be."""
    found = _RULE.fullmatch(rule)
    column, value = found.groups() if found else ("", "")
    if (day := _day(value)) is not None:
        return After(column, day)
    if not _NUMBER.fullmatch(value):
        raise ValueError("not `COLUMN > VALUE` with a number or a day, as in `opened > 2026-09-30`")
    return After(column, Decimal(value))


def is_after(rule: str | None) -> str | None:
    """Check a rule for a configuration."""
    if rule is not None:
        after(rule)
    return rule

"""`data.after: COLUMN > VALUE` keeps the rows that came after those of an earlier run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from dpray.io.columns import column_of, plain_value
from dpray.io.formats import Where
from dpray.types import InputError

_RULE = re.compile(r"\s*(\S(?:.*?\S)?)\s*>\s*(\S+)\s*")
_DAY = re.compile(r"[0-9]{4}-[01][0-9]-[0-3][0-9](?![0-9])")
_NUMBER = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")


@dataclass(frozen=True)
class After:
    """Rows with a larger number, or a later day, in a column."""

    column: str
    value: float | str

    def keeps(self, row: Mapping[str, object], where: Where) -> bool:
        """Return whether a row is one of these, by its own cell. Raises InputError that names the
        row for a cell that is no such number or day."""
        cell = plain_value(column_of(row, self.column, where), self.column, where)
        if isinstance(self.value, str):
            if (day := _DAY.match(str(cell))) is None:
                raise InputError(
                    f"{where}: column '{self.column}' does not begin with a day as in data.after, "
                    "such as 2026-09-30"
                )
            return day[0] > self.value
        if isinstance(cell, str) and _NUMBER.fullmatch(cell.strip()):
            cell = float(cell)
        if isinstance(cell, bool) or not isinstance(cell, int | float):
            raise InputError(f"{where}: column '{self.column}' is no number as in data.after")
        return cell > self.value


@cache
def after(rule: str) -> After:
    """Read the rule. Raises ValueError that says what it has to be."""
    found = _RULE.fullmatch(rule)
    column, value = found.groups() if found else ("", "")
    if _DAY.fullmatch(value):
        return After(column, value)
    if not _NUMBER.fullmatch(value):
        raise ValueError("not `COLUMN > VALUE` with a number or a day, as in `opened > 2026-09-30`")
    return After(column, float(value))


def is_after(rule: str | None) -> str | None:
    """Check a rule for a configuration."""
    if rule is not None:
        after(rule)
    return rule

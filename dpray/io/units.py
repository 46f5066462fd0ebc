"""A cell becomes the name of a privacy unit: one person has one name, however tools write it.

pandas turns a column of whole numbers into floats as soon as one cell is empty, so an export has
`101` in one file and `101.0` in another. A whole number therefore has one name, whatever its type
and its zeros behind the point. Every other text is a name as it stands: `0101`, `A7` and `a7` are
three. `dpray check` counts names that differ in such ways only, as 1,234 and 1234 do.

A cell that says "no value" names nobody. If all of them were one unit, its bound would keep a few
of its records, and the others would vanish.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Mapping
from decimal import Decimal

from dpray.io.columns import column_of
from dpray.io.formats import Where
from dpray.types import InputError, valid_unicode

EXACT = 2**53
"""Beyond it a float has lost digits: it no longer tells one whole number from the next."""

NO_VALUE = frozenset({
    "nan", "null", "none", "nil", "na", "n/a", "nat", "undefined", "missing", "\\n", "1.#ind",
    "1.#qnan", "#n/a", "#na", "#null!", "#ref!", "#value!", "#name?", "#div/0!", "#num!",
})  # fmt: skip
"""These stand for an empty cell, or for a formula without a value, in pandas, R, databases and
spreadsheets: in small letters, and without the brackets or the minus around them."""

WHOLE_NUMBER = re.compile(r"(-?)(0|[1-9][0-9]*)(?:\.0*|,0)", re.ASCII)
"""A whole number with a point, or with a decimal comma."""

SCIENTIFIC = re.compile(r"-?[0-9]\.[0-9]+[eE]-?[0-9]{1,3}", re.ASCII)
"""A double as Java, and so Spark, writes one from 10^7 on. All of its digits are there."""

ROUNDED = re.compile(r"-?[0-9]+(?:[.,][0-9]+)?[eE]\+[0-9]{1,3}", re.ASCII)
"""A spreadsheet shows a long number so, without its last digits; pandas writes one beyond 2^53
so."""

THOUSANDS = re.compile(r"[0-9]{1,3}(?:([,.'\u2019])[0-9]{3})(?:\1[0-9]{3})*", re.ASCII)
"""A whole number with signs between its thousands: 1,234 or 1.234 or 1'234."""

NO_UNIT = "which is no unit; give such rows an id of their own, or leave them out"
EXPORT = "export the column as text, or as whole numbers"


def unit_of(row: Mapping[str, object], column: str, where: Where) -> str:
    """Return the name of the unit that a row belongs to. Raises InputError that names the row for a
    cell that names none, or one that cannot be told from others."""
    try:
        return unit_name(column_of(row, column, where))
    except ValueError as error:
        raise InputError(f"{where}: column '{column}' {error}") from None


def unit_name(value: object) -> str:
    """Return the name of the unit that a value stands for. Raises ValueError for a value that
    stands for none."""
    if isinstance(value, bytes):  # Parquet without types, as old writers leave it
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return _of_text(value)
    if value is None:
        raise ValueError(f"is null, {NO_UNIT}")
    if isinstance(value, Mapping | list | tuple):
        raise ValueError("holds no text and no number")
    return _of_number(value) if isinstance(value, float | Decimal) else str(value)


def _of_text(text: str) -> str:
    if text != valid_unicode(text):
        raise ValueError("is not valid Unicode")
    words = re.split(r"[\s_,;|<>()\[\]-]+", text.casefold())
    if not any(map(_shows, text)) or NO_VALUE.issuperset(filter(None, words)):
        raise ValueError(f"has a cell without a value, {NO_UNIT}")
    if ROUNDED.fullmatch(text.strip()):
        raise ValueError(f"holds a number that was rounded, as 1.2E+11 is; {EXPORT}")
    if whole := WHOLE_NUMBER.fullmatch(text):
        return _of_number(Decimal(whole[1] + whole[2]), has_lost_digits=True)
    if SCIENTIFIC.fullmatch(text) and (number := Decimal(text)) == number.to_integral_value():
        return _of_number(number, has_lost_digits=True)
    return text


def _shows(sign: str) -> bool:
    """Return whether a sign is no blank, not invisible, and no punctuation that may stand for an
    empty cell."""
    return sign.isprintable() and not sign.isspace() and sign not in string.punctuation


def _of_number(number: float | Decimal, has_lost_digits: bool = False) -> str:
    """Return the name of a number with a decimal point. `has_lost_digits` if it is large and may
    have been a float."""
    if not math.isfinite(number):
        raise ValueError(f"holds no number, {NO_UNIT}")
    if number != int(number):
        return str(number.normalize() if isinstance(number, Decimal) else number)
    if (has_lost_digits or isinstance(number, float)) and not -EXACT <= number <= EXACT:
        raise ValueError(
            f"holds a whole number beyond 2^53 with a point, which rounds it; {EXPORT}"
        )
    return str(int(number))


def alike(name: str) -> str:
    """Return what names share that differ only in case, blanks, leading zeros, thousands separators
    or Unicode form."""
    folded = "".join(unicodedata.normalize("NFKC", name).casefold().split())
    folded = unicodedata.normalize("NFKC", folded)
    if THOUSANDS.fullmatch(folded):
        folded = re.sub("[^0-9]", "", folded)
    try:
        return unit_name(folded.lstrip("0") or "0")
    except ValueError:
        return folded

"""One person is one unit, whichever tool wrote the file; a cell without a value is none."""

from __future__ import annotations

import math
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dpray.config.config import DataConfig
from dpray.io.formats import Where
from dpray.io.units import EXACT, alike, unit_name, unit_of
from dpray.types import InputError
from dpray.workers.rows import local_rows, record_rows

NUMBERS = st.integers(-EXACT, EXACT)


def java(number: int) -> str:
    """Write a double of at least 10^7 as Java does."""
    digits = str(abs(number)).rstrip("0")
    sign = "-" if number < 0 else ""
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{len(str(abs(number))) - 1}"


@given(NUMBERS)
def test_a_whole_number_is_one_unit_in_every_type_and_spelling(number: int) -> None:
    written = [
        number, float(number), Decimal(number), Decimal(f"{number}.00"),
        *(f"{number}{end}" for end in ("", ".", ".0", ".00", ".000000", ",0")),
        str(number).encode(),
    ]  # fmt: skip
    if abs(number) >= 10**7:
        written.append(java(number))
    assert {unit_name(each) for each in written} == {str(number)}


@given(st.integers(min_value=10**15) | st.integers(max_value=-(10**15)))
def test_a_large_number_is_its_own_unit_or_refused(number: int) -> None:
    """A float beyond 2^53 is several whole numbers, so it may not be a unit."""
    assert unit_name(number) == unit_name(str(number)) == unit_name(Decimal(number)) == str(number)
    if abs(number) > EXACT:
        assume(abs(number) < 1e300)
        for rounded in (f"{number}.0", repr(float(number)), f"{float(number):.5E}", float(number)):
            with pytest.raises(ValueError, match="export the column as text"):
                unit_name(rounded)


@given(
    st.text(min_size=1).filter(lambda text: any(sign.isalpha() for sign in text))
    | st.from_regex(r"0[0-9]{1,8}|[0-9a-f]{8}|1e[0-9]{2}|[0-9]+-[0-9]+", fullmatch=True)
)
def test_any_other_text_is_a_unit_as_it_stands_or_refused(text: str) -> None:
    try:
        assert unit_name(text) == text
    except ValueError:
        # "none" and the like, lone surrogates, and numbers that were rounded.
        assert "no unit" in no_unit(text) or "Unicode" in no_unit(text) or "+" in text


def no_unit(value: Any) -> str:
    with pytest.raises(ValueError) as refused:
        unit_name(value)
    return str(refused.value)


EMPTY = [
    "", " ", "\t", "\u200b", "\u00a0", "nan", "NaN", "NAN", "-nan", "null", "NULL", "Null", "None",
    "none", "NONE", r"\N", "NaT", "<NA>", "NA", "N/A", "n/a", "#N/A", "#REF!", "nil", "(null)",
    "[NULL]", " NaN ", "undefined", "-", "--", ".", "?", "nan nan", "None_None", "1.#QNAN",
]  # fmt: skip


@pytest.mark.parametrize(
    "value", [*EMPTY, None, math.nan, math.inf, -math.inf, Decimal("NaN"), b"", b"NULL"]
)
def test_a_cell_without_a_value_is_no_unit(value: Any) -> None:
    assert "no unit; give such rows an id of their own, or leave them out" in no_unit(value)
    with pytest.raises(InputError, match=r"jan\.csv, row 7: column 'patient' "):
        unit_of({"patient": value}, "patient", Where("jan.csv", 7))


@given(st.text(st.sampled_from("01579.,eE+-naNUL \\\ud800")) | st.text())
def test_a_refusal_quotes_no_cell(text: str) -> None:
    fixed = {no_unit(each) for each in ("", "1.2E+11", "9007199254740994.0", "\ud800")}
    with suppress(ValueError):
        unit_name(text)
        return
    assert no_unit(text) in fixed


@pytest.mark.parametrize("column", [pa.int64(), pa.float64(), pa.string(), pa.decimal128(21, 2)])
def test_exports_of_one_person_are_one_unit_in_a_run(tmp_path: Path, column: pa.DataType) -> None:
    """The bound of a unit counts the rows of all files."""
    (tmp_path / "a.csv").write_text("text,who\na,101\nb,101\nc,102\n")
    (tmp_path / "b.csv").write_text("text,who\nd,101.0\ne,102.0\n")
    (tmp_path / "c.jsonl").write_text('{"text": "f", "who": 101}\n{"text": "g", "who": "101.0"}\n')
    table = pa.table({"text": ["h", "i"], "who": pa.array([101, 102]).cast(column)})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    data = DataConfig(path=str(tmp_path), unit="who", max_records_per_unit=1, public_size=9)
    kept = local_rows(data, lambda piece: record_rows(piece, data))
    assert sorted(row["unit"] for row in kept) == ["101", "102"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ab1", "AB1"), ("a b", "ab"), (" 7", "7"), ("007", "7"), ("0", "000"), ("７", "7"),
        ("Andre\u0301", "Andr\u00e9"), ("stra\u00dfe", "STRASSE"), ("0101.0", "101"),
    ],
)  # fmt: skip
def test_names_that_are_alike(one: str, other: str) -> None:
    assert unit_name(one) != unit_name(other) and alike(one) == alike(other)


@given(st.text())
def test_blanks_around_a_name_make_no_other_one(name: str) -> None:
    assert alike(f" {name} ") == alike(name)

"""`.xlsx`: what a cell becomes, which sheet is read, and files that openpyxl cannot take."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from datetime import date, datetime, time
from pathlib import Path

import openpyxl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray import extras
from dpray.io.formats import TWICE, FileFormat, FilePart
from dpray.io.records import read_file_header, read_rows, scan_part
from dpray.types import InputError

KEYS = FileFormat(keys="data.")


def xlsx(folder: Path, *rows: Sequence[object], name: str = "a.xlsx") -> str:
    book = openpyxl.Workbook()
    assert book.active is not None
    for row in rows:
        book.active.append(row)
    book.save(folder / name)
    return str(folder / name)


def changed(file: str, part: str, old: bytes, new: bytes) -> str:
    """Replace bytes in a part of a file, which has to have them."""
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    assert old in parts[part]
    parts[part] = parts[part].replace(old, new)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file


SHEET = "xl/worksheets/sheet1.xml"


def rows_of(file: str) -> list[dict[str, object]]:
    return [row for _, row in read_rows(file)]


def test_cells_keep_their_types(tmp_path: Path) -> None:
    values = ["x", 7, 0.5, True, datetime(2024, 1, 31), datetime(2024, 1, 31, 9), time(9, 30)]
    file = xlsx(tmp_path, list("abcdefg"), values)
    kept = [*values[:4], date(2024, 1, 31), *values[5:]]
    assert rows_of(file) == [dict(zip("abcdefg", kept, strict=True))]
    assert [*map(type, rows_of(file)[0].values())] == [*map(type, kept)]


def test_a_formula_has_its_value_and_an_error_is_null(tmp_path: Path) -> None:
    file = xlsx(tmp_path, ["a", "b", "c"], ["=1+1", "#N/A", "'#N/A"])
    assert rows_of(file) == [{"a": None, "b": None, "c": "'#N/A"}]
    changed(file, SHEET, b"<f>1+1</f><v />", b"<f>1+1</f><v>2</v>")
    assert rows_of(file) == [{"a": 2, "b": None, "c": "'#N/A"}]


def test_rows_have_the_numbers_of_the_sheet(tmp_path: Path) -> None:
    rows = ["Export"], [], ["text", "label"], ["x", "a"], [None, None], [7, "b"], [None] * 5
    form = FileFormat(skip_rows=1)
    found = list(read_rows(xlsx(tmp_path, *rows), form))
    assert [row for _, row in found] == [{"text": "x", "label": "a"}, {"text": 7, "label": "b"}]
    assert [str(where) for where, _ in found] == ["a.xlsx, row 4", "a.xlsx, row 6"]
    assert found[0][0].row == 1  # where an error about a column lists those that there are


def test_names_are_as_in_csv(tmp_path: Path) -> None:
    """A column is named twice or has no name, and what is beyond the header is left out."""
    file = xlsx(tmp_path, ["n", None, "n", "text", None], [1, 2, 3, "x", None, "beside"], ["y"])
    assert read_file_header(file).columns == ["n", "", "n", "text"]
    short = {"n": TWICE, "": None, "text": None}
    assert rows_of(file) == [{"n": TWICE, "": 2, "text": "x"}, short]


def test_a_file_may_name_wrong_dimensions(tmp_path: Path) -> None:
    file = changed(xlsx(tmp_path, ["a", "b"], [1, 2]), SHEET, b'"A1:B2"', b'"A1:A1"')
    assert rows_of(file) == [{"a": 1, "b": 2}]


def test_without_sheets_or_rows_there_is_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty.xlsx"
    empty.write_bytes(b"")
    for file in (xlsx(tmp_path), str(empty)):
        assert (rows_of(file), list(read_file_header(file).columns)) == ([], [])


def test_a_row_beyond_the_last_is_refused(tmp_path: Path) -> None:
    """The file names row 2,000,000,000, and the library makes those before it."""
    file = xlsx(tmp_path, ["text"], ["x"], ["Marlowe"])
    changed(file, SHEET, b'<row r="3"', b'<row r="2000000000"')
    (_, first), (_, refused) = scan_part(FilePart(file))
    assert first == {"text": "x"} and "a.xlsx: more than 1,048,576 rows" in str(refused)


BOMB = b"".join(
    [b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a0 "Marlowe">']
    + [b'<!ENTITY a%d "%s">' % (n + 1, b"&a%d;" % n * 20) for n in range(12)]
    + [b"]>"]
)


INLINE = b't="inlineStr"><is><t>Marlowe</t></is>'


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        (SHEET, INLINE, b't="s"><v>99</v>'),
        (SHEET, INLINE, b't="n"><v>Marlowe</v>'),
        (SHEET, INLINE, b't="n"><v>' + b"9" * 5000 + b"</v>"),
        (SHEET, INLINE, b't="d"><v>Marlowe</v>'),
        (SHEET, b'r="A3"', b'r="Marlowe"'),
        (SHEET, b"</row></sheetData>", b"</sheetData>"),
        ("xl/workbook.xml", b"<sheets>", b"<sheets"),
        ("[Content_Types].xml", b"<Types", b"<Marlowe"),
    ],
)
def test_a_damaged_file_is_one_plain_line(
    tmp_path: Path, part: str, old: bytes, new: bytes, recwarn: pytest.WarningsRecorder
) -> None:
    file = changed(xlsx(tmp_path, ["text"], ["x"], ["Marlowe"]), part, old, new)
    said = "".join(str(each) for each in _errors(file))
    assert "a.xlsx" in said and "not a valid .xlsx file (" in said and "Marlowe" not in said
    assert not recwarn.list


def test_entities_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    file = xlsx(tmp_path, ["text"], ["x"], ["Marlowe"])
    changed(file, SHEET, b"<t>Marlowe<", b"<t>&a12;<")
    changed(file, SHEET, b"<worksheet ", BOMB + b"<worksheet ")
    assert "not a valid .xlsx file (ParseError)" in str(_errors(file))


def _errors(file: str) -> list[InputError]:
    try:
        return [row for _, row in scan_part(FilePart(file)) if isinstance(row, InputError)]
    except InputError as error:
        return [error]


def test_no_cell_is_in_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The library warns of a date that there is not, with the cell's value."""
    file = xlsx(tmp_path, ["when", "n"], [datetime(2024, 1, 31), 1])
    changed(file, SHEET, b"<v>45322</v>", b"<v>777777777</v>")
    assert rows_of(file) == [{"when": None, "n": 1}] and not recwarn.list


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = xlsx(tmp_path, ["text"], ["x"])
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "openpyxl")
    for read in (rows_of, read_file_header):
        with pytest.raises(InputError) as refused:
            read(file)  # type: ignore[operator]
        assert str(refused.value) == (
            "a.xlsx needs openpyxl, which is not installed: pip install 'dpray[office]'"
        )


def test_in_a_zip_it_is_refused(tmp_path: Path) -> None:
    xlsx(tmp_path, ["text"], ["Marlowe"])
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "a.xlsx", "a.xlsx")
    with pytest.raises(InputError, match="of a kind that is not read"):
        rows_of(str(tmp_path / "a.zip"))


CELLS = st.one_of(
    st.none(),
    st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="_\ufffe\uffff")),
    st.integers(-(10**14), 10**14),
    # The library writes 15 digits.
    st.floats(allow_nan=False, allow_infinity=False).map(lambda found: float(f"{found:.14g}")),
    st.booleans(),
    st.datetimes(datetime(1950, 1, 1), datetime(2100, 1, 1)).map(
        lambda found: found.replace(microsecond=0)
    ),
)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4))
def test_a_table_that_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[object, ...]]
) -> None:
    made = io.BytesIO()
    book = openpyxl.Workbook()
    assert book.active is not None
    book.active.append(["a", "b", "c"])
    for number, row in enumerate(rows, start=2):
        for column, value in enumerate(row, start=1):
            cell = book.active.cell(number, column, value)
            if isinstance(value, str):
                cell.data_type = "s"  # else a text such as "=x" is a formula
    book.save(made)
    file = tmp_path_factory.getbasetemp() / "table.xlsx"
    file.write_bytes(made.getvalue())
    kept = [[plain(value) for value in row] for row in rows]
    assert [[*row.values()] for row in rows_of(str(file))] == [
        row for row in kept if any(value is not None for value in row)
    ]


def plain(value: object) -> object:
    if isinstance(value, datetime) and value.time() == time():
        return value.date()
    return None if value == "" else value


def test_the_sheet_for_public_files_has_to_be_the_only_one(tmp_path: Path) -> None:
    file = xlsx(tmp_path, ["text"], ["x"])
    book = openpyxl.load_workbook(file)
    book.create_sheet("Notes").append(["Marlowe"])
    book.save(file)
    with pytest.raises(InputError, match=r"several sheets have rows: Sheet, Notes; leave one$"):
        rows_of(file)
    with pytest.raises(InputError, match=r"; set data.records to the name of one$"):
        list(read_rows(file, KEYS))

"""Excel's `.xlsx`: one sheet of it, by openpyxl.

Formulas have the values that they had when the file was saved. No macro runs, and no link to
another file is followed. Errors such as #N/A are null.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from typing import IO, TYPE_CHECKING

from dpray.extras import Late, require
from dpray.io.columns import listed_names
from dpray.io.formats import FileFormat, Scanned, Where, base_name, row_of
from dpray.io.text_files import LONGEST_ARRAY
from dpray.types import InputError

if TYPE_CHECKING:
    from openpyxl.cell import Cell
    from openpyxl.workbook import Workbook
    from openpyxl.worksheet.worksheet import Worksheet as Sheet

openpyxl = Late("openpyxl")

ROWS_OF_SHEET = 1 << 20
"""Rows of a sheet in Excel. A file may name any row, and those before it are taken for empty."""

Cells = Sequence[object]


def read_sheet(name: str, stream: IO[bytes], form: FileFormat) -> Scanned:
    """Read the rows below the header, the first row after `form.skip_rows` that is not empty.
    Empty rows are left out, and count. Errors name the rows of the sheet. Raises InputError for the
    header."""
    above, columns, rows = _open(name, stream, form)
    number = above
    try:
        for number, cells in rows:
            where = Where(name, number - above, above=above)
            # What has no name in the header, such as a note next to the table, nobody can ask for.
            yield where, row_of([*zip(columns, _padded(cells, len(columns)), strict=True)])
    except InputError as error:
        yield Where(name, number + 1 - above, above=above), error


def sheet_columns(name: str, stream: IO[bytes], form: FileFormat) -> list[str]:
    """Return the columns that the header of a sheet names."""
    return _open(name, stream, form)[1]


def _open(
    name: str, stream: IO[bytes], form: FileFormat
) -> tuple[int, list[str], Iterator[tuple[int, Cells]]]:
    """Return the number of the header's row, its names, and the rows below."""
    rows = _sheet_rows(name, _sheet(name, _workbook(name, stream), form))
    rows = ((number, cells) for number, cells in rows if number > form.skip_rows)
    above, header = next(rows, (form.skip_rows, ()))
    return above, ["" if cell is None else str(cell) for cell in header], rows


def _workbook(name: str, stream: IO[bytes]) -> Workbook:
    require(base_name(name), "openpyxl")
    # Its warnings show cells.
    warnings.filterwarnings("ignore", module=r"openpyxl\b")
    try:
        with zipfile.ZipFile(stream) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > LONGEST_ARRAY:
            raise InputError(f"{base_name(name)}: too large a sheet; save it as CSV in UTF-8")
        stream.seek(0)
        return openpyxl.load_workbook(stream, read_only=True, data_only=True, keep_links=False)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise _not_a_sheet(base_name(name), error) from None


def _not_a_sheet(place: Where | str, error: Exception) -> InputError:
    """Return the error for what openpyxl raises, which trusts a file: there are many kinds."""
    return InputError(f"{place}: not a valid .xlsx file ({type(error).__name__})")


def _sheet(name: str, workbook: Workbook, form: FileFormat) -> Sheet | None:
    """Return the sheet that `form.records` names, or the one that has rows."""
    sheets = {sheet.title: sheet for sheet in workbook.worksheets}
    key = f"{form.keys}records"
    if form.records is not None:
        if form.records not in sheets:
            there = f"there are: {listed_names([*sheets])}"
            raise InputError(f"{key}: {base_name(name)} has no sheet '{form.records}'; {there}")
        return sheets[form.records]
    filled = [each for each in sheets.values() if next(_sheet_rows(name, each), None) is not None]
    if len(filled) > 1:
        listed = listed_names([each.title for each in filled])
        advice = "leave one" if form.keys is None else f"set {key} to the name of one"
        raise InputError(f"{base_name(name)}: several sheets have rows: {listed}; {advice}")
    return filled[0] if filled else None


def _sheet_rows(name: str, sheet: Sheet | None) -> Iterator[tuple[int, Cells]]:
    """Yield the rows of a sheet that are not empty, with their numbers. Raises InputError."""
    if sheet is None:
        return
    sheet.reset_dimensions()  # a file may give wrong ones
    rows, number = sheet.iter_rows(), 0
    while True:
        try:
            if (row := next(rows, None)) is None:
                return
            cells = [_value(cell) for cell in row]
        except MemoryError:
            raise
        except Exception as error:
            raise _not_a_sheet(Where(name, number + 1), error) from None
        number += 1
        if number > ROWS_OF_SHEET:
            raise InputError(f"{base_name(name)}: more than {ROWS_OF_SHEET:,} rows")
        while cells and cells[-1] is None:
            cells.pop()
        if cells:
            yield number, cells


def _value(cell: Cell) -> object:
    """Return a cell's value, of a day without a time the date. None for an empty one, and for an
    error."""
    value = cell.value
    if value is None or value == "" or cell.data_type == "e":
        return None
    if isinstance(value, datetime) and value.time() == time():
        return date(value.year, value.month, value.day)
    return value.replace("_x000D_", "") if isinstance(value, str) else value


def _padded(cells: Cells, width: int) -> Cells:
    return [*cells[:width], *[None] * (width - len(cells))]

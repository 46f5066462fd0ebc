"""Text files are decoded: the encoding is given, or follows from a byte order mark."""

from __future__ import annotations

import io
import re

from dpray.io.formats import FileFormat, Scanned, Where, base_name
from dpray.types import InputError

_MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
UTF_8 = "utf-8-sig"

_UNDECODABLE = re.compile("[\udc80-\udcff]")
"""`surrogateescape` makes these of bytes that are not in the encoding; no encoding has them."""

LONGEST_TXT = 64 << 20


def encoding_of(start: bytes, given: str | None) -> str:
    """Return the encoding of a file by its first bytes: the given one, or what a byte order mark
    says, or UTF-8."""
    if given is not None:
        return UTF_8 if given.lower().replace("_", "-") in ("utf-8", "utf8") else given
    found = (encoding for mark, encoding in _MARKS.items() if start.startswith(mark))
    return next(found, UTF_8)


def unmarked(start: bytes) -> str | None:
    """Return the encoding of a file without a byte order mark whose first bytes, of which some are
    NUL, show that it is not UTF-8."""
    start = start[:4]
    if b"\0" not in start or any(map(start.startswith, _MARKS)):
        return None
    if start.startswith(b"\0\0"):
        return "utf-32-be"
    if start.endswith(b"\0\0"):
        return "utf-32-le"
    return "utf-16-le" if start.index(0) % 2 else "utf-16-be"


def text_lines(
    name: str, stream: io.BufferedReader, form: FileFormat, newline: str
) -> tuple[str, io.TextIOWrapper]:
    """Return a file's encoding and its lines, in which bytes that are not in the encoding are left
    as lone surrogates. What reads them may raise UnicodeError nevertheless. Raises InputError for
    UTF-16 without a byte order mark, unless the encoding is given."""
    start = stream.peek(4)
    if form.encoding is None and (found := unmarked(start)):
        advice = f"set {form.keys}encoding={found}" if form.keys else "save the file in UTF-8"
        why = f"{found} without a byte order mark"
        raise InputError(f"{base_name(name)}: the bytes seem to be {why}; {advice}")
    encoding = encoding_of(start, form.encoding)
    return encoding, io.TextIOWrapper(stream, encoding, "surrogateescape", newline=newline)


def undecodable(text: str) -> bool:
    """Return whether `text_lines` left bytes in a text that are not in the encoding."""
    return not text.isascii() and _UNDECODABLE.search(text) is not None


def bad_bytes(place: Where | str, encoding: str, form: FileFormat) -> InputError:
    """Return the error for bytes that are not in the encoding; it proposes Windows' own."""
    if encoding != UTF_8:
        return InputError(f"{place}: the bytes are not valid {encoding}")
    advice = "save the file in UTF-8"
    if form.keys is not None:
        advice = f"for a file from Windows or Excel, set {form.keys}encoding=cp1252"
    return InputError(f"{place}: the bytes are not valid UTF-8; {advice}")


def read_txt(name: str, stream: io.BufferedReader, form: FileFormat) -> Scanned:
    """Read a file that is one text: a row with its `text`, without the last line's end, and as
    `label` the name of its folder."""
    where = Where(name, 1, typed=False)
    encoding, lines = text_lines(name, stream, form, newline="")
    try:
        text = lines.read(LONGEST_TXT)
    except UnicodeError:
        yield where, bad_bytes(where, encoding, form)
        return
    if undecodable(text):
        yield where, bad_bytes(where, encoding, form)
    elif len(text) == LONGEST_TXT:
        yield where, InputError(f"{base_name(name)}: too long for one text")
    else:
        text = text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
        yield where, {"text": text, "label": name.split("/")[-2]}

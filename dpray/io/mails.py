"""E-mail: `.eml`, a mail each, and `.mbox`, mails one after the other.

A row has `subject`, `from`, `to` and `date`, "" for what a mail lacks, and `text`: its plain body,
or that of HTML without its tags. Attachments, and mails that are attached, are left out.

Who sends a mail chooses its bytes: one that cannot be read is one row's error, and none takes more
time than its length explains.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from email.utils import parsedate_to_datetime
from html import unescape
from typing import cast

from dpray.io.formats import FileFormat, FileRow, Scanned, Where, base_name
from dpray.io.text_files import LONGEST_ROW, folder_label, too_long
from dpray.types import InputError

MAIL_COLUMNS = ("subject", "from", "to", "date", "text")

_BETWEEN = re.compile(rb"From [^\n]*?\d\d:\d\d[^\n]*?\d{4}")
"""Matches the line before a mail in `.mbox`, by the time in it: a body may have "From " at the
beginning of a line."""

_SHOWN = 300
"""Bytes of a line that are looked at for it."""

_QUOTED = re.compile(rb"^>(>*From )")
"""Matches the line of a body that a program quoted, since it began so."""

LONGEST_HEADER = 8192
"""Characters of a header that are parsed; a longer one stays as it is written."""

DEEPEST, MOST_WORK = 200, 20_000_000
"""Mails and lists of parts within a mail, which the parser calls itself for, and these times lines:
it compares each line with the end of each part that is open."""

_NESTED = re.compile(rb"multipart/|message/", re.I)

_ADDRESS = re.compile(r"(?<![^\s<>\",;:()@])[^\s<>\",;:()@]+@[^\s<>\",;:()@]+")

_WITHOUT_TEXT = ("idna", "punycode")
"""Encodings of names, which take time that grows with the square of the length."""

_HIDDEN = re.compile(
    r"<!--.*?(?:-->|\Z)|<(script|style|head|title)\b.*?(?:</\1[^>]*(?:>|\Z)|\Z)", re.S | re.I
)
_LINE_END = re.compile(
    r"<(?:br|/(?:p|div|tr|li|h[1-6]|blockquote|table|ul|ol))\b[^>]*(?:>|\Z)", re.I
)
_TAG = re.compile(r"<[a-z/!?][^>]*(?:>|\Z)", re.I)
"""None of these goes back over what it has read, whatever is left open; Python's parser of HTML
does."""


def read_eml(name: str, stream: io.BufferedReader, form: FileFormat) -> Scanned:
    """Read a file that is one mail. As a text's, its `label` is the name of its folder."""
    where = Where(name, 1, typed=False)
    found = _row(where, stream.read(LONGEST_ROW + 1))
    yield where, found if isinstance(found, InputError) else found | folder_label(name)


def read_mbox(name: str, stream: io.BufferedReader, form: FileFormat) -> Scanned:
    """Read mails, each after a line `From ADDRESS TIME`. Raises InputError for another file."""
    for number, mail in enumerate(_mails(name, stream), start=1):
        where = Where(name, number, typed=False)
        yield where, _row(where, mail)


def _mails(name: str, stream: io.BufferedReader) -> Iterator[bytes]:
    """Yield the bytes of each mail, of one that is too long no more than tell that it is."""
    mail: bytearray | None = None
    is_blank = begins = True
    while line := stream.readline(LONGEST_ROW):
        if begins and is_blank and _BETWEEN.match(line[:_SHOWN]):
            if mail is not None:
                yield bytes(mail)
            mail = bytearray()
        elif mail is None:
            if line.strip():
                why = "no .mbox: it does not begin with a line From ADDRESS TIME"
                raise InputError(f"{base_name(name)}: {why}")
        elif len(mail) <= LONGEST_ROW:
            mail += _QUOTED.sub(rb"\1", line) if begins else line
        # A line of many bytes comes in parts.
        is_blank, begins = begins and not line.strip(b"\r\n"), line.endswith(b"\n")
    if mail is not None:
        yield bytes(mail)


def _row(where: Where, mail: bytes) -> FileRow | InputError:
    if len(mail) > LONGEST_ROW:
        return too_long(where)
    deep = len(_NESTED.findall(mail))
    if deep > DEEPEST or (1 + deep) * mail.count(b"\n") > MOST_WORK:
        return InputError(f"{where}: a mail of too many lines or parts")
    try:
        # The parser raises errors of many kinds, such as IndexError and RecursionError.
        parsed = message_from_bytes(mail, policy=default)
        if not parsed.keys():
            return InputError(f"{where}: no mail: it has no headers")
        return _mail_row(where, parsed)
    except InputError as error:
        return error
    except MemoryError:
        raise
    except Exception as error:
        return InputError(f"{where}: a mail that cannot be read ({type(error).__name__})")


def _mail_row(where: Where, mail: EmailMessage) -> FileRow:
    written = {key.lower(): value for key, value in reversed([*mail.raw_items()])}
    subject, sender, to, date = (_decoded(str(written.get(key, ""))) for key in MAIL_COLUMNS[:-1])
    addresses = _addresses(sender)
    row = (subject, addresses[-1] if addresses else sender, ", ".join(_addresses(to)) or to)
    return dict(zip(MAIL_COLUMNS, (*row, _iso(date), _text(where, mail)), strict=True))


def _decoded(header: str) -> str:
    """Return a header in one line, with the words that it encodes. Bytes beyond ASCII are UTF-8."""
    text = header.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = " ".join(text.split())
    if len(text) > LONGEST_HEADER:
        return text
    try:
        return str(default.header_factory("subject", text))
    except Exception:  # as above
        return text


def _addresses(header: str) -> list[str]:
    """Return the addresses in a header in small letters, without names: a person may have several
    of those."""
    return [each.lower() for each in _ADDRESS.findall(re.sub(r'"[^"]*"', " ", header))]


def _iso(date: str) -> str:
    try:
        return parsedate_to_datetime(date).isoformat()
    except (ValueError, TypeError, OverflowError):
        return date


def _text(where: Where, mail: EmailMessage) -> str:
    body = mail.get_body(("plain", "html"))
    if body is None:
        return ""
    content = cast(bytes, body.get_payload(decode=True))
    charset = body.get_content_charset("utf-8")
    try:
        if charset in _WITHOUT_TEXT:
            raise LookupError
        # ASCII is often said where UTF-8 is meant.
        text = content.decode("utf-8" if charset == "us-ascii" else charset, "replace")
    except LookupError:
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise InputError(f"{where}: the mail is in an encoding that is not known") from None
    if body.get_content_type() == "text/html":
        text = _without_tags(text)
    return "\n".join(text.splitlines()).rstrip("\n")


def _without_tags(html: str) -> str:
    """Return the text of HTML, a line for each paragraph."""
    html = re.sub(r"\s+", " ", _HIDDEN.sub(" ", html))
    lines = unescape(_TAG.sub("", _LINE_END.sub("\n", html))).split("\n")
    return "\n".join(line for line in (" ".join(each.split()) for each in lines) if line)

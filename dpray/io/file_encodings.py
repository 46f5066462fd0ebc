"""Samples of the bytes of text files, and the encodings that fit the whole of them."""

from __future__ import annotations

import codecs
import io
from collections.abc import Sequence
from dataclasses import replace

from dpray.io.encodings import Fit, decoded, fits, is_mostly_utf_8, is_western, oddness
from dpray.io.formats import FileFormat, kind_of
from dpray.io.records import READ_BYTES, open_content, read_file_header
from dpray.io.text_files import START, UTF_8, UTF_8_MARK, encoding_of, has_nulls

TEXTS = ("csv", "json", "txt")

SAMPLE = 4 << 20
"""Bytes that are looked at to find the encoding."""

ODDER = 0.25
"""Words look wrong if another encoding has fewer odd characters by this share."""


def header_sample(file: str, form: FileFormat) -> bytes:
    """Return the bytes of the names in a text file's header, one a line. Empty for other files, and
    if the encoding is known by a byte order mark or by null bytes."""
    if not has_unknown_encoding(file):
        return b""
    header = read_file_header(file, replace(form, encoding="latin-1"))
    return "\n".join(header.columns).encode("latin-1", "ignore")


def first_lines(file: str, size: int) -> bytes:
    """Return the first lines of a text file, about `size` bytes. Empty as `header_sample` is."""
    if not has_unknown_encoding(file):
        return b""
    with open_content(file) as (_, stream):
        lines = io.BufferedReader(stream, READ_BYTES)
        return lines.read(size) + lines.readline(READ_BYTES)


def has_unknown_encoding(file: str) -> bool:
    """Return whether a file is a text file whose first bytes do not show its encoding."""
    if kind_of(file) == "hub":
        return False
    with open_content(file) as (kind, stream):
        start = stream.read(START)
    is_marked = encoding_of(start, None) != UTF_8 or start.startswith(UTF_8_MARK)
    return kind in TEXTS and not is_marked and not has_nulls(start)


def lines_beyond_ascii(file: str, size: int) -> bytes:
    """Return the first lines of a text file that are not ASCII, about `size` bytes."""
    found: list[bytes] = []
    with open_content(file) as (_, stream):
        lines = io.BufferedReader(stream, READ_BYTES)
        while size > 0 and (line := lines.readline(READ_BYTES)):
            if not line.isascii():
                found.append(line)
                size -= len(line)
    return b"".join(found)


def is_in_encoding(file: str, encoding: str) -> bool:
    """Return whether the whole of a text file is in an encoding."""
    decoder = codecs.getincrementaldecoder(encoding)()
    with open_content(file) as (_, stream):
        try:
            while part := stream.read(READ_BYTES):
                decoder.decode(part)
            decoder.decode(b"", final=True)
        except UnicodeError:
            return False
    return True


def likely_encodings(files: Sequence[str], form: FileFormat, words: Sequence[str]) -> list[Fit]:
    """Return the encodings that fit the whole of all text files, the most likely ones first; only
    those with most of `words`, which a person gave, if they have some. Empty if the files are in
    the encoding of `form` and no words look wrong with it, and if some of them are in UTF-8, since
    no encoding fits both kinds."""
    texts = [file for file in files if has_unknown_encoding(file)]
    samples = [lines_beyond_ascii(file, SAMPLE // len(texts)) for file in texts]
    beyond = [sample for sample in samples if sample]
    if not beyond or any(map(is_mostly_utf_8, beyond)):
        return []
    sample = b"".join(beyond)
    found = fits(sample, words)
    if is_western(sample):
        found = [fit for fit in found if fit.encoding == "cp1252"]
    found = [fit for fit in found if fit.known == found[0].known]
    if form.encoding is not None and (text := decoded(sample, form.encoding)) is not None:
        odd = oddness(text, form.encoding)
        found = [fit for fit in found if fit.odd < odd - ODDER and fit.text != text]
    return [fit for fit in found if all(is_in_encoding(file, fit.encoding) for file in texts)]

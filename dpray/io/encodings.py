"""Encodings that a text file may be in if it is not in UTF-8.

Bytes prove no encoding: several decode nearly every file, and all but one make other words of it.
So a person chooses by the words. Western European text is recognised without a question, if its
letters are those of one language there and of none in Central Europe, Turkey or the Baltics.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from unicodedata import category, name

from dpray.io.file_list import READ_BYTES
from dpray.io.formats import FileFormat, kind_of
from dpray.io.records import open_content, read_file_header
from dpray.io.text_files import START, UTF_8, UTF_8_MARK, encoding_of, has_nulls

ENCODINGS = {
    "cp1252": "Western European", "cp1250": "Central European", "cp1251": "Cyrillic",
    "koi8_r": "Cyrillic, KOI8", "cp866": "Cyrillic, DOS", "cp1253": "Greek", "cp1254": "Turkish",
    "cp1255": "Hebrew", "cp1256": "Arabic", "cp1257": "Baltic", "cp1258": "Vietnamese",
    "cp874": "Thai", "gb18030": "Chinese, GBK", "cp950": "Chinese, Big5",
    "cp932": "Japanese, Shift-JIS", "euc_jp": "Japanese, EUC", "cp949": "Korean",
    "iso8859_2": "Central European, ISO", "mac_roman": "Western European, Mac",
    "cp850": "Western European, DOS",
}  # fmt: skip
"""Encodings of files in use, each with the texts that it is for."""

COMMON: dict[str, tuple[str, Sequence[tuple[int, int]]]] = {
    "gb18030": ("gb2312", [(0xA1, 0xA3), (0xB0, 0xD7)]),
    "cp950": ("big5", [(0xA1, 0xC6)]),
    "cp932": ("euc_jp", [(0xA1, 0xA5), (0xB0, 0xCF)]),
    "euc_jp": ("euc_jp", [(0xA1, 0xA5), (0xB0, 0xCF)]),
    "cp949": ("euc_kr", [(0xA1, 0xA3), (0xB0, 0xC8)]),
}
"""The characters that texts in an encoding are mostly made of: their first bytes in a standard that
lists common characters first."""

WIDER = {
    "gb2312": "gb18030", "gbk": "gb18030", "big5": "cp950", "big5hkscs": "cp950",
    "shift_jis": "cp932", "shift_jis_2004": "cp932", "shift_jisx0213": "cp932",
    "euc_jis_2004": "euc_jp", "euc_jisx0213": "euc_jp", "euc_kr": "cp949", "johab": "cp949",
}  # fmt: skip
"""Encodings that are a part of one of `ENCODINGS`, or have the same characters in common use."""

WESTERN = (
    "äöüß", "àâæçéèêëîïôœùûüÿ", "áéíñóúü", "áâãàçéêíóôõúü", "àèéìíîòóùú", "æøåé", "åäöé",
    "éëïöüèó", "áéíóúýþæöð", "àçèéíïòóúü",
)  # fmt: skip
NOT_WESTERN = {
    "cp1250": (
        "áčďéěíňóřšťúůýž", "áäčďéíľňóôšťúýž", "ąćęłńóśźż", "áéíóöőúüű", "ăâîşţ", "čćđšž",
    ),
    "cp1254": ("çğıİöşüâîû",),
    "cp1257": ("ąčęėįšųūž", "āčēģīķļņšūž", "äöüõšž"),
}  # fmt: skip
"""The letters beyond ASCII of languages in cp1252, and of those in encodings that look like it."""

SIGNS = "‘’“”„«»–—…€£§°©®™·¿¡ªº№\u00a0"
"""Signs that texts have outside of words; an apostrophe and a dot may be within one."""

MOST_WORDS, LONGEST_WORD = 3, 12

ENOUGH = 0.95
"""The share of the letters that have to be those of one language: texts name foreigners, too."""

_WORD = re.compile(r"[A-Za-z]*[^\x00-\x7f](?:[A-Za-z]|[^\x00-\x7f])*")
"""Matches what stands between ASCII characters other than letters, if it is not ASCII itself."""

_RUN = re.compile(r"[^\x00-\x7f]{3}")


@dataclass(frozen=True)
class Fit:
    """An encoding that bytes may be in, and the text that they are with it. `odd` is the share of
    characters beyond ASCII that are rare in such texts; `known` is the number of words that
    a person gave and that are there."""

    encoding: str
    text: str
    odd: float
    known: int

    def meaning(self, sample: bytes) -> str:
        """Return what the encoding is for, and the first words beyond ASCII of bytes in it."""
        words = dict.fromkeys(_WORD.findall(decoded(sample, self.encoding) or ""))
        listed = ", ".join(word[:LONGEST_WORD] for word in [*words][:MOST_WORDS])
        return f"{ENCODINGS[self.encoding]}{listed and ': '}{listed}"


def is_utf_8(sample: bytes) -> bool:
    """Return whether the bytes, which may break off, are UTF-8."""
    return decoded(sample, "utf-8") is not None


def is_mostly_utf_8(sample: bytes) -> bool:
    """Return whether most of the lines that are not ASCII are UTF-8: with another encoding they
    would be other words, so those that are not are damaged."""
    lines = [line for line in sample.split(b"\n") if not line.isascii()]
    return 2 * sum(map(is_utf_8, lines)) > len(lines)


def decoded(sample: bytes, encoding: str) -> str | None:
    """Return the text of bytes, which may break off within a character; None if they are not in
    the encoding, or make control characters with it."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeError:
        return None
    return None if re.search(r"[\0\x80-\x9f]", text) else text


def fits(sample: bytes, words: Iterable[str] = ()) -> list[Fit]:
    """Return the encodings that the whole sample may be in, one for each text that they make of it,
    the most likely ones first: those whose text has most of `words`, which a person gave, and then
    those with the fewest odd characters."""
    words = [word for word in words if len(word) > 1 and not word.isascii()]
    found: dict[str, Fit] = {}
    for encoding in ENCODINGS:
        text = decoded(sample, encoding)
        if text is not None and text not in found:
            known = sum(word in text for word in words)
            found[text] = Fit(encoding, text, oddness(text, encoding), known)
    return sorted(found.values(), key=lambda fit: (-fit.known, fit.odd))


def oddness(text: str, encoding: str) -> float:
    """Return the share of the characters beyond ASCII, and of letters next to them, that are rare
    in texts of an encoding, by any of its names."""
    encoding = codecs.lookup(encoding).name.replace("-", "_")
    encoding = WIDER.get(encoding, encoding)
    words = Counter(_WORD.findall(text))
    size = sum(len(word) * count for word, count in words.items())
    return sum(_odd(word, encoding) * count for word, count in words.items()) / max(1, size)


def _odd(word: str, encoding: str) -> int:
    """Return the number of characters of a word that are rare in texts of this encoding."""
    beyond = [sign for sign in word.strip(SIGNS) if not sign.isascii()]
    if encoding in COMMON:
        return sum(not _is_common(sign, *COMMON[encoding]) for sign in beyond)
    scripts = {name(sign, "").split(" ")[0] for sign in word if sign.isalpha()}
    of_latin = scripts == {"LATIN"} and encoding != "cp1258"
    if len(scripts) > 1 or (of_latin and _RUN.search(word)):
        return len(beyond)
    odd = sum(category(sign)[0] not in "LM" and sign not in "’·" for sign in beyond)
    pairs = pairwise(sign for sign in word if sign.isalpha())
    return odd + sum(first.islower() and second.isupper() for first, second in pairs)


def _is_common(sign: str, encoding: str, ranges: Iterable[tuple[int, int]]) -> bool:
    try:
        first = sign.encode(encoding)[0]
    except UnicodeError:
        return False
    return any(low <= first <= high for low, high in ranges)


def is_western(sample: bytes) -> bool:
    """Return whether bytes are surely in cp1252: with all encodings of `NOT_WESTERN` they have the
    same western European letters, or these are of one language, and make no language with the
    others."""
    if (text := decoded(sample, "cp1252")) is None:
        return False
    words = _WORD.findall(text)
    if any(_odd(word, "cp1252") or (len(word) > 1 and _is_foreign(word)) for word in words):
        return False
    others = {encoding: decoded(sample, encoding) for encoding in NOT_WESTERN}
    rivals = [
        _share(other, NOT_WESTERN[e]) for e, other in others.items() if other not in (None, text)
    ]
    if not rivals:
        return _share(text, ["".join(WESTERN)]) >= ENOUGH
    share = _share(text, WESTERN)
    return share >= ENOUGH and max(rivals) < share - (1 - ENOUGH)


def _is_foreign(word: str) -> bool:
    """Return whether a word has no ASCII letter: western European ones have."""
    return not re.search("[A-Za-z]", word) and word.strip(SIGNS) != ""


def _share(text: str, alphabets: Iterable[str]) -> float:
    """Return the share of the letters beyond ASCII that the best alphabet has."""
    letters = Counter(sign for sign in text if not sign.isascii() and sign not in SIGNS)
    if not letters:
        return 1.0
    counts = [
        sum(n for sign, n in letters.items() if sign in each or sign.lower() in each)
        for each in alphabets
    ]
    return max(counts) / letters.total()


TEXT_CONTENTS = ("csv", "json", "txt")

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
    return kind in TEXT_CONTENTS and not is_marked and not has_nulls(start)


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

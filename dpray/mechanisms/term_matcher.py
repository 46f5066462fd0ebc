"""A `TermMatcher` finds the terms of a public list in texts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import islice

import ahocorasick

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uaa60-\uaa7f\uf900-\ufaff\U00020000-\U0003ffff"
)
"""The letters of scripts without spaces between words, for a class of a regular expression: Thai,
Lao, Burmese, Khmer, Japanese and Chinese."""

# A word consists of letters, digits, underscores, joiners and marks. Python's \\w leaves out marks,
# with which many scripts write their vowels. Any other character but a space is a word by itself,
# and so is a letter of a script without spaces, with its marks.
_MARKS = "".join(
    sign for sign in map(chr, range(0x300, 0x10000)) if unicodedata.category(sign)[0] == "M"
)
_WORDS = re.compile(rf"[\w\u200c\u200d{_MARKS}]+|\S")
_UNSPACED_LETTER = re.compile(rf"(?!\d)[{UNSPACED}][{_MARKS}]*")

# Spellings of one word: Arabic with and without vowel marks and the stroke that makes words longer,
# other widths and forms of letters, and the i without a dot, whose capital is that of i.
_FORMS = ("<wide>", "<narrow>", "<initial>", "<medial>", "<final>", "<isolated>")
_LONGEST_FORM = 4
_EQUAL: dict[int, str | None] = {0x131: "i", 0x640: None, 0x670: None}
_EQUAL |= dict.fromkeys([*range(0x64B, 0x653), *range(0x656, 0x660)])
for _sign in map(chr, [*range(0xFB50, 0xFE00), *range(0xFE70, 0xFFEF)]):
    _plain = unicodedata.normalize("NFKC", _sign)
    if unicodedata.decomposition(_sign).startswith(_FORMS) and len(_plain) <= _LONGEST_FORM:
        _EQUAL[ord(_sign)] = _plain.translate(_EQUAL)

# Python sorts the marks on a letter in a time that grows with the square of their number: hours for
# a record of a million. No script has more than 30 (Unicode's stream-safe format).
_SHORT = 4096
_MARK, _TOO_MANY = "\u0300", re.compile("(?<=\u0300{30})\u0300+")
_AS_MARK = {  # three signs of Tibetan are two marks once they are decomposed
    sign: _MARK
    for sign in range(0x300, 0x20000)
    if unicodedata.combining(unicodedata.normalize("NFD", chr(sign))[0])
}


class TermMatcher:
    """Finds the terms of a public list in texts, whole words only.

    Spellings of one word are equal (`folded`), and any white space separates words alike. A match
    begins and ends at the edges of words. In a script without spaces every letter is a word, so a
    match may begin at any. The first match wins, of matches with the same beginning the longest,
    and matches do not overlap. A term's id is its position in `terms`; of terms that are equal
    after folding, the first counts. A matcher pickles as its list of terms.

    Claim: what is found in a text depends on that text and the list only, in every script, and any
    text is searched. So a record moves at most S counts of `first_terms`, each by 1.
    Proof: docs/privacy.md, section 4.1.

    The automaton (Aho and Corasick 1975) runs over texts with every word wrapped in spaces, so that
    a hit can only begin and end at the edge of a word.

    >>> matcher = TermMatcher(["stock", "stock market", "market"])
    >>> list(matcher.matches("The Stock Market: a market for stocks."))
    [1, 2]
    >>> list(TermMatcher(["天气", "今天"]).matches("今天天气好"))
    [1, 0]
    """

    def __init__(self, terms: Sequence[str]) -> None:
        self.terms = tuple(terms)
        self._automaton = ahocorasick.Automaton()
        for term_id, term in enumerate(self.terms):
            words = wrapped_words(term)
            if words and words not in self._automaton:
                self._automaton.add_word(words, (len(words), term_id))
        self._automaton.make_automaton()

    def __reduce__(self) -> tuple[type[TermMatcher], tuple[tuple[str, ...]]]:
        return type(self), (self.terms,)

    def matches(self, text: str) -> Iterator[int]:
        """Yield the ids of the terms in the text, in order of appearance, with repeats."""
        # The automaton yields hits by their end: sort them by their start, long ones first.
        found = self._automaton.iter(wrapped_words(text)) if len(self._automaton) else ()
        free_from = -1
        for start, minus_length, term_id in sorted((e - n, -n, term) for e, (n, term) in found):
            if start >= free_from:
                yield term_id
                free_from = start - minus_length

    def first_terms(self, text: str, number: int) -> list[int]:
        """Return the ids of the first `number` (S) distinct terms, in order of appearance."""
        return list(islice(dict.fromkeys(self.matches(text)), number))


def wrapped_words(text: str) -> str:
    """Return the text's words, folded, each between two spaces of its own."""
    words = _WORDS.findall(spaced(folded(text)))
    return f" {'  '.join(words)} " if words else ""


def folded(text: str) -> str:
    """Return the text in one spelling: without case, in one Unicode form (NFC), without the marks
    of Arabic vowels, with letters in one width and form, and without the dot that makes a Turkish i
    another letter than its capital."""
    if text.isascii():
        return text.casefold()
    plain = _stream_safe(text.translate(_EQUAL).casefold())
    return unicodedata.normalize("NFC", plain).replace("i\u0307", "i")


def count_words(text: str) -> int:
    """Return the number of words between spaces, and of letters of scripts without spaces."""
    return len(spaced(text).split())


def spaced(text: str) -> str:
    """Return the text with spaces around each letter of a script without spaces."""
    return text if text.isascii() else _UNSPACED_LETTER.sub(r" \g<0> ", text)


def _stream_safe(text: str) -> str:
    """Return the text, a long one with no more than 30 marks after each other."""
    if text.isascii() or len(text) <= _SHORT:
        return text
    ends, parts = 0, []
    for run in _TOO_MANY.finditer(text.translate(_AS_MARK)):
        parts.append(text[ends : run.start()])
        ends = run.end()
    return "".join([*parts, text[ends:]])

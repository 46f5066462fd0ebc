"""A `TermMatcher` finds the terms of a public list in texts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import islice

import ahocorasick

# A word consists of letters, digits, underscores, joiners and marks. Python's \\w leaves out marks,
# with which many scripts write their vowels. Any other character but a space is a word by itself.
_MARKS = "".join(
    sign for sign in map(chr, range(0x300, 0x10000)) if unicodedata.category(sign)[0] == "M"
)
_WORDS = re.compile(rf"[\w\u200c\u200d{_MARKS}]+|\S")

# Python sorts the marks on a letter in a time that grows with the square of their number: hours for
# a record of a million. No script has more than 30 (Unicode's stream-safe format).
_SHORT = 4096
_MARK, _TOO_MANY = "\u0300", re.compile("(?<=\u0300{30})\u0300+")
_AS_MARK = {sign: _MARK for sign in range(0x300, 0x20000) if unicodedata.combining(chr(sign))}


class TermMatcher:
    """Finds the terms of a public list in texts, whole words only.

    Case is folded, canonically equal Unicode is equal, and any white space separates words alike. A
    match begins and ends at the edges of words. The first match wins, of matches with the same
    beginning the longest, and matches do not overlap. A term's id is its position in `terms`; of
    terms that are equal after folding, the first counts. A matcher pickles as its list of terms.

    The automaton (Aho and Corasick 1975) runs over texts with every word wrapped in spaces, so that
    a hit can only begin and end at the edge of a word.

    >>> matcher = TermMatcher(["stock", "stock market", "market"])
    >>> list(matcher.matches("The Stock Market: a market for stocks."))
    [1, 2]
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
    """Return the text's words, case-folded, each between two spaces of its own."""
    words = _WORDS.findall(unicodedata.normalize("NFC", _stream_safe(text.casefold())))
    return f" {'  '.join(words)} " if words else ""


def _stream_safe(text: str) -> str:
    """Return the text, a long one with no more than 30 marks after each other."""
    if text.isascii() or len(text) <= _SHORT:
        return text
    ends, parts = 0, []
    for run in _TOO_MANY.finditer(text.translate(_AS_MARK)):
        parts.append(text[ends : run.start()])
        ends = run.end()
    return "".join([*parts, text[ends:]])

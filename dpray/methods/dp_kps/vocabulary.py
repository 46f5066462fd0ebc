"""The private vocabulary is the terms of a public list that the records use (Nagesh et al. 2025,
B.1).

Shape legend: V terms of the public list, N terms of the private vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import ahocorasick
import numpy as np

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteLaplace
from dpray.mechanisms.discrete_noise import Counts, checked_scale, discrete_laplace

# A word is letters, digits, underscores, joiners, and marks, which Python's \\w leaves out and many
# scripts write their vowels with. Any other sign that is no space is a word by itself.
_MARKS = "".join(
    sign for sign in map(chr, range(0x300, 0x10000)) if unicodedata.category(sign)[0] == "M"
)
_WORDS = re.compile(rf"[\w\u200c\u200d{_MARKS}]+|\S")


class TermMatcher:
    """Finds the terms of a public list in texts, whole words only.

    Case is folded, canonically equal Unicode is equal, and any white space between two words is as
    good as any other. A match begins and ends where a word does; of the matches that begin first
    the longest wins, and matches do not overlap. A term's id is its position in `terms`; of terms
    that are equal after folding the first one counts. It pickles as its list of terms.

    The automaton (Aho and Corasick 1975) runs over texts in which every word is wrapped in spaces,
    so that a hit can only begin and end at a word's edge.
    """

    def __init__(self, terms: Sequence[str]) -> None:
        self.terms = tuple(terms)
        self._automaton = ahocorasick.Automaton()
        for term_id, term in enumerate(self.terms):
            key = wrapped_words(term)
            if key and key not in self._automaton:
                self._automaton.add_word(key, (len(key), term_id))
        self._automaton.make_automaton()

    def __len__(self) -> int:
        return len(self.terms)

    def __reduce__(self) -> tuple[type[TermMatcher], tuple[tuple[str, ...]]]:
        return type(self), (self.terms,)

    def matches(self, text: str) -> Iterator[int]:
        """Yield the ids of the terms in the text, in order of appearance, with repeats."""
        # The automaton finds hits by their end; here they come by their start, long ones first.
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
    words = _WORDS.findall(unicodedata.normalize("NFC", text.casefold()))
    return f" {'  '.join(words)} " if words else ""


@dataclass(frozen=True)
class VocabularyHistogram:
    """Counts how many records hold each of the V terms of a public list, with noise on every one of
    them.

    Guarantee: add or remove one unit (at most `records_per_unit` k records). A record moves at most
    S counts, each by 1, so a unit moves no count by more than k, and all of them by at most S * k
    in L1. Discrete Laplace noise of `scale` is on all V counts, hit or not. Nothing is worse than S
    counts that move by k each, and that is S * k / scale-DP (Nagesh et al., B.1). What `top` makes
    of the noisy counts is free. `size`, S, k and `scale` are public numbers.
    Proof: docs/privacy.md, sections 4.1 and 6.8.

    Raises ValueError for a scale that integer noise cannot have.
    """

    size: int
    phrases_per_record: int
    scale: float
    records_per_unit: int = 1

    def __post_init__(self) -> None:
        checked_scale(self.scale)

    @property
    def dp_event(self) -> SelfComposed:
        """Return the cost of one call of `noisy`."""
        one_count = DiscreteLaplace(self.scale, self.records_per_unit)
        return SelfComposed(one_count, self.phrases_per_record)

    def count(self, terms_of_records: Iterable[Sequence[int]]) -> Counts:
        """Return the private counts of a shard of records, shape (V,); shards' counts add up.

        Only the first S distinct ids of a record count, however many it is given with.
        """
        counts_V = np.zeros(self.size, dtype=np.int64)
        for term_ids in terms_of_records:
            counts_V[list(islice(dict.fromkeys(term_ids), self.phrases_per_record))] += 1
        return counts_V

    def noisy(self, counts_V: Counts) -> Counts:
        """Return the counts of all records as they may be released."""
        if counts_V.shape != (self.size,):
            raise ValueError(f"counts have shape {counts_V.shape}, not ({self.size},)")
        return discrete_laplace(counts_V, self.scale)

    def top(self, noisy_V: Counts, number: int, rng: np.random.Generator) -> list[int]:
        """Return the ids of the `number` (N) highest noisy counts, highest first, ties broken at
        random; all V if there are no more."""
        order = np.lexsort((rng.random(self.size), -noisy_V))
        return [int(term_id) for term_id in order[:number]]

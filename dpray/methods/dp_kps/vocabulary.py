"""The public list of terms, and the private vocabulary: those that the records use (Nagesh et al.
2025, B.1).

Shape legend: V terms of the public list, N terms of the private vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteLaplace
from dpray.mechanisms.discrete_noise import Counts, checked_scale, discrete_laplace
from dpray.types import InputError


@dataclass(frozen=True)
class VocabularyHistogram:
    """Counts how many records hold each of the V terms of a public list, with noise on every one of
    them.

    Guarantee: add or remove one unit (at most `records_per_unit` k records). A record moves at most
    S counts, each by 1, so a unit moves no count by more than k, and all of them by at most S * k
    in L1. Discrete Laplace noise of `scale` is on all V counts, hit or not. Nothing is worse than S
    counts that move by k each, and that is S * k / scale-DP (Nagesh et al., B.1).
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
        """Return the cost of one call."""
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

    def __call__(self, counts_V: Counts) -> Counts:
        """Return the counts of all records as they may be released."""
        if counts_V.shape != (self.size,):
            raise ValueError(f"counts have shape {counts_V.shape}, not ({self.size},)")
        return discrete_laplace(counts_V, self.scale)

    def top(self, noisy_V: Counts, number: int, rng: np.random.Generator) -> list[int]:
        """Return the ids of the `number` (N) highest noisy counts, highest first, ties broken at
        random; all V if there are no more."""
        order = np.lexsort((rng.random(self.size), -noisy_V))
        return [int(term_id) for term_id in order[:number]]


def read_vocabulary(path: str | Path, stop_words: str = "keep") -> list[str]:
    """Return the terms of a UTF-8 file, one per line, without what follows a tab, blank lines, and
    terms that equal an earlier one but for case. `stop_words` "english" leaves out scikit-learn's
    list of 318 English function words. Raises InputError that names the key and the line."""
    return list(read_counts(path, stop_words))


def read_counts(path: str | Path, stop_words: str = "keep") -> dict[str, int | None]:
    """Return the terms of `read_vocabulary`, each with its public count or None."""
    terms: dict[str, tuple[str, int | None]] = {}
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise InputError(
                        f"method.vocabulary: {path}, line {number}: the bytes are not valid UTF-8"
                    ) from None
                first, _, rest = text.partition("\t")
                term, count = " ".join(first.split()), rest.strip()
                if term:
                    folded = unicodedata.normalize("NFC", term.casefold())
                    terms.setdefault(folded, (term, int(count) if count.isdecimal() else None))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InputError(f"method.vocabulary: {path}: {reason}") from None
    if stop_words == "english":
        # Imported late: it takes a second.
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        for word in ENGLISH_STOP_WORDS:
            terms.pop(word, None)
    if not terms:
        raise InputError(f"method.vocabulary: {path}: there is no term in the file")
    return dict(terms.values())

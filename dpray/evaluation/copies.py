"""Near-duplicates: how much of a private record stands in a synthetic one?

A text may hold parts of a private one by chance, as real texts hold parts of one another: each
figure stands beside that of real records that were held out. Whether a mechanism keeps its promise
is not seen here; a synthetic text far more like a private one than any held-out text is a reason to
look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from dpray.evaluation.neighbours import nearest_cosine
from dpray.evaluation.slices import Spread

NGRAM = 5
"""Words of the n-grams whose overlap is counted."""

_DRAW_SEED = 0


def compare_copies(
    synthetic: Sequence[str],
    private: Sequence[str],
    held_out: Sequence[str],
    vectors: Sequence[np.ndarray],
    spread: Spread = map,
) -> dict[str, Any]:
    """The figures of `_figures` for synthetic texts and, as the yardstick, for held-out real ones,
    equally many of each, drawn once; both against all `private` texts. `vectors` are the three
    sets' embeddings, in this order; `spread` shares the search among them out."""
    size = min(len(synthetic), len(held_out))
    made_ND, private_MD, held_ND = vectors
    drawn = [
        np.random.default_rng(_DRAW_SEED).choice(len(texts), size, replace=False)
        for texts in (synthetic, held_out)
    ]
    # One search for both sides, as the private vectors travel with it.
    queries = np.vstack([made_ND[drawn[0]], held_ND[drawn[1]]])
    cosines = np.split(nearest_cosine(queries, private_MD, spread), 2)
    sides = {
        name: _figures([texts[i] for i in rows], private, nearest)
        for name, texts, rows, nearest in zip(
            ("synthetic", "held_out"), (synthetic, held_out), drawn, cosines, strict=True
        )
    }
    return {"private_records": len(private), "records_a_side": size, "ngram": NGRAM, **sides}


def shared_words(
    queries: Sequence[str], references: Sequence[str], ngram: int = NGRAM
) -> tuple[np.ndarray, np.ndarray]:
    """For each query, its longest run of words that some reference holds too (longest common
    substring in words, as Lee et al. 2022 look for in training data), and the share of its n-grams
    that some reference holds (BLEU's n-gram precision, Papineni et al. 2002, without clipping; NaN
    for a text of fewer words). Words are what white space parts, in lower case.

    Exact: runs of n words are numbered from those of n - 1 and kept only where both sides have
    them, so the work falls off quickly with n.
    """
    words, text_of, left = _flatten([*queries, *references])
    numbers = int(words.max(initial=0)) + 1
    longest = np.zeros(len(queries), dtype=np.int64)
    overlap = np.zeros(len(queries))
    at, run = np.arange(len(words)), np.zeros(len(words), dtype=np.int64)
    n = 0
    while len(at):
        n += 1
        fits = left[at] >= n
        at, run = at[fits], run[fits]
        _, run = np.unique(run * numbers + words[at + n - 1], return_inverse=True)
        asked = text_of[at] < len(queries)
        known = np.zeros(len(run), dtype=bool)
        wanted = np.zeros(len(run), dtype=bool)
        known[run[~asked]] = True
        wanted[run[asked]] = True
        kept = (known & wanted)[run]
        at, run, asked = at[kept], run[kept], asked[kept]
        longest[text_of[at[asked]]] = n
        if n == ngram:
            overlap = np.bincount(text_of[at[asked]], minlength=len(queries)).astype(float)
    lengths = np.bincount(text_of, minlength=len(queries) + len(references))[: len(queries)]
    grams = np.where(lengths >= ngram, lengths - ngram + 1, np.nan)
    return longest, overlap / grams


def _flatten(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all texts' words in a row: the word's number, its text's, and how many words of the text
    are left from it on."""
    split = [text.lower().split() for text in texts]
    lengths = np.array([len(words) for words in split])
    number: dict[str, int] = {}
    words = np.fromiter(
        (number.setdefault(word, len(number)) for word in chain.from_iterable(split)),
        dtype=np.int64,
        count=int(lengths.sum()),
    )
    text_of = np.repeat(np.arange(len(texts)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))
    return words, text_of, left


def _figures(
    queries: Sequence[str], references: Sequence[str], cosines: np.ndarray
) -> dict[str, Any]:
    """Share of exact copies; longest shared run in words, n-gram overlap and nearest cosine."""
    longest, overlap = shared_words(queries, references)
    private = {text.strip() for text in references}
    return {
        "exact_share": sum(text.strip() in private for text in queries) / len(queries),
        "longest_shared_words": _summary(longest),
        "ngram_overlap": _summary(overlap[~np.isnan(overlap)]),
        "nearest_cosine": _summary(cosines),
    }


def _summary(values: np.ndarray) -> Mapping[str, float | None]:
    """Mean, 95 % quantile and maximum; None where there is no value."""
    if not len(values):
        return {"mean": None, "quantile_95": None, "max": None}
    return {
        "mean": float(values.mean()),
        "quantile_95": float(np.quantile(values, 0.95)),
        "max": float(values.max()),
    }

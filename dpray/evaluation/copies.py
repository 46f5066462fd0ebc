"""Near-duplicates are synthetic texts that share much with a private record.

Texts share parts by chance, too. So each figure is computed for synthetic texts and for held-out
real texts. The figures do not show whether a mechanism keeps its promise. A synthetic text that is
far more like a private one than any held-out text is should be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

NGRAM = 5
"""Words in an n-gram."""

BLOCK = 256
"""The number of queries that are compared with all references at once."""

_DRAW_SEED = 0


def compare_copies(
    synthetic: Sequence[str],
    private: Sequence[str],
    held_out: Sequence[str],
    vectors: Sequence[np.ndarray],
) -> dict[str, object]:
    """Compare synthetic texts and, as a reference, held-out real texts with all `private` texts
    (`_figures`). Equally many of both are drawn once. `vectors` are the embeddings of the three
    sets, in the order of the arguments."""
    size = min(len(synthetic), len(held_out))
    made_ND, private_MD, held_ND = vectors
    made, held = (
        np.random.default_rng(_DRAW_SEED).choice(len(texts), size, replace=False)
        for texts in (synthetic, held_out)
    )
    of_made, of_held = (
        nearest_cosine(queries, private_MD) for queries in (made_ND[made], held_ND[held])
    )
    return {
        "private_records": len(private),
        "records_a_side": size,
        "ngram": NGRAM,
        "synthetic": _figures([synthetic[i] for i in made], private, of_made),
        "held_out": _figures([held_out[i] for i in held], private, of_held),
    }


def nearest_cosine(queries_ND: np.ndarray, references_MD: np.ndarray) -> np.ndarray:
    """Return each query's largest cosine similarity with a reference, shape (N,). Time grows with
    the number of pairs, memory with the number of records."""
    queries, references = _unit(queries_ND), _unit(references_MD)
    blocks = (queries[start : start + BLOCK] for start in range(0, len(queries), BLOCK))
    # FAISS is slower on CPUs.
    nearest = [(block @ references.T).max(axis=1) for block in blocks]
    largest: np.ndarray = np.concatenate(nearest).clip(-1.0, 1.0)
    return largest


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: np.ndarray = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    return unit


def shared_words(
    queries: Sequence[str], references: Sequence[str], ngram: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return two numbers for each query: the length of its longest run of words that is also in a
    reference (the longest common substring in words, as in Lee et al. 2022), and the share of its
    n-grams that are also in a reference (BLEU's n-gram precision without clipping, Papineni et al.
    2002; NaN for a text of fewer words). White space separates words; case is ignored.

    The answer is exact. Runs of n words are extended from runs of n - 1 words and kept only if both
    sides have them, so few are left for larger n.
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
        known, wanted = np.zeros((2, len(run)), dtype=bool)
        known[run[~asked]], wanted[run[asked]] = True, True
        kept = (known & wanted)[run]
        at, run, asked = at[kept], run[kept], asked[kept]
        longest[text_of[at[asked]]] = n
        if n == ngram:
            overlap = np.bincount(text_of[at[asked]], minlength=len(queries)).astype(float)
    lengths = np.bincount(text_of, minlength=len(queries) + len(references))[: len(queries)]
    grams = np.where(lengths >= ngram, lengths - ngram + 1, np.nan)
    return longest, overlap / grams


def _flatten(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate the words of all texts. Return for each word its number in the vocabulary, the
    number of its text, and the number of words from it to the end of the text."""
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
) -> dict[str, object]:
    """Return the share of exact copies, and summaries of the longest shared run in words, the
    n-gram overlap and the nearest cosine."""
    longest, overlap = shared_words(queries, references, NGRAM)
    private = {text.strip() for text in references}
    return {
        "exact_share": sum(text.strip() in private for text in queries) / len(queries),
        "longest_shared_words": _summary(longest),
        "ngram_overlap": _summary(overlap[~np.isnan(overlap)]),
        "nearest_cosine": _summary(cosines),
    }


def _summary(values: np.ndarray) -> Mapping[str, float | None]:
    """Return mean, 95 % quantile and maximum; each is null without values."""
    if not len(values):
        return {"mean": None, "quantile_95": None, "max": None}
    figures = values.mean(), np.quantile(values, 0.95), values.max()
    return dict(zip(("mean", "quantile_95", "max"), map(float, figures), strict=True))

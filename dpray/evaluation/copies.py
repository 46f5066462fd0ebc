"""Near-duplicates are synthetic texts that share much with a private record.

Texts share parts by chance, too. So each figure is computed for synthetic texts and for held-out
real texts. The figures do not show whether a mechanism keeps its promise. A synthetic text that is
far more like a private one than any held-out text is should be looked at.

`compare_replays` needs no model and works in any language: it looks for strings of one private unit
only, such as a name or a number, that are in the synthetic texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from dpray.mechanisms.term_matcher import UNSPACED, spaced
from dpray.types import ReadOnlyJson

NGRAM = 5
"""Words in an n-gram."""

QUERIES_AT_ONCE = 256
"""The number of queries that are compared with all references at once."""

RUN_OF_SIGNS = 10
"""Characters in a run of a text without spaces, in place of `NGRAM` words."""

LEAST_DIGITS, LEAST_LETTERS = 4, 5
"""Numbers with fewer digits, and words and identifiers with fewer letters, are left out."""

STRING_KINDS = {
    "runs": f"runs of {NGRAM} words ({RUN_OF_SIGNS} characters without spaces)",
    "numbers": f"numbers of {LEAST_DIGITS} digits or more",
    "names": "two words in a row with capitals",
    "identifiers": "words with digits, signs @ or /",
    "words": "single words",
}

MOST_FOUND = 200
"""So many strings are listed, those first that no held-out record has."""

_UNSPACED = re.compile(f"[{UNSPACED}]")

_NUMBER = re.compile(r"\d(?:[\d.,:/ -]*\d)?")

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
    starts = range(0, len(queries), QUERIES_AT_ONCE)
    # FAISS is slower on CPUs.
    nearest = [(queries[at : at + QUERIES_AT_ONCE] @ references.T).max(axis=1) for at in starts]
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
    2002; NaN for a text of fewer words). White space separates words, and a letter of a script
    without spaces is a word; case is ignored.

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
    split = [spaced(text.lower()).split() for text in texts]
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
    """Return the share of exact copies, and summaries of the other figures (`_spread`)."""
    longest, overlap = shared_words(queries, references, NGRAM)
    private = {text.strip() for text in references}
    return {
        "exact_share": sum(text.strip() in private for text in queries) / len(queries),
        "longest_shared_words": _spread(longest),
        "ngram_overlap": _spread(overlap[~np.isnan(overlap)]),
        "nearest_cosine": _spread(cosines),
    }


def _spread(values: np.ndarray) -> Mapping[str, float | None]:
    """Return mean, 95 % quantile and maximum; each is null without values."""
    if not len(values):
        return {"mean": None, "quantile_95": None, "max": None}
    figures = values.mean(), np.quantile(values, 0.95), values.max()
    return dict(zip(("mean", "quantile_95", "max"), map(float, figures), strict=True))


# Strings of one unit

String = tuple[str, str]
"""A kind of `STRING_KINDS`, and the string in one spelling."""


def compare_replays(
    synthetic: Sequence[str],
    private: Sequence[str],
    held_out: Sequence[str],
    units: Sequence[Hashable] | None = None,
) -> dict[str, object]:
    """Count, for each kind of string, those in synthetic texts that exactly one private unit has,
    next to the number that held-out real records lead to expect: these share such strings by
    chance. `units` are those of the `private` texts; without them each text is one.

    Memory grows with the synthetic and the held-out texts, and not with the private ones. The
    strings themselves are in `found`: the result is for the owner of the data.
    """
    made, held = (set(chain.from_iterable(map(strings_of, side))) for side in (synthetic, held_out))
    owners: dict[String, Hashable | None] = {}
    for text, unit in zip(private, units or range(len(private)), strict=True):
        for each in strings_of(text):
            if each in made or each in held:
                # None: the string has two units or more.
                owners[each] = unit if owners.setdefault(each, unit) == unit else None
    rare = {each for each, unit in owners.items() if unit is not None}
    found = sorted(rare & made, key=lambda each: (each in held, each[0] == "words", -len(each[1])))
    return {
        "synthetic_records": len(synthetic),
        "held_out_records": len(held_out),
        "kinds": {kind: _replayed(kind, rare, made, held) for kind in STRING_KINDS},
        "found": [
            {"kind": kind, "string": string, "in_held_out": (kind, string) in held}
            for kind, string in found[:MOST_FOUND]
        ],
    }


def _replayed(
    kind: str, rare: set[String], made: set[String], held: set[String]
) -> dict[str, float | int | None]:
    """Return the strings of a kind in the synthetic texts, how many are of one private unit only,
    how many were to be expected, and the ratio of both, which is null if none were."""
    of_kind = [{each for each in side if each[0] == kind} for side in (made, held)]
    copied, by_chance = (len(side & rare) for side in of_kind)
    expected = by_chance / max(1, len(of_kind[1])) * len(of_kind[0])
    ratio = copied / expected if expected else None
    return {"strings": len(of_kind[0]), "found": copied, "expected": expected, "ratio": ratio}


def _without_edges(word: str) -> str:
    """Return the word without the signs around it, in time that goes with its length."""
    kept = [place for place, sign in enumerate(word) if sign.isalnum() or sign in "_@/"]
    return word[kept[0] : kept[-1] + 1] if kept else ""


def strings_of(text: str) -> Iterator[String]:
    """Yield the strings of a text that may tell a person: each kind of `STRING_KINDS`."""
    words = [word for word in map(_without_edges, text.split()) if word]
    for a, b in pairwise(words):
        if _is_name(a) and _is_name(b):
            yield "names", f"{a} {b}".casefold()
    for match in _NUMBER.findall(text):
        if len(digits := re.sub(r"\D", "", match)) >= LEAST_DIGITS:
            yield "numbers", digits
    for word in words:
        if len(word) >= LEAST_LETTERS and not _UNSPACED.search(word):
            yield from _of_word(word.casefold())
    parts, size, joint = [word.casefold() for word in words], NGRAM, " "
    letters = "".join(parts)
    if 2 * len(_UNSPACED.findall(letters)) > len(letters):
        parts, size, joint = list(letters), RUN_OF_SIGNS, ""
    for start in range(len(parts) - size + 1):
        yield "runs", joint.join(parts[start : start + size])


def _of_word(word: str) -> Iterator[String]:
    has_digits, has_letters = any(map(str.isdigit, word)), any(map(str.isalpha, word))
    if (has_digits and has_letters) or "@" in word or "/" in word:
        yield "identifiers", word
    elif not has_digits:
        yield "words", word


def _is_name(word: str) -> bool:
    return len(word) > 1 and word[0].isupper() and word[1:] != word[1:].upper()


def replays_in_words(found: ReadOnlyJson) -> str:
    """Return a sentence about kinds that occur more often than expected, without a string."""
    more: Counter[str] = Counter()
    for kind, each in found["kinds"].items():
        expected = each["expected"]
        if each["found"] > max(1.5 * expected, expected + 3 * expected**0.5 + 2):
            more[kind] = each["found"]
    if not more:
        return ""
    listed = ", ".join(f"{count} {kind}" for kind, count in more.most_common())
    return f"they repeat more strings of one private record than chance does ({listed})"

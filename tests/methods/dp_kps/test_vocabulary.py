"""A public list of terms, the terms in texts, and the histogram of them."""

from __future__ import annotations

import pickle
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteLaplace
from dpray.mechanisms.term_matcher import TermMatcher, count_words
from dpray.methods.dp_kps.mechanisms import VocabularyHistogram
from dpray.methods.dp_kps.plan import english_stop_words, read_vocabulary
from dpray.types import InputError


def found(terms: list[str], text: str, number: int = 100) -> list[str]:
    matcher = TermMatcher(terms)
    return [matcher.terms[i] for i in matcher.first_terms(text, number)]


@pytest.mark.parametrize(
    ("terms", "text", "expected"),
    [
        (["cat", "art"], "Cartoon cats, a CAT; art.", ["cat", "art"]),
        (
            ["new", "new york", "york"],
            "New York, a new  york\nand new yorkers",
            ["new york", "new"],
        ),
        (["beta blocker"], "beta-blocker and Beta\tblocker", ["beta blocker"]),
        (["beta-blocker"], "beta-blockers; Beta-Blocker!", ["beta-blocker"]),
        (["a b c d", "b c", "c d"], "a b c e, c d", ["b c", "c d"]),
        (["heart failure", "failure rate"], "heart failure rate", ["heart failure"]),
        (["a", "a a"], "a a a", ["a a", "a"]),
        (["STRASSE"], "die Straße", ["STRASSE"]),
        (["cafe\u0301"], "CAF\u00c9 caf", ["cafe\u0301"]),
        (["cafe"], "cafe\u0301", []),
        (["हिन्दी"], "हिन्दी में", ["हिन्दी"]),
        (["हिन्द"], "हिन्दी में", []),
        (["c++", "c"], "C and c++ and C++17", ["c", "c++"]),
        (["état"], "L'état, c'est", ["état"]),
        ([], "nothing", []),
        (["  ", "x"], "   x ", ["x"]),
        (["x"], "", []),
        (["天气", "今天"], "今天天气好。明天天气", ["今天", "天气"]),
        (["北京", "北京大学", "大学"], "北京大学", ["北京大学"]),
        (["手机", "iphone", "phone"], "iPhone手机", ["iphone", "手机"]),
        (["月", "3"], "3月", ["3", "月"]),
        (["ภาษาไทย", "ไท"], "ผมพูดภาษาไทยได้", ["ภาษาไทย"]),
        (["ก"], "กิน", []),
        (["๑"], "๑๒", []),
        (["كتاب"], "كِتَابٌ وكـــتاب", ["كتاب"]),
        (["آمينَ"], "ا\u0653مين", ["آمينَ"]),
        (["العربية"], "ﺍﻟﻌﺮﺑﻴﺔ", ["العربية"]),
        (["stock", "ガス"], "ＳＴＯＣＫ、ｶﾞｽ", ["stock", "ガス"]),
        (["istanbul", "ılık"], "İSTANBUL'da ILIK", ["istanbul", "ılık"]),
        (["istanbul"], "i\u0307stanbul", ["istanbul"]),
        (["groß"], "GROSS und GROẞ", ["groß"]),
    ],
)
def test_whole_words_and_the_longest_term(terms: list[str], text: str, expected: list[str]) -> None:
    assert found(terms, text) == expected


def test_the_first_distinct_terms_in_order_of_appearance() -> None:
    assert found(["a", "b", "c", "d"], "c a c A b d", 3) == ["c", "a", "b"]


def test_of_equal_terms_the_first_counts() -> None:
    assert TermMatcher(["b", "Ab", "aB"]).first_terms("AB", 5) == [1]


word = st.sampled_from(["a", "b", "c", "ab", "bc"])
phrase = st.lists(word, min_size=1, max_size=4).map(" ".join)


def by_regular_expression(terms: list[str], text: str) -> list[str]:
    longest_first = sorted(set(terms), key=len, reverse=True)
    either = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.findall(rf"(?<!\w)(?:{either})(?!\w)", text)


@given(terms=st.lists(phrase, max_size=8), words=st.lists(word | st.just(","), max_size=30))
def test_the_same_as_a_regular_expression(terms: list[str], words: list[str]) -> None:
    text = " ".join(words)
    found_ids = TermMatcher(terms).matches(text)
    assert [terms[i] for i in found_ids] == by_regular_expression(terms, text)


def test_the_same_in_long_texts() -> None:
    """More hits than are sorted at once, and long terms that reach over where they are cut."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        drawn = rng.choice(["a", "b"], size=(12, 6))
        terms = [" ".join(row[: rng.integers(1, 7)]) for row in drawn]
        text = " ".join(rng.choice(["a", "b", "c"], size=2000, p=[0.48, 0.48, 0.04]))
        found_ids = TermMatcher(terms).matches(text)
        assert [terms[i] for i in found_ids] == by_regular_expression(terms, text)


def test_a_long_text_is_searched_no_further_than_asked() -> None:
    text = "a b " * 50_000
    matcher = TermMatcher(["a", "b", "c"])
    assert matcher.first_terms(text, 2) == [0, 1]
    assert sum(1 for _ in matcher.matches(text)) == 100_000


@settings(max_examples=12)
@given(
    part=st.text(st.characters(categories=["Mn", "Cs", "Cc", "Cf", "Lo", "Zs"]), max_size=3),
    sign=st.sampled_from(
        ["x", "x ", "\u0300\u0316", "\U0001d165\u0316", "\u0f73", "\u200b", "\ud800", "ﷺ"]
    ),
    number=st.sampled_from([0, 7, 200_000]),
)
def test_any_text_is_searched_in_a_time_that_grows_with_its_length(
    part: str, sign: str, number: int
) -> None:
    """Sorting the marks of one letter took hours. A record without terms adds 0."""
    matcher = TermMatcher(["stock market", "stock", "e\u0301"])
    text = f"{part} {sign * number} "
    assert matcher.first_terms(f"{text}\u00e9 Stock\u3000MARKET", 10) == [2, 0]
    none = matcher.first_terms(text, 10)
    assert VocabularyHistogram(3, 10, 1.0).count([none]).tolist() == [0, 0, 0]


def test_pickles_as_its_terms() -> None:
    matcher = TermMatcher(["one", "two words"])
    again = pickle.loads(pickle.dumps(matcher))
    assert again.terms == matcher.terms and again.first_terms("two  words one", 9) == [1, 0]
    assert len(pickle.dumps(matcher)) < 200


ids = st.lists(st.integers(0, 11), max_size=9)


@given(records=st.lists(ids, max_size=6), new=st.lists(ids, min_size=1, max_size=3))
def test_a_unit_moves_the_counts_by_at_most_its_sensitivity(
    records: list[list[int]], new: list[list[int]]
) -> None:
    histogram = VocabularyHistogram(12, 4, 1.0, records_per_unit=len(new))
    moved = histogram.count([*records, *new]) - histogram.count(records)
    one_count = histogram.dp_event.event
    assert isinstance(one_count, DiscreteLaplace)
    assert abs(moved).max() <= one_count.sensitivity == len(new)
    assert abs(moved).sum() <= one_count.sensitivity * histogram.dp_event.count == 4 * len(new)


SCRIPTS = st.text(
    st.sampled_from("今天气好ab ประเทศ\u0e34ءكتابـ\u064eｱﾞａßıİ\u0307\u0301\ud800 。,"), max_size=40
)


@given(
    terms=st.lists(SCRIPTS, min_size=1, max_size=8),
    texts=st.lists(SCRIPTS, max_size=5),
    new=SCRIPTS,
)
def test_a_record_of_any_script_moves_at_most_s_counts_by_one(
    terms: list[str], texts: list[str], new: str
) -> None:
    matcher, histogram = TermMatcher(terms), VocabularyHistogram(len(terms), 2, 1.0)

    def counts(records: list[str]) -> np.ndarray:
        return histogram.count(matcher.first_terms(text, 2) for text in records)

    moved = counts([*texts, new]) - counts(texts)
    assert moved.min() >= 0 and moved.max() <= 1 and moved.sum() <= 2
    # What a record adds does not depend on the other records, nor on its Unicode form.
    assert (moved == counts([new])).all()
    assert (moved == counts([unicodedata.normalize("NFD", new)])).all()
    assert (moved == counts([unicodedata.normalize("NFC", new)])).all()


def test_words_of_scripts_without_spaces_are_letters() -> None:
    assert count_words("今天天气好 ok, ja") == 7 and count_words("Ein Haus,  groß") == 3


def test_the_worst_unit_is_one_whose_records_hold_the_same_terms() -> None:
    """A term that a record repeats counts once."""
    histogram = VocabularyHistogram(6, 4, 1.0, records_per_unit=2)
    counts = histogram.count([[1, 2, 1, 3, 4, 5], [4, 3, 2, 1, 0]])
    assert counts.tolist() == [0, 2, 2, 2, 2, 0]
    assert histogram.count([]).tolist() == [0] * 6


def test_its_event_is_that_of_its_noise() -> None:
    histogram = VocabularyHistogram(5, 10, 60.0, records_per_unit=3)
    assert histogram.dp_event == SelfComposed(DiscreteLaplace(scale=60.0, sensitivity=3), 10)
    assert histogram.dp_event.pure_epsilon() == pytest.approx(0.5)


def test_every_term_gets_noise() -> None:
    """Noise of scale 1000 is 0 once in 2,000 draws: 200 zeros of 2,000 never happen."""
    histogram = VocabularyHistogram(2000, 10, 1000.0)
    noisy = histogram(histogram.count([]))
    assert noisy.dtype == np.int64 and (noisy == 0).sum() < 200


def test_counts_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        VocabularyHistogram(5, 1, 1.0)(np.zeros(4, dtype=np.int64))


def test_the_highest_first_and_all_where_there_are_no_more() -> None:
    histogram = VocabularyHistogram(4, 1, 1.0)
    counts, rng = np.array([-3, 9, 0, 5]), np.random.default_rng(1)
    assert histogram.top(counts, 2, rng) == [1, 3]
    assert histogram.top(counts, 99, rng) == [1, 3, 2, 0]


def test_ties_are_broken_at_random() -> None:
    histogram, rng = VocabularyHistogram(10, 1, 1.0), np.random.default_rng(2)
    firsts = [histogram.top(np.zeros(10, dtype=np.int64), 1, rng)[0] for _ in range(500)]
    assert np.bincount(firsts, minlength=10).min() > 20


@pytest.mark.parametrize(
    ("data", "terms"),
    [
        ("heart failure\r\n\n  \nÉtoile\naspirin".encode(), ["heart failure", "Étoile", "aspirin"]),
        (b"\xef\xbb\xbfthe\t121431\nnew  york\t12\textra\n", ["the", "new york"]),
        (
            "Straße\nSTRASSE\nb\ne\u0301t\u00e9\n\u00c9T\u00c9\nB".encode(),
            ["Straße", "b", "e\u0301t\u00e9"],
        ),
        (b"The\nof mice\nof\nmouse\n", ["The", "of mice", "of", "mouse"]),
        (
            b"x\t" + b"9" * 5000 + "\n\x00\t1\n​\ne\u0301\t-1\n".encode() + b"y" * 10**6,
            ["x", "\x00", "​", "e\u0301", "y" * 10**6],
        ),
    ],
    ids=["one a line, in order", "the first column", "equal but for case", "stop words are kept",
         "odd terms and counts"],
)  # fmt: skip
def test_a_file_of_terms(tmp_path: Path, data: bytes, terms: list[str]) -> None:
    path = tmp_path / "terms.txt"
    path.write_bytes(data)
    assert [*read_vocabulary(path)] == terms


def test_stop_words_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "terms.txt"
    path.write_bytes(b"The\nof mice\nof\nmouse\n")
    assert [*read_vocabulary(path, english_stop_words())] == ["of mice", "mouse"]


def test_stop_words_are_those_of_scikit_learn() -> None:
    assert english_stop_words() == ENGLISH_STOP_WORDS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"good\n\xff\xfesecret\n", "line 2: .*UTF-8"),
        (b"", "no term"),
        (b"\n \n", "no term"),
        (b"\tx\n", "no term"),
        (b"the\nof\n", "no term"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_of_terms(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "terms.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=rf"method\.vocabulary: .*{message}") as raised:
        read_vocabulary(path, english_stop_words())
    assert "secret" not in str(raised.value)
    with pytest.raises(InputError, match=r"method\.vocabulary"):
        read_vocabulary(tmp_path)  # a folder

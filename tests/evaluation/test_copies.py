"""Shared words against the same by brute force; copies against held-out records."""

import random
import time
from typing import Any

import numpy as np
import pytest

from dpray.evaluation.copies import (
    compare_copies,
    compare_replays,
    nearest_cosine,
    replays_in_words,
    shared_words,
    strings_of,
)


def runs(text, n):
    words = text.lower().split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def by_brute_force(query, references, ngram):
    longest = 0
    for n in range(1, len(query.split()) + 1):
        if set(runs(query, n)) & {run for text in references for run in runs(text, n)}:
            longest = n
    grams = runs(query, ngram)
    known = {run for text in references for run in runs(text, ngram)}
    return longest, np.mean([gram in known for gram in grams]) if grams else np.nan


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_shared_words_are_those_by_brute_force(ngram):
    rng = random.Random(0)

    def texts(count):
        return [" ".join(rng.choices("aBc", k=rng.randrange(12))) for _ in range(count)]

    queries, references = texts(60), texts(8)
    longest, overlap = shared_words(queries, references, ngram)

    expected = [by_brute_force(query, references, ngram) for query in queries]
    assert longest.tolist() == [run for run, _ in expected]
    assert overlap == pytest.approx(np.array([share for _, share in expected]), nan_ok=True)
    assert len(set(longest.tolist())) > 4


def test_a_run_never_crosses_two_texts():
    longest, _ = shared_words(["a b c d", "x y"], ["a b", "c d", "b c", "y"], 2)
    assert longest.tolist() == [2, 1]
    assert shared_words(["A b"], ["a B"], 2)[0].tolist() == [2], "case does not matter"
    assert shared_words(["a b"], ["c"], 1)[1].tolist() == [0.0]
    longest, overlap = shared_words(["", "a"], [""], 5)
    assert longest.tolist() == [0, 0] and np.isnan(overlap).all()


def test_both_sides_have_equally_many_texts():
    private = [f"word{i} and word{i + 1} are here" for i in range(30)]
    held_out = [f"other{i} is here" for i in range(20)]
    vectors = [np.eye(60)[:30], np.eye(60)[:30], np.eye(60)[30:50]]

    found = compare_copies([text + " " for text in private], private, held_out, vectors)

    assert found["records_a_side"] == 20 and found["private_records"] == 30
    assert found["synthetic"]["exact_share"] == 1.0 and found["held_out"]["exact_share"] == 0.0
    assert found["synthetic"]["nearest_cosine"]["mean"] == pytest.approx(1.0)
    assert found["held_out"]["nearest_cosine"]["max"] == pytest.approx(0.0)
    assert found["synthetic"]["longest_shared_words"]["mean"] == 5.0
    assert found["held_out"]["longest_shared_words"]["max"] == 1.0
    nothing = {"mean": None, "quantile_95": None, "max": None}
    assert found["held_out"]["ngram_overlap"] == nothing


def test_nearest_cosine_is_that_by_all_pairs():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)), rng.normal(size=(90, 6)) * 7
    y[5] = 0.0
    dots = (
        x @ y.T / np.linalg.norm(x, axis=1)[:, None] / np.maximum(np.linalg.norm(y, axis=1), 1e-9)
    )

    assert nearest_cosine(x, y) == pytest.approx(dots.max(axis=1), abs=1e-6)
    assert nearest_cosine(y[:5], y).max() <= 1.0


def replays(made: list[str], private: list[str], held: list[str], **units: Any) -> Any:
    return compare_replays(made, private, held, **units)


PRIVATE = [
    "Mara Lindqvist called about invoice 77 1234 5678 and wrote from mara.l@post.example today",
    "the order was late again and nobody answered the phone",
    "the order was late again and nobody could say why",
    "请把我的订单寄到北京市朝阳区建国路八十八号",
    "ผู้ป่วยมาพบแพทย์ด้วยอาการไข้สูงสามวัน",
]
HELD_OUT = ["the order was lost again and nobody answered at all", "谢谢你们的帮助"]


@pytest.mark.parametrize(
    ("copied", "kind", "string"),
    [
        ("Thanks to Mara Lindqvist for this", "names", "mara lindqvist"),
        ("it is 77.1234.5678, please", "numbers", "7712345678"),
        ("ask (mara.l@post.example)", "identifiers", "mara.l@post.example"),
        ("again and nobody answered the phone here", "runs", "again and nobody answered the"),
        ("那里是北京市朝阳区建国路八十八号吗", "runs", "北京市朝阳区建国路八"),
        ("อาการไข้สูงสามวันแล้ว", "runs", "อาการไข้สู"),
    ],
)
def test_a_planted_string_of_one_record_is_found(copied: str, kind: str, string: str) -> None:
    found = replays([copied, "no part of it"], PRIVATE, HELD_OUT)
    assert {"kind": kind, "string": string, "in_held_out": False} in found["found"]
    assert found["kinds"][kind]["found"] > found["kinds"][kind]["expected"] == 0
    clean = replays(["no part of it at all"], PRIVATE, HELD_OUT)
    assert clean["found"] == [] and replays_in_words(clean) == ""


def test_what_two_units_have_is_no_replay() -> None:
    run = "the order was late again"
    made = [f"{run} today"]
    assert run not in {each["string"] for each in replays(made, PRIVATE, HELD_OUT)["found"]}
    # Both records are of one person: now the string is this person's.
    of_one = replays(made, PRIVATE, HELD_OUT, units=["a", "b", "b", "c", "d"])
    assert run in {each["string"] for each in of_one["found"]}
    # A person who says it in a hundred records does not make it common.
    often = replays(made, [PRIVATE[1]] * 100, HELD_OUT, units=["b"] * 100)
    assert run in {each["string"] for each in often["found"]}


def test_the_base_rate_is_that_of_held_out_records() -> None:
    """Texts from the same source share strings by chance, copied ones share more."""
    rng = np.random.default_rng(0)
    words = [f"word{letter}{other}" for letter in "abcdefgh" for other in "ijklmnop"]

    def texts(number: int) -> list[str]:
        return [" ".join(rng.choice(words[:16], 8)) for _ in range(number)]

    private, held, made = texts(2000), texts(200), texts(200)
    usual = replays(made, private, held)
    runs = usual["kinds"]["runs"]
    assert runs["found"] == pytest.approx(runs["expected"], abs=5 * runs["expected"] ** 0.5 + 3)
    assert replays_in_words(usual) == ""
    copied = replays([*made[:150], *private[:50]], private, held)
    assert copied["kinds"]["runs"]["ratio"] > 2
    said = replays_in_words(copied)
    assert "runs" in said and "word" not in said  # no string is in what is printed


def test_signs_within_a_word_take_no_time() -> None:
    began = time.monotonic()
    found = {string for _, string in strings_of(f"a{'.' * 300_000}b (witnessed) @home/")}
    assert time.monotonic() - began < 60, "more than an hour by a regular expression"
    assert "witnessed" in found

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.engines.base import Completion, PlainPrompt, Prompt, Sampling
from dpray.engines.requests import TRIES, Request, ask_until_accepted, try_request, written
from dpray.engines.schema.schema import read_schema
from dpray.engines.sentences import LEAST_WHOLE, whole_sentences
from dpray.methods.private_prediction.prompts import load_template
from dpray.types import InputError, Resumable


def request(number: int, attempt: int) -> Request:
    return Request(f"{number}/{attempt}", Prompt("p"), Sampling(3))


def run(script: dict[str, str], count: int, max_retries: int) -> tuple[list[str], list[list[str]]]:
    asked: list[list[str]] = []

    def ask(requests: Sequence[Request]) -> list[str]:
        asked.append([request.request_id for request in requests])
        return [script.get(request.request_id, "fine") for request in requests]

    return ask_until_accepted(
        ask, request, count, max_retries, lambda i, text: text in ("", "no")
    ), asked


def test_what_is_empty_or_refused_is_asked_again_so_often() -> None:
    script = {"0/0": " ", "2/0": " no\n", "2/1": "no", "2/2": "no"}
    assert run(script, 4, 2) == (
        ["fine", "fine", "", "fine"],
        [["0/0", "1/0", "2/0", "3/0"], ["0/1", "2/1"], ["2/2"]],
    )
    assert run(script, 4, 0) == (["", "fine", "", "fine"], [["0/0", "1/0", "2/0", "3/0"]])
    assert run({}, 0, 2) == ([], [])


def test_more_words_than_tokens_are_cut() -> None:
    said = {"0/0": " a  b\nc d e ", "1/0": "a b c", "2/0": "\n"}
    assert run(said, 3, 0)[0] == ["a  b\nc", "a b c", ""]


def test_a_text_of_a_schema_stays_whole() -> None:
    """Some tokenizers have tokens of several words, and blanks belong to the form."""
    sampling = Sampling(3, schema=read_schema({"regex": " a b c d e "}))

    def request(number: int, attempt: int) -> Request:
        return Request("x", Prompt("Go"), sampling)

    assert ask_until_accepted(
        lambda asked: [" a b c d e "], request, 1, 0, lambda i, text: False
    ) == [" a b c d e "]


ASKED = Request("x", Prompt("p"), Sampling(3))


def answered(text: str, finish_reason: str = "") -> Completion:
    return Completion(text, 1, 1, finish_reason)


TAGS = [("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]")]


@pytest.mark.parametrize(("opened", "closed"), TAGS)
@given(thought=st.text(alphabet="ab \n<", max_size=20), text=st.text(alphabet="ab .", max_size=20))
def test_thoughts_are_no_part_of_a_text(opened: str, closed: str, thought: str, text: str) -> None:
    for answer in (
        f"{opened}{thought}{closed}{text}",
        f"{thought}{closed}{text}",  # the chat template has opened them
        f"{opened}{thought}{opened}{closed}{thought}{closed}{text}",
    ):
        assert written(answered(answer), ASKED) == (text if text.strip() else "")
    assert written(answered(f"{text}{opened}{thought}{closed}"), ASKED) in (text, "")
    for unclosed in (f"{opened}{thought}", f"{text}{opened}{thought}"):
        assert written(answered(unclosed), ASKED) == ""


@pytest.mark.parametrize("opened", ["<think>", "[THINK]", "</think><think>"])
def test_an_answer_of_opened_thoughts_takes_no_time(opened: str) -> None:
    """A model that repeats itself, or an endpoint, may write as many as an answer has room for."""
    began = time.monotonic()
    assert written(answered(opened * 200_000), ASKED) == ""
    assert time.monotonic() - began < 20


def test_what_has_a_form_or_goes_on_a_plain_text_has_no_thoughts() -> None:
    answer = "<think>a</think>b"
    schema = read_schema({"regex": ".*"})
    for asked in (
        Request("x", PlainPrompt("p"), Sampling(3)),
        Request("x", Prompt("p"), Sampling(3, schema=schema)),
    ):
        assert written(answered(answer), asked) == answer


class Endpoint:
    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def generate(self, prompts: Any, samplings: Any, on_completion: Any = None) -> Any:
        return [Completion(self.answers.pop(0), 1, 1, "length")]

    def close(self) -> None: ...


def test_an_endpoint_is_tried_until_it_writes_something() -> None:
    slow = Endpoint("", "<think>", "a text", "never asked")
    try_request(slow, ASKED)
    assert slow.answers == ["never asked"]
    with pytest.raises(Resumable, match=r"3 empty answers in a row \(finish_reason length\)"):
        try_request(Endpoint(*[" "] * TRIES), ASKED)


def test_a_local_model_needs_room_for_the_prompt_and_its_text(transformers_engine: Any) -> None:
    engine = transformers_engine
    tokens = len(engine.encode(Prompt("p")))
    try_request(engine, Request("x", Prompt("p"), Sampling(256 - tokens)))
    with pytest.raises(InputError, match=r"^method\.max_tokens: .* more than the context"):
        try_request(engine, Request("x", Prompt("p"), Sampling(257 - tokens)))


WHOLE = [
    ("The card is here. It does not wo", "The card is here."),
    ('She said "no." Then he', 'She said "no."'),
    ("第一句。第二", "第一句。"),
    ("هل وصلت البطاقة؟ لم", "هل وصلت البطاقة؟"),
    ("Քարտը եկավ։ Այն չի", "Քարտը եկավ։"),
    ("ካርዱ ደረሰ። ግን", "ካርዱ ደረሰ።"),
    ("ကတ်ရောက်ပြီ။ ဒါပေ", "ကတ်ရောက်ပြီ။"),
    ("កាតមកដល់ហើយ។ ប៉ុន្តែ", "កាតមកដល់ហើយ។"),
    ("one item\nanother it", "one item"),
    ("no end of a sentence he", "no end of a sentence he"),
    ("Dr. Marlowe was here all the time and sa", "Dr. Marlowe was here all the time and sa"),
    ("It costs 3.5 euros. About 4.2", "It costs 3.5 euros."),
    ("", ""),
]


@pytest.mark.parametrize(("cut", "whole"), WHOLE)
def test_a_cut_text_ends_after_its_last_whole_sentence(cut: str, whole: str) -> None:
    assert written(answered(cut, "length"), ASKED) == (whole if whole.strip() else "")
    assert written(answered(cut, "stop"), ASKED) == (cut if cut.strip() else "")
    schema = Request("x", Prompt("p"), Sampling(3, schema=read_schema({"regex": ".*"})))
    assert written(answered(cut, "length"), schema) == cut
    template = load_template("texts")
    assert template.released(cut, is_cut=True) == whole
    assert template.released(cut) == cut
    assert load_template("json").released(cut, is_cut=True) == f"{{{cut}".strip()


@given(st.text(alphabet='ab .。"\n!', max_size=60))
def test_whole_sentences_are_a_beginning_of_the_text(text: str) -> None:
    whole = whole_sentences(text)
    assert text.startswith(whole) and len(whole) >= LEAST_WHOLE * len(text)

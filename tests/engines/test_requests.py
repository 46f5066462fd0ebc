from __future__ import annotations

from collections.abc import Sequence

from dpray.engines.base import Prompt, Sampling
from dpray.engines.requests import Request, answered
from dpray.engines.schema import read_schema


def request(number: int, attempt: int) -> Request:
    return Request(f"{number}/{attempt}", Prompt("p"), Sampling(3))


def run(script: dict[str, str], count: int, max_retries: int) -> tuple[list[str], list[list[str]]]:
    asked: list[list[str]] = []

    def ask(requests: Sequence[Request]) -> list[str]:
        asked.append([request.request_id for request in requests])
        return [script.get(request.request_id, "fine") for request in requests]

    return answered(ask, request, count, max_retries, lambda i, text: text in ("", "no")), asked


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

    assert answered(lambda asked: [" a b c d e "], request, 1, 0, lambda i, text: False) == [
        " a b c d e "
    ]

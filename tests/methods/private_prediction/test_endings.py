"""A text that `max_tokens` cut in a sentence is ended by the public prompt alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpray.engines.base import LockstepResult, select_token
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.algorithm import Batch, PrivatePrediction
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.release import describe_draw
from dpray.methods.private_prediction.token import PrivateTokenSelector
from dpray.types import InputError
from tests.methods.private_prediction.test_algorithm import BATCH, decoded

MECHANISM = PrivateToken(
    batch_size=4,
    private_tokens=20,
    clip="recentred",
    clip_bound=10.0,
    temperature=0.5,
    public_temperature=1.5,
    candidates="top_k_plus",
    k=3,
    threshold=0.5,
    noise=0.1,
)
METHOD = PrivatePrediction(MECHANISM, 6, 2, stop=("#",), longest_copy=3, end_tokens=9)

Answer = tuple[str, str, int]

CUT: Answer = ("The cat sat on", "length", 5)
WHOLE: Answer = ("No.", "stop", 9)
ENDED: Answer = ("The cat sat on the mat.", "length", 0)


@pytest.mark.parametrize(
    ("ending", "text", "reason"),
    [
        (("The cat sat on the mat. Then it", "length", 99), "The cat sat on the mat.", "stop"),
        (("The cat sat on the mat.", "length", 99), "The cat sat on the mat.", "stop"),
        (("The cat sat on the mat", "stop", 99), "The cat sat on the mat", "stop"),
        (("The cat sat on the mat. Then it slept", "stop", 99), "The cat sat on the mat.", "stop"),
        (("The cat sat on the mat and then", "length", 99), "The cat sat on", "length"),
        (("The cat sat on", "stop", 99), "The cat sat on", "stop"),
        (("The cat sat on\nA dog. It", "length", 99), "The cat sat on", "stop"),
    ],
    ids=[
        "a sentence",
        "at the limit",
        "the model's end",
        "one sentence",
        "none",
        "nothing",
        "another line",
    ],
)
def test_an_ending_goes_up_to_the_first_end_of_a_sentence_and_costs_nothing(
    ending: Answer, text: str, reason: str
) -> None:
    state, _ = decoded([CUT, WHOLE, ending], METHOD)
    assert [(x.text, x.finish_reason) for x in state.X] == [(text, reason), ("No.", "stop")]
    assert (state.t, state.noisy_threshold) == (9, 0.6), "those of the private texts"
    assert (state.texts, state.tokens) == (2, 12)


@pytest.mark.parametrize(
    ("cut", "ending", "text", "reason"),
    [
        ("它在\ufffd", ("它在这里。它", "length"), "它在这里。", "stop"),
        ("它在\ufffd", ("它在。它", "length"), "它在。", "stop"),
        ("它在\ufffd", ("它在这里", "length"), "它在\ufffd", "length"),
        ("It took 3", ("It took 3.5 hours. I", "length"), "It took 3.5 hours.", "stop"),
        ("The cat #", ("The cat ", "stop"), "The cat ", "stop"),
        ("She said “It is", ("She said “It is so.” He", "stop"), "She said “It is so.”", "stop"),
        ("يذهب", ("يذهب؟ هو", "length"), "يذهب؟", "stop"),
        ("वह यहाँ", ("वह यहाँ है। वह", "length"), "वह यहाँ है।", "stop"),
        ("A title\nThe cat", ("A title\nThe cat is. It", "length"), "A title\nThe cat is.", "stop"),
    ],
    ids=[
        "a character",
        "its end",
        "no end",
        "a number",
        "a stop string",
        "quotes",
        "Arabic",
        "Hindi",
        "title",
    ],
)
def test_a_text_and_its_ending_part_anywhere(
    cut: str, ending: tuple[str, str], text: str, reason: str
) -> None:
    state, _ = decoded([(cut, "length", 5), WHOLE, (*ending, 0)], METHOD)
    assert (state.X[0].text, state.X[0].finish_reason) == (text, reason)


@pytest.mark.parametrize(
    ("answers", "method"),
    [
        ([("The cat is here. It sat on", "length", 5), WHOLE], METHOD),
        ([("The cat is here.", "length", 5), WHOLE], METHOD),
        ([("The cat sat on", "exhausted", 20)], METHOD),
        ([("  ", "length", 5), WHOLE], METHOD),
        ([("The cat sat on\n", "length", 5), WHOLE], METHOD),
        ([("\ufffd", "length", 5), WHOLE], METHOD),
        ([CUT, WHOLE], replace(METHOD, end_tokens=0)),
    ],
    ids=[
        "its last sentence is left out",
        "it is whole",
        "it is dropped",
        "it is empty",
        "its line is whole",
        "no character",
        "off",
    ],
)
def test_other_texts_have_no_ending(answers: list[Answer], method: PrivatePrediction) -> None:
    state, asked = decoded(answers, method)
    kept = [text for text, reason, _ in answers if reason != "exhausted"]
    assert [x.text for x in state.X] == kept
    assert len(asked) == len(answers)
    assert all(group.private_prompts for group in asked)


def test_endings_come_last_without_a_private_row_and_with_coins_of_their_own() -> None:
    _, asked = decoded([CUT, CUT, ENDED, ENDED], METHOD)
    private, endings = asked[:2], asked[2:]
    assert [group.private_prompts for group in asked] == [BATCH.private_prompts] * 2 + [()] * 2
    assert [group.public_prompt for group in endings] == [(4, 7, 7, 7, 7)] * 2
    assert [group.max_tokens for group in endings] == [9, 9]
    assert all(group.stop == ("#",) for group in endings)
    keys = [group.selector.arguments["key"] for group in asked]
    assert len({*keys}) == 4
    for group in endings:
        assert "t" not in group.selector.arguments
        arguments = group.selector.arguments
        assert (arguments["prompt"], arguments["written"]) == ((4,), (7,) * 4)
        assert group.written == 4
        mechanism = PrivateToken(**group.selector.arguments["mechanism"])
        assert mechanism == MECHANISM.ending
    assert all(group.selector.arguments["mechanism"] == MECHANISM.values for group in private)
    assert MECHANISM.ending.public_temperature == 0.5, "the colder of both"


def test_a_document_that_is_not_whole_has_no_endings() -> None:
    method = replace(METHOD, sections=2)
    state, asked = decoded([CUT, WHOLE, CUT, ("half", "exhausted", 20), ENDED], method)
    assert [x.text for x in state.X] == ["The cat sat on the mat.", "No."]
    assert (len(asked), state.tokens) == (5, 20)


def test_neighbouring_batches_have_the_same_endings_of_the_same_texts() -> None:
    """What is asked for is a function of the texts, the public prompt and the key."""
    rows = [(1, 2), (3,), (5, 6, 7), (8,) * 30]
    batches = [replace(BATCH, private_prompts=tuple(rows[:n])) for n in range(5)]
    first, *others = (decoded([CUT, WHOLE, ENDED], METHOD, batch)[1][-1] for batch in batches)
    assert others == [first] * 4


@pytest.mark.parametrize(("length", "most"), [(27, 5), (31, 1), (32, 0)])
def test_an_ending_has_the_room_that_the_context_leaves(length: int, most: int) -> None:
    batch = replace(BATCH, public_prompt=(4,) * (length - 4))
    ending = [ENDED] if most else []
    state, asked = decoded([CUT, WHOLE, *ending], METHOD, batch)
    assert [group.max_tokens for group in asked[2:]] == [most][: len(ending)]
    assert state.X[0].text == "The cat sat on" + " the mat." * bool(most)


def test_no_private_row_moves_a_token_of_an_ending() -> None:
    """Rows of a group that had any, against the planted fault of the mechanism of private texts."""
    public_V = torch.randn(50, generator=torch.Generator().manual_seed(1))
    rows_SV = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 9.0

    def tokens(mechanism: PrivateToken, rows: torch.Tensor) -> list[int | None]:
        selectors = [PrivateTokenSelector(mechanism.values, f"{n:064x}") for n in range(40)]
        drawn = [select_token(selector, rows, public_V) for selector in selectors]
        if mechanism == MECHANISM.ending:
            assert all(selector.state()["t"] == 0 for selector in selectors)
        return drawn

    of_ending = [tokens(MECHANISM.ending, rows) for rows in (rows_SV, -rows_SV, rows_SV[:0])]
    assert of_ending[0] == of_ending[1] == of_ending[2]
    assert len({*of_ending[0]}) > 5, "they are drawn"
    assert tokens(MECHANISM, rows_SV) != tokens(MECHANISM, -rows_SV)


def test_a_run_ends_its_texts_alike_each_time(settings: Callable[..., Any], engine: Any) -> None:
    """The real engine: each text is what it was, and the public model's words after it."""

    def texts(tokens: int) -> list[LockstepResult]:
        mechanism = replace(MECHANISM, private_tokens=12, threshold=None, noise=None)
        method = PrivatePrediction(mechanism, 4, 3, end_tokens=tokens)
        prompts = tuple((5, 6, n) for n in range(3, 7))
        batch = Batch("0/1", prompts, (5, 6), "5b" * 32)
        [state] = method.decode(engine, [batch])
        return state.X

    without, once, again = texts(0), texts(6), texts(6)
    assert once == again
    assert [x.token_ids[:4] for x in once] == [x.token_ids for x in without]
    for before, after in zip(without, once, strict=True):
        assert after.text.startswith(before.text)
        assert (after.finish_reason == "stop") == (len(after.token_ids) > 4)


def test_a_plan_asks_for_public_logits_that_no_private_row_moves(
    settings: Callable[..., Any],
) -> None:
    from dpray import plan

    def asks(tokens: int) -> object:
        found = plan(parse_config(settings(method__end_tokens=tokens)))
        assert isinstance(found, PrivatePredictionPlan)
        build: Any = lambda _, **options: options  # noqa: E731
        options: Any = found.loader(build)()
        assert found.method.end_tokens == tokens
        assert found.method_summary()["method"]["end_tokens"] == tokens  # type: ignore[index]
        assert options["public_alone"] == found.public_decides
        assert (f"at most {tokens} tokens that end" in describe_draw(found.settings)) == bool(
            tokens
        )
        return found.public_decides

    assert not asks(0) and asks(1)


def test_a_text_of_a_schema_has_no_ending(settings: Callable[..., Any]) -> None:
    tree = settings(method__end_tokens=8, method__schema={"type": "object"})
    with pytest.raises(InputError, match=r"end_tokens: a text with method.schema ends where"):
        parse_config(tree)

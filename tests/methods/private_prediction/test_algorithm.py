"""Algorithm 1 stepped by hand, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dpray.engines.base import Following, LockstepGroup, LockstepResult
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.algorithm import Batch, BatchState, PrivatePrediction
from tests.methods.private_prediction.one_by_one import private_token

MECHANISM = private_token(private_tokens=10)
BATCH = Batch("0/3", ((1, 2), (3,)), (4,), "5a" * 32)


def answer(group: LockstepGroup, text: str, reason: str, t: int, theta: float | None = None) -> Any:
    state = {"t": t, "public_tokens": 0, "noisy_threshold": theta}
    return LockstepResult(group.group_id, text, (7,) * 4, reason, state)  # type: ignore[arg-type]


def method(texts: int = 5) -> PrivatePrediction:
    return PrivatePrediction(MECHANISM, max_tokens=6, examples_per_batch=texts, stop=("#",))


def test_groups_hold_the_whole_batch_and_the_bounds() -> None:
    group = method().next_text(BatchState(BATCH))
    assert group.private_prompts == BATCH.private_prompts and group.public_prompt == (4,)
    assert (group.max_tokens, group.stop, group.group_id) == (6, ("#",), "0/3")


def test_t_and_threshold_go_on_from_text_to_text_with_fresh_keys() -> None:
    state = BatchState(BATCH)
    first = method().next_text(state)
    state.add(answer(first, "one", "stop", 4, 0.7))
    second = method().next_text(state)
    assert first.selector.arguments["t"] == 0
    assert first.selector.arguments["noisy_threshold"] is None
    assert second.selector.arguments["t"] == 4
    assert second.selector.arguments["noisy_threshold"] == 0.7
    assert first.selector.arguments["key"] != second.selector.arguments["key"]


def test_a_batch_that_is_drawn_again_has_the_coins_that_it_had() -> None:
    def keys(batch: Batch) -> list[object]:
        texts = [method().next_text(BatchState(batch, texts=number)) for number in range(3)]
        return [text.selector.arguments["key"] for text in texts]

    assert keys(BATCH) == keys(BATCH)
    other = keys(replace(BATCH, key="a5" * 32))
    assert len({*keys(BATCH), *other}) == 6, "no two texts share a key"


def test_a_text_that_its_schema_closed_ended_by_its_length() -> None:
    state = BatchState(BATCH)
    for was_closed in (True, False):
        x = answer(method().next_text(state), "[]", "stop", 4)
        state.add(replace(x, state=x.state | {"was_closed": was_closed}))
    assert [x.finish_reason for x in state.X] == ["length", "stop"]


def decoded(
    answers: list[tuple[str, str, int]], method: PrivatePrediction, batch: Batch = BATCH
) -> tuple[BatchState, list[LockstepGroup]]:
    """Decode the batch by an engine that gives these answers, of four tokens each; no other one may
    be asked for. Return it, and what the engine was asked for."""
    left, asked = list(answers), []

    class Engine:
        context_length = 32

        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], following: Following
        ) -> Iterator[LockstepResult]:
            for first in groups:
                group: LockstepGroup | None = first
                while group is not None:
                    asked.append(group)
                    theta = 0.6 if "t" in group.selector.arguments else None
                    x = answer(group, *left.pop(0), theta)
                    group = following(x)
                    yield x

    engine: Any = Engine()
    [state] = method.decode(engine, [batch])
    assert left == [], "an answer was not asked for"
    return state, asked


@pytest.mark.parametrize(
    ("texts", "answers", "kept", "private_tokens"),
    [
        (5, [("one", "stop", 6), ("half", "exhausted", 10)], ["one"], 10),
        (5, [("one", "stop", 10)], ["one"], 10),
        (3, [("", "stop", 0), ("b", "length", 0), ("c", "stop", 0)], ["", "b", "c"], 0),
    ],
    ids=["the text cut off at r is dropped", "one that ends at r is kept", "texts are bounded"],
)
def test_a_batch_ends_at_r_private_tokens_or_its_number_of_texts(
    texts: int, answers: list[tuple[str, str, int]], kept: list[str], private_tokens: int
) -> None:
    output, _ = decoded(answers, method(texts))
    assert [x.text for x in output.X] == kept
    assert (output.t, output.tokens) == (private_tokens, 4 * len(answers))


def test_private_prompts_are_in_no_repr() -> None:
    secret = Batch("0/0", ((90210, 90211),), (1,), new_key())
    group = method().next_text(BatchState(secret))
    for shown in (repr(secret), repr(group), str(group.selector)):
        assert "90210" not in shown and "key" not in shown

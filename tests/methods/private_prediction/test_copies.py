from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from dpray.engines.base import select_token
from dpray.mechanisms.randomness import new_key
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.algorithm import Batch, BatchState, PrivatePrediction
from dpray.methods.private_prediction.logits import CopyFilter
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.token import PrivateTokenSelector
from dpray.types import InputError
from tests.methods.private_prediction.one_by_one import private_token

Settings = Callable[..., dict[str, Any]]

V = 6


def longest_shared(text: list[int], prompt: list[int]) -> int:
    """The most tokens in a row of the text that stand in the prompt too, or before in the text."""
    longest = 0
    for start in range(len(text)):
        for end in range(start + longest + 1, len(text) + 1):
            part = text[start:end]
            before = [prompt, text[: end - 1]]
            if not any(
                part == whole[at : at + len(part)] for whole in before for at in range(len(whole))
            ):
                break
            longest = end - start
    return longest


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_a_text_shares_no_more_tokens_in_a_row_than_it_may(longest: int) -> None:
    rng = random.Random(longest)
    for _ in range(200):
        prompt = [rng.randrange(V) for _ in range(12)]
        copies, text = CopyFilter(prompt, longest), []
        while len(text) < 20 and (free := [t for t in range(V) if t not in copies.excluded]):
            text.append(rng.choice(free))
            copies.add(text[-1])
        assert longest_shared(text, prompt) <= longest
        # No token is excluded that could have come: with it, the text would share more.
        for token in copies.excluded:
            assert longest_shared([*text, token], prompt) > longest


@pytest.mark.parametrize("written", range(6))
def test_a_text_that_goes_on_shares_no_more(written: int) -> None:
    """A copy may begin in the written part and go on after it."""
    prompt, text = [0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5, 0]
    copies = CopyFilter(prompt, 3, text[:written])
    for token in text[written:]:
        copies.add(token)
    whole = CopyFilter(prompt, 3)
    for token in text:
        whole.add(token)
    assert copies.excluded == whole.excluded
    other = CopyFilter(prompt, 3, [0, 1, 2])
    assert list(other.excluded) == [3]


def mechanism(**changes: Any) -> dict[str, Any]:
    tops = {"clip_bound": 10.0, "temperature": 0.01, "candidates": "top_k", "k": V - 1}
    fields = {"batch_size": 2, "private_tokens": 100, "public_temperature": 0.01} | tops
    return asdict(private_token(**(fields | changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k": V},
        {"clip": "dclip", "candidates": "top_k_plus"},
        {"sure_probability": 0.5},
        {"threshold": 1e6, "noise": 0.1},
    ],
)
def test_the_best_token_is_not_drawn_where_it_is_a_copy(changes: dict[str, Any]) -> None:
    prompt = (0, 1, 2, 3)
    best = torch.eye(V) * 9 + torch.arange(V) * 0.1

    def text(**copies: Any) -> list[int | None]:
        selector = PrivateTokenSelector(mechanism(**changes), new_key(), **copies)
        # All rows want to go on as the prompt does; afterwards the token 5.
        return [select_token(selector, best[[n, n]], best[n].clone()) for n in (0, 1, 2, 3, 5)]

    assert text() == [0, 1, 2, 3, 5]
    assert text(prompt=prompt, longest_copy=2) == [0, 1, 5, 3, 5]
    assert text(prompt=prompt, longest_copy=4) == [0, 1, 2, 3, 5]
    assert text(prompt=(4, 0, 1), longest_copy=2) == [0, 1, 2, 3, 5]
    assert text(prompt=(4, 0, 1), longest_copy=2, written=(4,))[:2] == [0, 5]


def test_the_engines_logits_stay_as_they_are() -> None:
    selector = PrivateTokenSelector(mechanism(), new_key(), prompt=(0, 1), longest_copy=1)
    public = torch.eye(V)[0] * 9
    assert select_token(selector, torch.eye(V)[[0, 0]] * 9, public) == 0
    before = torch.eye(V)[1] * 9
    public = before.clone()
    assert select_token(selector, torch.eye(V)[[1, 1]] * 9, public) != 1
    assert torch.equal(public, before)


def test_the_sparse_vector_compares_all_tokens() -> None:
    """An excluded token does not make the private rows differ from the public one."""
    far = mechanism(threshold=0.5, noise=1e-6)
    selector = PrivateTokenSelector(far, new_key(), prompt=(0, 1), longest_copy=1)
    for n in (0, 0, 0):
        assert select_token(selector, torch.eye(V)[[n, n]] * 9, torch.eye(V)[n] * 9) is not None
    assert selector.state()["t"] == 0 and selector.state()["public_tokens"] == 3


@pytest.mark.parametrize("longest", [None, 3])
def test_a_runs_texts_are_kept_from_copying(longest: int | None) -> None:
    method = PrivatePrediction(PrivateToken(**mechanism()), 8, 1, longest_copy=longest)
    group = method.next_text(BatchState(Batch("0/0", ((7, 8),), (1, 2, 3), "5a" * 32)))
    found = {name: group.selector.arguments.get(name) for name in ("prompt", "longest_copy")}
    expected = {"prompt": (1, 2, 3), "longest_copy": 3} if longest else dict.fromkeys(found)
    assert found == expected


def test_it_needs_candidates(settings: Settings) -> None:
    with pytest.raises(InputError, match=r"^method\.longest_copy: is for candidates top_k"):
        parse_config(settings(method__longest_copy=3))
    parse_config(settings(method__longest_copy=3, method__candidates="top_k"))

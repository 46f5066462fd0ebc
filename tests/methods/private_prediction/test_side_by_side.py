"""A token is a function of its own group's logits and key: the same whichever groups are drawn
beside it, in whichever order, and on every device."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from dpray.engines.base import (
    Failed,
    GroupLogits,
    HostSync,
    Selected,
    Selection,
    select_token,
    select_tokens,
)
from dpray.engines.finite_rows import highest
from dpray.mechanisms.randomness import generator, named_key
from dpray.methods.private_prediction.logits import halves, sample_softmax
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import draw_private
from dpray.methods.private_prediction.token import PrivateTokenSelector

V, TEXTS, POSITIONS = 3001, 9, 12
SIZES = [5, 0, 31, 1, 17, 64, 70, 2, 16]

DCLIP: dict[str, Any] = {"clip": "dclip", "clip_bound": 2.0, "temperature": 0.8}
KINDS: dict[str, dict[str, Any]] = {
    "recentred": {},
    "dclip": DCLIP,
    "top_k": DCLIP | {"candidates": "top_k", "k": 40},
    "top_k_plus": DCLIP | {"candidates": "top_k_plus", "k": 40},
    "sparse vector": {"threshold": 1.1, "noise": 0.2},
    "gate": {"sure_probability": 0.12},
    "gate and sparse vector": {"sure_probability": 0.12, "threshold": 1.1, "noise": 0.2},
}


def selector(text: int, **changes: Any) -> PrivateTokenSelector:
    mechanism: dict[str, Any] = {
        "batch_size": 16, "private_tokens": 10, "clip": "recentred", "clip_bound": 10.0,
        "temperature": 0.5, "public_temperature": 1.0,
    }  # fmt: skip
    key = named_key("ab" * 32, str(text))
    return PrivateTokenSelector(asdict(PrivateToken(**(mechanism | changes))), key)


def logits(text: int, position: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    fixed = torch.Generator().manual_seed(100 * text + position)
    rows = torch.randn(SIZES[text] + 1, V, generator=fixed) * 3
    return rows[:-1].to(device), rows[-1].to(device)


def drawn_alone(text: int, **changes: Any) -> tuple[list[int | None], dict[str, Any]]:
    one = selector(text, **changes)
    tokens = [select_token(one, *logits(text, n)) for n in range(POSITIONS)]
    return tokens, one.state()


def selection(one: PrivateTokenSelector, rows: torch.Tensor, public: torch.Tensor) -> Selection:
    return one.select(GroupLogits(rows, highest(rows), public))


def side_by_side(order: Iterable[int], device: str, **changes: Any) -> dict[int, list[Any]]:
    """Draw the texts' tokens, `order` beside each other; the second half begins a step later."""
    texts = {text: selector(text, **changes) for text in order}
    found: dict[int, list[Any]] = {text: [] for text in texts}
    for step in range(POSITIONS + 1):
        late = {text: place >= len(texts) // 2 for place, text in enumerate(texts)}
        now = [text for text in texts if 0 <= step - late[text] < POSITIONS]
        rows = {text: logits(text, step - late[text], device) for text in now}
        ends = select_tokens([selection(texts[text], *rows[text]) for text in now])
        for text, end in zip(now, ends, strict=True):
            assert isinstance(end, Selected)
            found[text].append(end.token)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_groups_beside_each_other_get_the_tokens_that_they_get_alone_on_any_device(
    kind: str, device: str
) -> None:
    drawn = {text: drawn_alone(text, **KINDS[kind]) for text in range(TEXTS)}
    expected = {text: tokens for text, (tokens, _) in drawn.items()}
    for order in (range(TEXTS), reversed(range(TEXTS)), [4, 0, 7], [6], [8, 1]):
        texts = list(order)
        found = side_by_side(texts, device, **KINDS[kind])
        assert found == {text: expected[text] for text in texts}
    states = [state for _, state in drawn.values()]
    has_free_tokens = KINDS[kind].keys() & {"threshold", "sure_probability"}
    assert any(state["t"] for state in states)
    assert any(state["public_tokens"] for state in states) == bool(has_free_tokens)
    assert len({token for tokens in expected.values() for token in tokens}) > TEXTS


def test_a_selection_that_fails_ends_no_other() -> None:
    def breaks(value: torch.Tensor) -> Selected:
        raise ArithmeticError(f"{value.tolist()} of {value.dtype}")

    good = selection(selector(2), *logits(2, 0))
    failed, other = select_tokens([HostSync(torch.ones(2).double(), torch.stack, breaks), good])
    assert isinstance(failed, Failed) and isinstance(failed.error, ArithmeticError)
    assert str(failed.error) == "[1.0, 1.0] of torch.float64"
    assert other == Selected(drawn_alone(2)[0][0])


def drawn_at(exponents: torch.Tensor, uniform: int) -> int:
    given = torch.from_numpy(halves(np.array([[uniform]]))).to(exponents.device)
    return int(sample_softmax(exponents[None], given))


def inverse_cdf(utilities: np.ndarray, temperature: float, uniform: float) -> int:
    """The draw as the textbook has it, added up from left to right in float64."""
    weights = np.exp((utilities - utilities.max()) / temperature)
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


@pytest.mark.parametrize("temperature", [0.05, 0.7, 5.0])
def test_a_draw_inverts_the_cumulative_distribution_at_the_keys_uniform(
    temperature: float, device: str
) -> None:
    rng = generator(named_key("cd" * 32, str(temperature)))
    fixed = torch.Generator().manual_seed(2)
    for _ in range(300):
        utilities = torch.randn(2000, generator=fixed, dtype=torch.float64) * 2
        value = int(rng.integers(2**62))
        expected = inverse_cdf(utilities.numpy(), temperature, value / 2**62)
        assert drawn_at(utilities.to(device) / temperature, value) == expected


def test_many_draws_are_those_that_are_made_one_by_one(device: str) -> None:
    rng, twin = (generator("12" * 32) for _ in range(2))
    logits = torch.tensor([[0.3, -1.0, 1.2, -20.0], [2.0, 0.0, -1.0, -20.0]], device=device)
    token = PrivateToken(
        batch_size=2, private_tokens=1, clip="dclip", clip_bound=1.0, temperature=0.8,
        public_temperature=1.0, candidates="top_k_plus", k=2,
    )  # fmt: skip
    drawn = draw_private(token, logits, logits[0], rng, (30, 2))
    singly = [int(draw_private(token, logits, logits[0], twin, (1,))) for _ in range(60)]
    assert drawn.flatten().tolist() == singly and set(singly) == {0, 2}
    nowhere = torch.full((2,), -math.inf, device=device)
    assert [drawn_at(nowhere, value) for value in (0, 1, 2**61)] == [2, 2, 2]


def test_a_draw_does_not_depend_on_the_order_of_its_sum(device: str) -> None:
    """Entries that cannot be drawn may stand anywhere: each draw names the same token."""
    fixed = torch.Generator().manual_seed(3)
    utilities = torch.randn(999, generator=fixed, dtype=torch.float64, device="cpu") * 3
    spread = torch.full((4 * 999,), -math.inf, dtype=torch.float64)
    spread[::4] = utilities
    for value in generator("ef" * 32).integers(2**62, size=300).tolist():
        index = drawn_at(utilities.to(device), value)
        assert drawn_at(spread.to(device), value) == 4 * index


@pytest.mark.parametrize(("value", "token"), [(0, 1), (2**61, 2), (2**61 - 1, 1), (2**62 - 1, 2)])
def test_the_ends_of_the_uniform_stay_inside(value: int, token: int, device: str) -> None:
    forbidden = -math.inf
    utilities = torch.tensor([forbidden, 7.0, 7.0, forbidden], device=device).double()
    assert drawn_at(utilities, value) == token


def test_unlikely_tokens_have_their_probabilities_to_60_bits(device: str) -> None:
    """The least uniform that draws a token or a later one: rounded to 53 bits, those of clipped
    rows' tokens are off by parts of a thousandth, and by as much from one world to the other."""
    utilities = torch.tensor([0.0, -41.0, -27.3, 1.7, -36.2, -12.0], dtype=torch.float64)

    def drawn(value: int) -> int:
        return drawn_at(utilities.to(device), value)

    least = [bisect_right(range(2**62), token, key=drawn) for token in range(5)]
    found = np.diff([0, *least]) / 2**62
    wanted = torch.softmax(utilities, 0)[:5].numpy()
    assert (np.abs(found - wanted) < 2.0**-60 + 1e-14 * wanted).all()


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("candidates", ["all", "top_k"])
def test_public_logits_that_are_not_finite_end_no_text(candidates: str, value: float) -> None:
    """A model may overflow at a token that was drawn: that would be a failure for the draw."""
    changes = DCLIP | {"candidates": candidates, "k": 40}
    rows, public = logits(0, 0)
    broken = selection(selector(0, **changes), rows, torch.full_like(public, value))
    drawn, other = select_tokens([broken, selection(selector(2, **changes), *logits(2, 0))])
    assert isinstance(drawn, Selected) and drawn.token in range(len(public))
    assert other == Selected(drawn_alone(2, **changes)[0][0])

"""A draw inverts the cumulative distribution at its uniform, to the last bit, on every device."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
import pytest
import torch

from dpray.mechanisms.randomness import generator, named_key
from dpray.methods.private_prediction.logits import halves, sample_softmax
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import draw_private


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

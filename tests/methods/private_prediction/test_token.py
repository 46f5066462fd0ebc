from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial

import pytest
import torch

from dpray.engines.base import select_token
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.private_prediction.logits import halves, sample_softmax
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.token import PrivateTokenSelector
from tests.methods.private_prediction.one_by_one import private_token

ROWS = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]])
PUBLIC = torch.tensor([1.0, 1.0, 1.0])


mechanism = partial(
    private_token, batch_size=255, private_tokens=1000, clip_bound=10.0, temperature=2.0
)


def test_rho_is_theorem_1() -> None:
    m = mechanism(threshold=0.5, noise=0.2)
    s, c, tau, sigma, r = 255, 10.0, 2.0, 0.2, 1000
    rho = r * (0.5 * (c / (s * tau)) ** 2 + 2 / (s * sigma) ** 2)
    assert m.dp_event.zcdp_rho() == pytest.approx(rho, rel=1e-12)


def test_k_records_of_a_unit_cost_k_squared() -> None:
    one, three = (mechanism(threshold=0.5, noise=0.2, records_per_unit=k) for k in (1, 3))
    assert three.dp_event.zcdp_rho() == pytest.approx(9 * one.dp_event.zcdp_rho(), rel=1e-12)


def test_the_bound_on_private_tokens_holds_inside_a_text() -> None:
    selector = PrivateTokenSelector(asdict(mechanism(private_tokens=3)), new_key(), t=1)
    tokens = [select_token(selector, ROWS, PUBLIC) for _ in range(4)]
    assert None not in tokens[:2] and tokens[2:] == [None, None]
    assert selector.state()["t"] == 3


def test_public_tokens_are_free_and_a_private_one_draws_a_new_threshold() -> None:
    m = mechanism(threshold=1e6, noise=0.1)
    selector = PrivateTokenSelector(asdict(m), new_key())
    before = selector.noisy_threshold
    for _ in range(50):
        select_token(selector, ROWS, PUBLIC)
    state = {"t": 0, "public_tokens": 50, "noisy_threshold": before, "was_closed": False}
    assert selector.state() == state
    selector = PrivateTokenSelector(asdict(mechanism(threshold=-1e6, noise=0.1)), new_key())
    seen = set()
    for _ in range(10):
        seen.add(selector.noisy_threshold)
        select_token(selector, ROWS, PUBLIC)
    assert selector.t == 10 and len(seen) == 10
    # A threshold in force is kept for the next text.
    following = PrivateTokenSelector(asdict(m), new_key(), t=4, noisy_threshold=0.42)
    assert (following.t, following.noisy_threshold) == (4, 0.42)


def test_arguments_are_plain_json() -> None:
    arguments = asdict(mechanism(threshold=0.5, noise=0.1))
    assert PrivateToken(**json.loads(json.dumps(arguments))) == mechanism(threshold=0.5, noise=0.1)


def test_sampling_never_takes_a_forbidden_token() -> None:
    rng = generator(new_key())
    uniforms = torch.from_numpy(halves(rng.integers(2**62, size=(1, 500))))
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]]).double()
    assert {*sample_softmax(logits, uniforms).flatten().tolist()} == {1, 3}
    for bad in ([-math.inf], [0.0, math.inf], [0.0, math.nan]):
        one = uniforms[..., :1]
        assert int(sample_softmax(torch.tensor([bad]).double(), one)) == len(bad)


def test_keys_are_256_bits_and_all_of_them_count() -> None:
    key = new_key()
    other = key[:-1] + ("0" if key[-1] != "0" else "1")
    first = ("0" if key[0] != "0" else "1") + key[1:]
    draws = {generator(k).random() for k in (key, other, first)}
    assert len(draws) == 3
    with pytest.raises(ValueError):
        generator("ab")


@pytest.mark.parametrize("sure", [[2.4, 0.0], [9.0, -math.inf]])
def test_tokens_that_the_public_row_is_sure_of_are_free(sure: list[float]) -> None:
    """The private rows say token 1, the public one token 0: none of the free tokens is theirs, and
    they are not asked."""
    m = mechanism(private_tokens=1, public_temperature=0.01, temperature=0.01, sure_probability=0.9)
    selector = PrivateTokenSelector(asdict(m), new_key())
    private = torch.tensor([[0.0, 1e3]]).repeat(255, 1)
    for _ in range(5):
        assert select_token(selector, private, torch.tensor(sure)) == 0
    state = {"t": 0, "public_tokens": 5, "noisy_threshold": None, "was_closed": False}
    assert selector.state() == state
    unsure = torch.tensor([0.4, 0.0])
    assert select_token(selector, private, unsure) == 1 and selector.t == 1
    # The bound holds, also where the public row is sure.
    assert select_token(selector, private, torch.tensor(sure)) is None


def test_the_public_gate_does_not_look_at_private_rows() -> None:
    m = mechanism(private_tokens=1, sure_probability=0.9)
    for rows in (torch.zeros((0, 2)), torch.full((3, 2), math.nan), torch.ones((9, 2))):
        selector = PrivateTokenSelector(asdict(m), new_key())
        assert select_token(selector, rows, torch.tensor([3.0, 0.0])) is not None
        assert selector.t == 0

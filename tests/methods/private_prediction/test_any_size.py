"""The claim of Poisson batches holds whatever the data's size is: no batch is cut.

Every outcome of small runs is enumerated, at 1, 3.5 and 8 times the public size. The adversary
knows how many others joined each batch, about as many as usual, and chose a public prompt that
brings a batch of the usual size to a tie.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from dpray.accounting.event import Event
from dpray.engines.finite_rows import highest
from dpray.mechanisms.batches import PoissonBatches
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import Coins, Group, Step

PUBLIC_SIZE, S, TEXTS, TOKENS = 400, 40, 2, 4

TOKEN = PrivateToken(S, TOKENS, "dclip", 10.0, 1.0, 1.0)

SURE = 1e3

Law = npt.NDArray[np.float64]


def target_probability(others: int, unit: int, tie: int) -> float:
    """The probability of the token that the withheld unit is sure of; the others are sure of the
    other one."""
    public = torch.tensor([2 * tie * TOKEN.clip_bound / S, 0.0])
    rows = torch.tensor([[-SURE, SURE]] * others + [[SURE, -SURE]] * unit).reshape(-1, 2)
    step = Step(TOKEN, [Group(rows, highest(rows), public, Coins())], looks=True)
    [mean] = step.averages_GK
    return float(torch.softmax(mean / TOKEN.temperature, -1)[0])


def text_law(others: int, tie: int, q: float, with_unit: bool) -> Law:
    """The law of how many of a text's tokens are the unit's, given how many others joined."""
    law = np.zeros(TOKENS + 1)
    for joins, p in ((1, q), (0, 1 - q)) if with_unit else ((0, 1.0),):
        hit = target_probability(others, joins, tie)
        law += p * stats.binom.pmf(np.arange(TOKENS + 1), TOKENS, hit)
    return law


def curves(event: Event, epsilons: Law) -> Law:
    ((term, count),) = event.terms().items()
    found: Law = term.pld(2.0**-11, count).get_delta_for_epsilon(epsilons)
    return found


def exceeds(times: float) -> float:
    """The largest ratio of the true delta to the claimed one, over epsilon and both directions."""
    batches = PoissonBatches.expected(PUBLIC_SIZE, {"": 1.0}, S, TEXTS)
    q = batches.sampling_probabilities[""]
    usual = round(times * PUBLIC_SIZE * q)
    sizes = range(usual - 2, usual + 3)
    weight = stats.binom.pmf(sizes, round(times * PUBLIC_SIZE), q)
    weight /= weight.sum()
    worlds = []
    for with_unit in (True, False):
        texts = [text_law(m, usual, q, with_unit) for m in sizes]
        games = [
            np.outer(texts[i], texts[j]).ravel() * weight[i] * weight[j]
            for i, j in product(range(len(sizes)), repeat=TEXTS)
        ]
        worlds.append(np.concatenate(games))
    epsilons = np.arange(0.0, 6.0, 0.25)
    claimed = curves(batches.dp_event(TOKEN.sampler.dp_event, TOKENS, 1), epsilons)
    return max(
        float(np.maximum(p - math.exp(epsilon) * r, 0).sum() / delta)
        for p, r in (worlds, worlds[::-1])
        for epsilon, delta in zip(epsilons, claimed, strict=True)
        if delta > 1e-12
    )


@pytest.mark.parametrize("times", [1.0, 3.5, 8.0])
def test_the_claim_is_never_exceeded(times: float) -> None:
    assert exceeds(times) <= 1 + 1e-9

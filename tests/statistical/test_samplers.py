"""Right noise accepted, 2/3 and 3/2 of it rejected, for every draw of private prediction.

Proof: docs/privacy.md, sections 2.3 and 2.5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never, get_args

import numpy as np
import pytest
import torch
from scipy import stats

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.private_prediction.logits import Clip
from dpray.methods.private_prediction.mechanism import PrivateToken, SparseVector
from dpray.methods.private_prediction.step import draw_private
from tests.methods.private_prediction.one_by_one import private_token
from tests.statistical.two_sided import WRONG_SCALES, fits_distribution, fits_probabilities

TOKENS = 7_000
"""5,600 tell the nearest of the wrong laws from the right one in all but one of 10^6 runs
(noncentral chi-square)."""
DRAWS = 60_000

both_ways = pytest.mark.parametrize("scale", [1.0, *WRONG_SCALES])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def private_counts(mechanism: PrivateToken, claimed: PrivateToken) -> bool:
    """Whether the draws of `mechanism` fit the distribution that `claimed` states."""
    rows = torch.tensor([[2.0, 0.0, -1.0, 1.0, 0.5], [0.0, 3.0, -2.0, 1.0, 0.5]])
    public = torch.tensor([0.0, 1.0, 1.0, -1.0, 2.0])
    rng = generator(new_key())
    draws = draw_private(mechanism, rows, public, rng, (TOKENS,))
    z = rows.double().numpy()
    c, s = claimed.clip_bound, claimed.batch_size
    match claimed.clip:
        case "recentred":
            mean = np.maximum(-c, z - z.max(1, keepdims=True) + c).sum(0) / s
        case "dclip":
            pub = np.log(softmax(public.double().numpy()))
            mean = pub + np.clip(np.log([softmax(row) for row in z]) - pub, -c, c).sum(0) / s
        case _:
            assert_never(claimed.clip)
    return fits_probabilities(
        draws.bincount(minlength=5).tolist(), softmax(mean / claimed.temperature)
    )


@pytest.mark.parametrize("clip", get_args(Clip))
@both_ways
@pytest.mark.parametrize("parameter", ["temperature", "clip_bound"])
def test_private_tokens_have_the_claimed_distribution(
    clip: str, scale: float, parameter: str
) -> None:
    claimed = private_token(batch_size=2, clip=clip, clip_bound=1.0, temperature=0.8)
    run = replace(claimed, **{parameter: getattr(claimed, parameter) * scale})
    assert private_counts(run, claimed) == (scale == 1)


def thresholds(noise: float) -> np.ndarray:
    vector, rng = SparseVector(0.5, noise, 0.01), generator(new_key())
    return np.array([vector.draw_threshold(rng) for _ in range(DRAWS // 3)])


def far_shares(noise: float) -> tuple[np.ndarray, list[int]]:
    """How often a query at some distances from a fixed threshold is called far."""
    vector, rng = SparseVector(0.5, noise, 0.01), generator(new_key())
    distances = np.array([-0.2, 0.0, 0.3, 0.45, 0.6, 0.9])
    draws = DRAWS // 6
    return distances, [
        sum(d + vector.draw_noise(rng) >= 0.5 for _ in range(draws)) for d in distances
    ]


def query_fits(noise: float, claimed: float) -> bool:
    distances, far = far_shares(noise)
    share = stats.laplace(scale=2 * claimed).sf(0.5 - distances)
    draws = DRAWS // 6
    return all(
        fits_probabilities([f, draws - f], [p, 1 - p]) for f, p in zip(far, share, strict=True)
    )


@both_ways
def test_threshold_noise_is_laplace_of_the_claimed_scale(scale: float) -> None:
    sample = thresholds(0.1 * scale)
    claimed = stats.laplace(loc=0.5, scale=0.1)
    assert fits_distribution(sample, claimed.cdf) == (scale == 1)


@both_ways
def test_query_noise_is_laplace_of_twice_the_scale(scale: float) -> None:
    assert query_fits(0.1 * scale, 0.1) == (scale == 1)

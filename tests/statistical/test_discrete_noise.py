"""Right noise accepted, 2/3 and 3/2 of it rejected, for the integer mechanisms.

Proof: docs/privacy.md, section 7.1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dpray.mechanisms.attributes import PairHistograms
from dpray.mechanisms.discrete_noise import discrete_gaussian, discrete_laplace
from dpray.mechanisms.labels import LabelHistogram
from dpray.mechanisms.votes import VoteHistogram
from tests.statistical.two_sided import WRONG_SCALES, fits_probabilities

DRAWS = 8000
REACH = 60


def laplace_law(scale: float) -> np.ndarray:
    """Mass proportional to exp(-|x| / scale) on -REACH..REACH; the ends hold the tails."""
    x = np.arange(-REACH, REACH + 1)
    mass = np.exp(-np.abs(x) / scale)
    mass[[0, -1]] /= 1 - np.exp(-1 / scale)
    return mass / mass.sum()


def gaussian_law(sigma: float) -> np.ndarray:
    """Mass proportional to exp(-x^2 / (2 sigma^2)) on -REACH..REACH; the ends hold the tails."""
    x = np.arange(-100 * REACH, 100 * REACH + 1)
    mass = np.exp(-0.5 * (x / sigma) ** 2)
    mass = np.bincount(np.clip(x, -REACH, REACH) + REACH, weights=mass)
    return mass / mass.sum()


LAWS: dict[str, tuple[Callable[..., np.ndarray], Callable[[float], np.ndarray]]] = {
    "laplace": (discrete_laplace, laplace_law),
    "gaussian": (discrete_gaussian, gaussian_law),
    "label histogram": (
        lambda counts, scale: LabelHistogram(("a", "b"), 3 / scale, 3)(counts),
        laplace_law,
    ),
    "attribute histograms": (
        lambda counts, sigma: PairHistograms({"x": ("a", "b")}, sigma, 3)(counts),
        gaussian_law,
    ),
    "vote histogram": (lambda counts, sigma: VoteHistogram(sigma, 3)(counts), gaussian_law),
}


def fits(name: str, run: float, claimed: float, count: int = 11) -> bool:
    """Whether noise of scale `run` fits the law of scale `claimed`."""
    noise, law = LAWS[name]
    drawn = noise(np.full(DRAWS, count), run) - count
    cells = np.bincount(np.clip(drawn, -REACH, REACH) + REACH, minlength=2 * REACH + 1)
    return fits_probabilities(cells.tolist(), law(claimed).tolist())


@pytest.mark.parametrize(
    ("name", "scale"),
    [("laplace", 0.7), ("gaussian", 0.7), *((name, 7.3) for name in LAWS)],
)
@pytest.mark.parametrize("factor", [1.0, *WRONG_SCALES])
def test_noise_has_the_claimed_law(name: str, scale: float, factor: float) -> None:
    assert fits(name, scale * factor, scale) == (factor == 1)


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_the_law_does_not_depend_on_the_count(name: str) -> None:
    assert fits(name, 1.6, 1.6, count=-(2**40))


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_one_law_is_not_the_other(name: str) -> None:
    """Equal variances: 2 scale^2 = sigma^2, up to the discretisation."""
    other = "gaussian" if name == "laplace" else "laplace"
    run, claimed = (5.0, 5.0 * 2**0.5) if name == "laplace" else (5.0 * 2**0.5, 5.0)
    noise, law = LAWS[name][0], LAWS[other][1]
    drawn = noise(np.zeros(DRAWS, dtype=np.int64), run)
    cells = np.bincount(np.clip(drawn, -REACH, REACH) + REACH, minlength=2 * REACH + 1)
    assert not fits_probabilities(cells.tolist(), law(claimed).tolist())


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_neighbouring_counts_have_independent_noise(name: str) -> None:
    """Four quadrants of the signs of successive draws, zeros left out."""
    drawn = LAWS[name][0](np.zeros(DRAWS, dtype=np.int64), 4.0).reshape(-1, 2)
    signs = drawn[(drawn != 0).all(axis=1)] > 0
    assert fits_probabilities(np.bincount(signs @ [1, 2], minlength=4).tolist(), [0.25] * 4)

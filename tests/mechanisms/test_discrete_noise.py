"""The claims of docs/privacy.md, section 7.1."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteLaplace
from dpray.mechanisms.discrete_noise import (
    MAX_SCALE,
    discrete_gaussian,
    discrete_laplace,
    laplace_scale,
)

HIGH, LOW = np.iinfo(np.int64).max, np.iinfo(np.int64).min
both = pytest.mark.parametrize("noise", [discrete_laplace, discrete_gaussian])


@both
@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, MAX_SCALE * 1.01, True, "1"])
def test_bad_scales_are_refused(noise, scale) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        ValueError, match=r"(scale|sigma) must be a number over 0 and at most 2\^52"
    ):
        noise(np.zeros(3, dtype=np.int64), scale)


@both
@pytest.mark.parametrize("counts", [np.array([1.0]), np.array([1], dtype=np.uint64)])
def test_counts_are_integers(noise, counts) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError):
        noise(counts, 1.0)


@both
def test_counts_are_one_row(noise) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="shape"):
        noise(np.zeros((2, 2), dtype=np.int64), 1.0)


@both
@pytest.mark.parametrize("counts", [np.array([5, -7, 0]), np.array([5, 7], dtype=np.int32)])
def test_the_input_stays_as_it_is(noise, counts) -> None:  # type: ignore[no-untyped-def]
    before = counts.copy()
    noisy = noise(counts, 1e6)
    assert noisy.dtype == np.int64 and noisy.shape == counts.shape
    assert (counts == before).all()
    assert noise(np.zeros(0, dtype=np.int64), 1.0).shape == (0,)


@both
def test_extremes_are_cut_and_do_not_wrap(noise) -> None:  # type: ignore[no-untyped-def]
    noisy = noise(np.array([HIGH] * 200 + [LOW] * 200), 100.0)
    assert (noisy[:200] > 0).all() and (noisy[200:] < 0).all()
    # Half of each is cut: without that it would have wrapped to the other side.
    assert (noisy[:200] == HIGH).any() and (noisy[200:] == LOW).any()
    wide = noise(np.zeros(200, dtype=np.int64), MAX_SCALE)
    assert (np.abs(wide) < HIGH // 2).all()


@both
def test_every_count_has_noise_of_its_own(noise) -> None:  # type: ignore[no-untyped-def]
    """Two equal draws of scale 2^52 among 50 and 50: fewer than once in 10^11 runs."""
    zeros = np.zeros(50, dtype=np.int64)
    assert len({*noise(zeros, MAX_SCALE).tolist(), *noise(zeros, MAX_SCALE).tolist()}) == 100


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process_does_not_repeat_the_noise() -> None:
    code = """
import os, numpy as np
from dpray.mechanisms.discrete_noise import discrete_laplace as noise
zeros = np.zeros(2, dtype=np.int64)
noise(zeros, 2.0**52)
for _ in range(2):
    if os.fork() == 0:
        print(*noise(zeros, 2.0**52), flush=True)
        os._exit(0)
    os.wait()
print(*noise(zeros, 2.0**52))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    drawn = done.stdout.split()
    assert len(drawn) == len(set(drawn)) == 6


epsilons = st.floats(1e-6, 1e3) | st.integers(1, 1000).map(lambda steps: steps * 0.05)


@given(epsilons, st.integers(1, 1000))
def test_a_laplace_scale_costs_epsilon_and_never_more(epsilon: float, sensitivity: int) -> None:
    scale = laplace_scale(sensitivity, epsilon)
    assert sensitivity / scale <= epsilon
    assert scale == pytest.approx(sensitivity / epsilon, rel=1e-12)


@given(epsilons, st.integers(1, 40))
def test_several_mechanisms_cost_epsilon_together(epsilon: float, count: int) -> None:
    scale = laplace_scale(1, epsilon, count=count)
    together = cost(SelfComposed(DiscreteLaplace(scale, 1), count), 0.0).epsilon
    assert together <= epsilon and together == pytest.approx(epsilon, rel=1e-12)


def test_only_a_quotient_that_rounds_down_is_taken_up() -> None:
    """10 / (10 / 1.825) is 1.8250000000000002."""
    assert laplace_scale(10, 0.5) == 20.0 and laplace_scale(1, 0.5, count=4) == 8.0
    assert 10 / (10 / 1.825) > 1.825 >= 10 / laplace_scale(10, 1.825)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import Laplace
from dpray.mechanisms.discrete_noise import laplace_scale

epsilons = st.floats(1e-6, 1e3) | st.integers(1, 1000).map(lambda steps: steps * 0.05)


@given(epsilons, st.integers(1, 1000))
def test_the_cost_is_epsilon_and_never_more(epsilon: float, sensitivity: int) -> None:
    scale = laplace_scale(sensitivity, epsilon)
    assert sensitivity / scale <= epsilon
    assert scale == pytest.approx(sensitivity / epsilon, rel=1e-12)


@given(epsilons, st.integers(1, 40))
def test_several_mechanisms_cost_epsilon_together(epsilon: float, count: int) -> None:
    scale = laplace_scale(1, epsilon, count=count)
    together = cost(SelfComposed(Laplace(scale), count), 0.0).epsilon
    assert together <= epsilon and together == pytest.approx(epsilon, rel=1e-12)


def test_a_quotient_that_needs_no_rounding_is_left_alone() -> None:
    assert laplace_scale(10, 0.5) == 20.0 and laplace_scale(1, 0.5, count=4) == 8.0


def test_a_quotient_that_rounds_down_is_taken_up() -> None:
    """10 / (10 / 1.825) is 1.8250000000000002."""
    assert 10 / (10 / 1.825) > 1.825 >= 10 / laplace_scale(10, 1.825)

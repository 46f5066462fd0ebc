"""Private selection costs what Papernot and Steinke (2022) prove, and never less than it does on
small mechanisms, whose selections are computed exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import minimize_scalar

from dpray.accounting.accountant import RDP_ORDERS, bounds, cost
from dpray.accounting.composed_events import Composed, SelfComposed, event_from_json
from dpray.accounting.event import Event
from dpray.accounting.events import DiscreteLaplace, Gaussian
from dpray.accounting.selection import PrivateSelection, expected_runs

LAWS = [(0.0, 0.1), (0.0, 0.005), (0.5, 0.05), (1.0, 0.1), (3.0, 0.4)]


def generating_function(shape: float, gamma: float, x: float) -> Any:
    """Return E[x^K], from Definition 1 and the binomial series."""
    g, y = mpmath.mpf(gamma), 1 - (1 - mpmath.mpf(gamma)) * x
    if shape == 0:
        return mpmath.log(y) / mpmath.log(g)
    return (y**-shape - 1) / (g**-shape - 1)


@pytest.mark.parametrize(("shape", "gamma"), LAWS)
def test_the_mean_number_of_runs(shape: float, gamma: float) -> None:
    with mpmath.workdps(40):
        slope = mpmath.diff(lambda x: generating_function(shape, gamma, x), 1)
    assert expected_runs(shape, gamma) == pytest.approx(float(slope), rel=1e-9)


@pytest.mark.parametrize(("shape", "gamma"), LAWS)
@pytest.mark.parametrize("noise", [0.7, 4.0, 30.0])
def test_the_curve_is_theorem_2(shape: float, gamma: float, noise: float) -> None:
    """With the infimum over the second order, R(b) = b / (2 noise^2), found by other means."""

    def second(log_excess: float) -> float:
        b = 1 + math.exp(log_excess)
        return (1 - 1 / b) * b / (2 * noise**2) + math.log(1 / gamma) / b

    least = min(
        [math.log(1 / gamma)]
        + [minimize_scalar(second, bounds=(x, x + 4), method="bounded").fun for x in range(-9, 9)]
    )
    orders = (1.5, 3.0, 20.0, 500.0)
    mean = float(mpmath.diff(lambda x: generating_function(shape, gamma, x), 1))
    expected = [a / (2 * noise**2) + (1 + shape) * least + math.log(mean) / (a - 1) for a in orders]
    found = PrivateSelection(Gaussian(noise), shape, gamma).rdp(orders)
    assert (found >= np.array(expected) * (1 - 1e-9)).all()
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("shape", "gamma"), LAWS)
def test_it_agrees_with_dp_accounting(shape: float, gamma: float) -> None:
    accountant = RdpAccountant(RDP_ORDERS)
    repeated = RepeatAndSelectDpEvent(GaussianDpEvent(4.0), expected_runs(shape, gamma), shape)
    accountant.compose(repeated)
    found = cost(PrivateSelection(Gaussian(4.0), shape, gamma), 1e-6)
    assert found.bound == "rdp"
    # Its second order is one of the accountant's, ours one of more.
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-6), rel=0.01)


def test_a_pure_mechanism_costs_2_plus_eta_times_its_epsilon() -> None:
    base = SelfComposed(DiscreteLaplace(8.0, 1), 4)
    for shape, gamma in LAWS:
        selected = PrivateSelection(base, shape, gamma)
        assert cost(selected, 0.0).epsilon == pytest.approx((2 + shape) * 0.5)
        assert cost(selected, 1e-6).epsilon <= (2 + shape) * 0.5


def test_selections_compose_with_other_mechanisms() -> None:
    """By the distribution of losses, too, which is that of one pair of epsilon and delta where a
    mechanism has no pure epsilon."""
    for base in (Gaussian(4.0), DiscreteLaplace(4.0, 1)):
        selected = PrivateSelection(base, 0.0, 0.1)
        alone = bounds(selected, 1e-6)
        both = bounds(Composed((selected, selected, Gaussian(8.0))), 1e-6)
        for bound in ("rdp", "pld"):
            assert alone[bound] < both[bound] < 4 * alone[bound]
        assert alone["pld"] >= 0.99 * min(alone["rdp"], alone["basic"])


def selection(pmf: list[Any], law: Any) -> list[Any]:
    """Return the exact law of the best of K outputs, which are ordered by their places."""
    below = [mpmath.fsum(pmf[:place]) for place in range(len(pmf))] + [mpmath.mpf(1)]
    return [law(high) - law(low) for low, high in pairwise(below)]


def random_pairs(epsilon: float, pairs: int) -> Iterator[list[list[Any]]]:
    """Yield the laws of mechanisms of four outputs in two worlds: what is epsilon-DP, and nothing
    else, follows from randomised response (Kairouz et al. 2015). Some outputs are rare."""
    rng = np.random.default_rng(1)
    p = 1 / (1 + mpmath.exp(-epsilon))
    for _ in range(pairs):
        channel = rng.dirichlet(np.full(4, 10.0 ** rng.uniform(-1.5, 1)), size=2) + 1e-9
        yes, no = ([mpmath.mpf(x) / mpmath.fsum(row) for x in row] for row in channel)
        yield [
            [share * y + (1 - share) * n for y, n in zip(yes, no, strict=True)]
            for share in (p, 1 - p)
        ]


def worst_losses(claim: Event, law: Any, epsilon: float) -> tuple[float, float]:
    """Return by how much the losses of selections exceed the claim, at most: the pure epsilon, and
    the divergences at a few orders."""
    orders = (1.25, 2.0, 8.0, 64.0)
    pure, renyi = -math.inf, -math.inf
    allowed = claim.rdp(orders)
    with mpmath.workdps(50):
        for pair in random_pairs(epsilon, 150):
            first, second = (selection(pmf, law) for pmf in pair)
            for P, Q in ((first, second), (second, first)):
                ratios = [mpmath.log(p / q) for p, q in zip(P, Q, strict=True)]
                pure = max(pure, float(max(ratios)) - claim.pure_epsilon())
                for order, most in zip(orders, allowed, strict=True):
                    moment = sum(p**order * q ** (1 - order) for p, q in zip(P, Q, strict=True))
                    found = float(mpmath.log(moment)) / (order - 1)
                    renyi = max(renyi, found - float(most))
    return pure, renyi


@pytest.mark.parametrize(("shape", "gamma"), LAWS)
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_no_selection_of_a_small_mechanism_costs_more(
    shape: float, gamma: float, epsilon: float
) -> None:
    # Randomised response.
    claim = PrivateSelection(DiscreteLaplace(1 / epsilon, 1), shape, gamma)
    pure, renyi = worst_losses(claim, lambda x: generating_function(shape, gamma, x), epsilon)
    assert pure <= 1e-9 and renyi <= 1e-9
    # The bound is not far off: some mechanism comes near it.
    assert pure > -1.5 * (1 + shape) * epsilon


def test_a_fixed_number_of_runs_costs_more() -> None:
    claim = PrivateSelection(DiscreteLaplace(2.0, 1), 0.0, 0.1)
    runs = round(claim.expected_runs) * 2
    pure, renyi = worst_losses(claim, lambda x: x**runs, 0.5)
    assert pure > 0.5 and renyi > 0.1


def test_its_parameters_are_checked_and_written() -> None:
    event = PrivateSelection(Composed((Gaussian(2.0), DiscreteLaplace(1.0, 1))), 0.0, 0.1)
    assert event_from_json(event.to_json()) == event
    for shape, gamma in ((-0.5, 0.1), (0.0, 1.0), (0.0, 0.0), (math.inf, 0.5), (0.0, math.nan)):
        with pytest.raises(ValueError, match=r"shape|gamma"):
            PrivateSelection(Gaussian(1.0), shape, gamma)

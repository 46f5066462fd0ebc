"""From a target to any one free parameter, always on the valid side."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dpray.accounting.accountant import calibrate, cost, noise_multiplier
from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import (
    AboveThreshold,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialMechanism,
    Gaussian,
    PoissonSubsampledGaussian,
)

# Xie et al. (2024), Table 9 and the counts beside the tables of results; T = 10 iterations.
UNITS = {"yelp": 1_939_290, "openreview": 8_396, "pubmed": 75_316}
SIGMAS = {
    "yelp": (15.404, 8.039, 4.245),
    "openreview": (11.600, 6.211, 3.374),
    "pubmed": (13.251, 7.001, 3.749),
}
GOLDEN = [
    (UNITS[name], epsilon, sigma)
    for name, sigmas in SIGMAS.items()
    for epsilon, sigma in zip((1, 2, 4), sigmas, strict=True)
]


def target_delta(units: int) -> float:
    return 1 / (units * math.log(units))


def least_noise(make: Callable[[float], Event], epsilon: float, delta: float) -> float:
    return calibrate(make, epsilon, delta, bracket=(1e-3, 1e7), increasing=False)


def discrete_gaussian_sigma(epsilon: float, delta: float, sensitivity: int = 1) -> float:
    """The smallest sigma of ten discrete Gaussian mechanisms."""
    return least_noise(
        lambda sigma: SelfComposed(DiscreteGaussian(sigma, sensitivity), 10), epsilon, delta
    )


@pytest.mark.parametrize(("units", "epsilon", "sigma"), GOLDEN)
def test_golden_aug_pe_noise(units: int, epsilon: float, sigma: float) -> None:
    delta = target_delta(units)
    found = noise_multiplier(epsilon, delta, count=10)
    assert found == pytest.approx(sigma, abs=5.1e-4)
    assert cost(SelfComposed(Gaussian(found), 10), delta).epsilon <= epsilon
    assert cost(SelfComposed(Gaussian(found * (1 - 3e-6)), 10), delta).epsilon > epsilon


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, SIGMAS["yelp"][0]), (4, SIGMAS["yelp"][2])])
def test_golden_discrete_noise_differs_in_the_fourth_digit(epsilon: int, sigma: float) -> None:
    """The discrete Gaussian has a law of its own."""
    delta = target_delta(UNITS["yelp"])
    discrete = discrete_gaussian_sigma(epsilon, delta)
    assert discrete == pytest.approx(sigma, rel=6e-4)
    event, less = DiscreteGaussian(discrete, 1), DiscreteGaussian(discrete * (1 - 1e-4), 1)
    assert cost(SelfComposed(event, 10), delta).epsilon <= epsilon
    assert cost(SelfComposed(less, 10), delta).epsilon > epsilon


@pytest.mark.parametrize(("sigma", "epsilon"), [(15.34, 1.0045), (8.03, 2.0024), (4.24, 4.0053)])
def test_golden_the_printed_yelp_noise_is_too_little(sigma: float, epsilon: float) -> None:
    delta = target_delta(UNITS["yelp"])
    assert cost(SelfComposed(Gaussian(sigma), 10), delta).epsilon == pytest.approx(
        epsilon, abs=5e-5
    )


@pytest.mark.slow
def test_dp_sgd_noise() -> None:
    noise = least_noise(
        lambda z: SelfComposed(PoissonSubsampledGaussian(0.01, z), 1000), 3.71, 1e-6
    )
    assert noise == pytest.approx(0.8, abs=1e-3)
    step = PoissonSubsampledGaussian(0.01, noise)
    assert 3.70 < cost(SelfComposed(step, 1000), 1e-6).epsilon <= 3.71
    whole = least_noise(lambda z: SelfComposed(PoissonSubsampledGaussian(1.0, z), 4), 2, 1e-6)
    assert whole == pytest.approx(2 * noise_multiplier(2, 1e-6, count=1), rel=1e-5)


# Private prediction: rho = r (1/2 (c / (s tau))^2 + 2 (1 / (s sigma))^2).
PLAN = {"r": 1500, "tau": 2.0, "s": 255, "c": 10.0, "sigma": 0.2}


def private_prediction(r: float, tau: float, s: float, c: float, sigma: float) -> Event:
    token = ExponentialMechanism(2 * c / (s * tau))
    return SelfComposed(Composed((token, AboveThreshold(2 / (s * sigma)))), int(r))


def with_free(name: str) -> Callable[[float], Event]:
    return lambda x: private_prediction(**{**PLAN, name: x})


@pytest.mark.parametrize(
    ("name", "bracket", "increasing"),
    [("c", (1e-3, 1e3), True), ("sigma", (1e-3, 1e4), False)],
)
def test_a_real_parameter_of_private_prediction_can_be_free(
    name: str, bracket: tuple[float, float], increasing: bool
) -> None:
    make, delta = with_free(name), 1e-6
    # A target just over what the plan costs leads back to the plan's own value.
    target = cost(make(PLAN[name]), delta).epsilon
    found = calibrate(make, target, delta, bracket=bracket, increasing=increasing)
    assert found == pytest.approx(PLAN[name], rel=1e-5)
    assert cost(make(found), delta).epsilon <= target
    worse = found * (1 + 1e-5) if increasing else found * (1 - 1e-5)
    assert cost(make(worse), delta).epsilon > target


@pytest.mark.parametrize(("name", "high", "increasing"), [("r", 10**9, True), ("s", 10**5, False)])
def test_integers_are_the_last_valid_ones(name: str, high: int, increasing: bool) -> None:
    make = with_free(name)
    for target in (0.7, 10.0):
        found = calibrate(
            make, target, 1e-6, bracket=(1, high), increasing=increasing, integer=True
        )
        assert isinstance(found, int)
        worse = found + 1 if increasing else found - 1
        assert cost(make(found), 1e-6).epsilon <= target < cost(make(worse), 1e-6).epsilon


def test_the_golden_number_of_tokens() -> None:
    def tokens(r: float) -> Event:
        return SelfComposed(ExponentialMechanism(20 / (255 * 2)), int(r))

    r = calibrate(tokens, 5.2204, 1e-6, bracket=(1, 1e7), increasing=True, integer=True)
    # 2,600 by zCDP.
    assert r == pytest.approx(2906, rel=0.01)


def test_a_bracket_that_is_valid_throughout_gives_its_end() -> None:
    assert calibrate(Gaussian, 50, 1e-6, bracket=(10, 20), increasing=False) == 10
    found = calibrate(with_free("r"), 50, 1e-6, bracket=(1, 7), increasing=True, integer=True)
    assert found == 7


def test_pure_mechanisms_at_delta_zero() -> None:
    scale = calibrate(
        lambda x: Composed((DiscreteLaplace(x, 1), DiscreteLaplace(2 * x, 1))),
        3,
        0,
        bracket=(1e-3, 1e3),
        increasing=False,
    )
    assert scale == pytest.approx(0.5, rel=1e-6) and scale >= 0.5


@pytest.mark.parametrize(
    ("message", "make", "epsilon", "delta", "bracket"),
    [
        ("no value from 1 to 2 reaches epsilon 0.1 at delta 1e-06: 2 still costs", Gaussian, 0.1,
         1e-6, (1, 2)),
        ("no value from 1 to 10 reaches epsilon 1 at delta 0: 10 still costs inf", Gaussian, 1, 0,
         (1, 10)),
        ("target_epsilon must be", Gaussian, 0, 1e-6, (1, 2)),
        ("target_epsilon must be", Gaussian, math.nan, 1e-6, (1, 2)),
        ("delta must be", Gaussian, 1, -1e-6, (1, 2)),
        ("delta must be", Gaussian, 1, 1.0, (1, 2)),
        ("bracket must be", Gaussian, 1, 1e-6, (2, 1)),
        ("bracket must be", Gaussian, 1, 1e-6, (0, 1)),
    ],
)  # fmt: skip
def test_impossible_and_bad_targets(message, make, epsilon, delta, bracket) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=f"^{message}"):
        calibrate(make, epsilon, delta, bracket=bracket, increasing=False)

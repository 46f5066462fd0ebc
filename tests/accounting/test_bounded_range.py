"""Composed draws of bounded range: never below an exact game, close above it, in closed forms, in
games that are enumerated, and beside computations that share no code with it."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from threading import Barrier

import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting.pld import privacy_loss_distribution as plds
from scipy.stats import binom

from dpray.accounting.accountant import bounds, cost
from dpray.accounting.bounded_range import _Grid, composed_draws, hockey_stick
from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import (
    DiscreteLaplace,
    ExponentialMechanism,
    PoissonSubsampledDraws,
)

Array = npt.NDArray[np.float64]


def first_mass(t: float, eta: float) -> float:
    """Return the mass of the loss t of a draw whose losses are t and t - eta."""
    return (1 - math.exp(t - eta)) / (1 - math.exp(-eta))


def game(epsilon: float, eta: float, draws: int, ts: tuple[float, ...]) -> float:
    """Return delta of the best adaptive choice among `ts`: losses of a game that can be played, so
    a lower bound."""

    @cache
    def value(epsilon: float, left: int) -> float:
        if left == 0:
            return max(0.0, 1 - math.exp(epsilon))
        return max(
            first_mass(t, eta) * value(epsilon - t, left - 1)
            + (1 - first_mass(t, eta)) * value(epsilon - t + eta, left - 1)
            for t in ts
        )

    return value(epsilon, draws)


@pytest.mark.parametrize(("eta", "draws"), [(0.05, 1), (0.5, 2), (3.0, 2), (0.5, 3)])
def test_never_below_a_game_that_can_be_played_and_close_above_it(eta: float, draws: int) -> None:
    ts = tuple(np.linspace(0, eta, 61 if draws < 3 else 25))
    curve = composed_draws(eta, draws)
    epsilons = np.linspace(-0.9, 0.9, 13) * draws * eta
    exact = np.array([game(float(e), eta, draws, ts) for e in epsilons])
    found = curve(epsilons)
    assert np.all(found >= exact * (1 - 1e-12))
    assert np.max(found - exact) < 0.003 * max(1.0, eta)


@pytest.mark.parametrize("draws", [1, 40, 300])
def test_curves_are_convex_in_exp_epsilon_and_end_at_the_pure_epsilon(draws: int) -> None:
    curve = composed_draws(0.2, draws)
    inner = curve.epsilons > -5  # below, a slope of -1 is a difference of numbers near 1
    slopes = np.diff(curve.deltas[inner]) / np.diff(np.exp(curve.epsilons[inner]))
    assert np.all(np.diff(slopes) > -1e-9) and np.all(slopes <= 0)
    assert curve.largest == pytest.approx(draws * 0.2)
    assert np.all(curve(np.array([-30.0])) <= 1) and curve.deltas[-1] < 1e-12


def played(eta: float, draws: int, steps: int) -> tuple[Array, Array]:
    """Return epsilons and deltas of the best game whose every t is one of `steps` + 1: `game`, on a
    grid that needs no interpolation."""
    h = eta / steps
    epsilons = h * np.arange(-draws * steps, draws * steps + 1)
    t = h * np.arange(steps + 1)[:, None]
    p = np.expm1(t - eta) / math.expm1(-eta)
    deltas = np.maximum(0, -np.expm1(epsilons))
    for _ in range(draws):
        below = -np.expm1(epsilons[0] - h * np.arange(steps, 0, -1))
        wide = np.concatenate([below, deltas, np.zeros(steps)])
        shifted = np.lib.stride_tricks.sliding_window_view(wide, len(deltas))
        deltas = (p * shifted[steps::-1] + (1 - p) * shifted[: steps - 1 : -1]).max(axis=0)
    return epsilons, deltas


@pytest.mark.parametrize(
    ("s", "r", "epsilon"), [(127, 31, 0.921), (127, 401, 3.77), (255, 1000, 2.858)]
)
def test_golden_tokens(s: int, r: int, epsilon: float) -> None:
    """Clip bound 10, temperature 2."""
    eta = 20 / (2 * s)
    table = bounds(SelfComposed(ExponentialMechanism(eta), r), 1e-6)
    assert table["pld"] == pytest.approx(epsilon, rel=0.01)
    assert table["pld"] < 0.95 * table["zcdp"]
    if r <= 401:
        epsilons, deltas = played(eta, r, 32 if r < 100 else 4)
        exact = float(np.interp(-1e-6, -deltas, epsilons))
        assert exact <= table["pld"] < exact * 1.02


def test_parts_cost_little_more_than_one_pass() -> None:
    eta, draws = 0.1, 512
    both = _Grid(eta, draws).curve(draws), composed_draws(eta, draws)
    for delta in (1e-2, 1e-6, 1e-9):
        direct, found = (float(np.interp(-delta, -c.deltas, c.epsilons)) for c in both)
        blocks = bounds(SelfComposed(ExponentialMechanism(eta), draws), delta)["pld"]
        assert direct * 0.9999 < min(found, blocks) <= max(found, blocks) < direct * 1.003


@pytest.mark.parametrize(("eta", "draws"), [(20 / 254, 257), (0.01, 5000)])
def test_parts_are_never_below_one_game_that_can_be_played(eta: float, draws: int) -> None:
    """Its draws all have the same loss t, or the one that is 0 in the mean."""
    curve = composed_draws(eta, draws)
    epsilons = np.linspace(curve.epsilons[0], curve.epsilons[0] * -0.9, 40)
    for t in (0.02 * eta, 0.3 * eta, 0.5 * eta, 0.8 * eta):
        p = first_mass(t, eta)
        ups = np.arange(draws + 1)
        losses = ups * t + (draws - ups) * (t - eta)
        log_p = binom.logpmf(ups, draws, p)
        gains = -np.expm1(np.minimum(epsilons[:, None] - losses, 0.0))
        exact = (np.exp(log_p) * gains).sum(axis=1)
        assert np.all(curve(epsilons) >= exact * (1 - 1e-9))


def test_a_long_text_in_parts_costs_no_less_than_in_one_pass_and_little_more() -> None:
    eta, draws = 20 / 254, 300
    one_pass = _Grid(eta, draws).curve(draws)
    for q in (1e-4, 0.3):
        event = PoissonSubsampledDraws(q, eta, draws)
        for exact, found in zip(one_pass.poisson_subsampled(q), event.curves(), strict=True):
            epsilons = exact.epsilons[exact.deltas > 1e-9]
            assert np.all(found(epsilons) >= exact(epsilons) * (1 - 1e-4))
            right = epsilons[epsilons > 0]
            assert np.all(found(right * 1.02) <= exact(right) * 1.001 + 1e-12)


def test_what_comes_first_may_steer_the_draws() -> None:
    """Were the recursion to begin at the curve of a histogram, that is, with the histogram last,
    this game would cost more than is charged: its draws choose t by the histogram's answer."""
    eta, scale, epsilon = 1.0, 5.0, 0.5
    p = 1 / (1 + math.exp(-1 / scale))
    losses, masses = [-1 / scale, 1 / scale], [1 - p, p]
    ts = tuple(np.linspace(0, eta, 401))
    steered = sum(m * game(epsilon - x, eta, 1, ts) for x, m in zip(losses, masses, strict=True))

    def last(t: float) -> float:
        two = [(t, first_mass(t, eta)), (t - eta, 1 - first_mass(t, eta))]
        return sum(
            m * p * max(0.0, 1 - math.exp(epsilon - x - y))
            for (x, m), (y, p) in product(zip(losses, masses, strict=True), two)
        )

    event = Composed((DiscreteLaplace(scale, 1), ExponentialMechanism(eta)))
    charged = bounds(event, steered)["pld"]
    assert max(map(last, ts)) < steered * 0.99
    assert charged >= epsilon * (1 - 1e-9)


# Poisson batches


@pytest.mark.parametrize(
    ("n", "s", "c", "tau", "texts", "epsilon"),
    [
        (4000, 127, 10, 2, 496, 1), (1000, 16, 2, 1, 270, 2), (4000, 64, 2, 1, 139264, 8),
    ],
)  # fmt: skip
def test_golden_texts(n: int, s: int, c: float, tau: float, texts: int, epsilon: float) -> None:
    text = PoissonSubsampledDraws(s / n, 2 * c / (s * tau), 64)
    assert cost(SelfComposed(text, texts), 1e-6).epsilon == pytest.approx(epsilon, rel=0.01)


def test_both_directions_are_the_hockey_sticks_of_the_mixtures() -> None:
    """For one pair of laws that is dominated: the worst single draw at each epsilon."""
    eta, q = 0.8, 0.3
    removing, adding = composed_draws(eta, 1).poisson_subsampled(q)
    epsilons = np.linspace(-0.3, 0.5, 41)
    best_removing, best_adding = np.zeros(41), np.zeros(41)
    for t in np.linspace(0, eta, 201):
        p = np.array([first_mass(t, eta), 1 - first_mass(t, eta)])
        without = p * np.exp([-t, eta - t])
        mixed = (1 - q) * without + q * p
        for i, e in enumerate(np.exp(epsilons)):
            best_removing[i] = max(best_removing[i], np.maximum(mixed - e * without, 0).sum())
            best_adding[i] = max(best_adding[i], np.maximum(without - e * mixed, 0).sum())
    for curve, best in ((removing, best_removing), (adding, best_adding)):
        found = curve(epsilons)
        assert np.all(found >= best - 1e-12) and np.max(found - best) < 1e-4


def test_no_adaptive_game_of_two_texts_of_two_tokens_exceeds_the_claim() -> None:
    """All strategies on a grid, and random ones: a token's t may depend on all that is released
    before it, and who is in a text's batch is known to nobody."""
    eta, q = 0.9, 0.35
    pld = PoissonSubsampledDraws(q, eta, 2).pld(2**-12, 2)
    rng = np.random.default_rng(3)
    deltas = {epsilon: pld.get_delta_for_epsilon(epsilon) for epsilon in (0.1, 0.3, 0.6)}
    worst = dict.fromkeys(deltas, 0.0)
    grid = np.linspace(0, eta, 7)
    for trial in range(1000):
        # One t for every history of answers, in the second text those to the first one, too.
        ts = (
            {k: float(rng.choice(grid)) for n in range(4) for k in product((0, 1), repeat=n)}
            if trial % 2
            else {k: float(grid[trial % 7]) for n in range(4) for k in product((0, 1), repeat=n)}
        )
        with_unit, without = np.zeros(16), np.zeros(16)
        for i, path in enumerate(product((0, 1), repeat=4)):
            worlds = []
            for text in (0, 1):
                P = Q = 1.0
                for token in (2 * text, 2 * text + 1):
                    t = ts[path[:token]]
                    p = first_mass(t, eta)
                    mass, loss = ((p, t), (1 - p, t - eta))[path[token]]
                    P, Q = P * mass, Q * mass * math.exp(-loss)
                worlds.append(((1 - q) * Q + q * P, Q))
            with_unit[i] = worlds[0][0] * worlds[1][0]
            without[i] = worlds[0][1] * worlds[1][1]
        for epsilon in deltas:
            for one, other in ((with_unit, without), (without, with_unit)):
                found = float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
                worst[epsilon] = max(worst[epsilon], found)
    for epsilon, claimed in deltas.items():
        assert 0.6 * claimed < worst[epsilon] <= claimed


@pytest.mark.parametrize(("q", "draws"), [(0.001, 64), (0.5, 1), (1.0, 64)])
def test_wide_ranges_cost_more_than_narrow_ones(q: float, draws: int) -> None:
    """From a range of 0.8 on, curves have nodes that a secret coin brings together."""
    texts = [PoissonSubsampledDraws(q, eta, draws) for eta in (0.4, 0.8, 1.25, 2.0, 5.0, 10.0)]
    epsilons = [cost(SelfComposed(text, 10), 1e-5).epsilon for text in texts]
    assert epsilons[0] > 0 and np.all(np.diff(epsilons) > 0)
    assert all(np.all(text.rdp((1.5, 8.0, 64.0)) > 0) for text in texts)


def test_a_divergence_that_is_not_a_number_bounds_nothing() -> None:
    class Unknown(ExponentialMechanism):
        def rdp(self, orders: tuple[float, ...]) -> Array:
            return np.full(len(orders), np.nan)

    assert bounds(Unknown(0.5), 1e-5)["rdp"] == math.inf


@pytest.mark.parametrize(("q", "eta"), [(1e-4, 3.0), (0.1, 0.3), (0.1, 10.0), (1.0, 3.0)])
def test_renyi_of_a_curve_is_above_what_it_describes(q: float, eta: float) -> None:
    """Two-point laws are draws that the curve bounds: no divergence of theirs is larger."""
    orders = (1.5, 2.0, 8.0, 64.0)
    text = PoissonSubsampledDraws(q, eta, 1)
    t = eta / 2
    p = np.array([first_mass(t, eta), 1 - first_mass(t, eta)])
    without = p * np.exp([-t, eta - t])
    mixed = (1 - q) * without + q * p
    for order, found in zip(orders, text.rdp(orders), strict=True):
        for one, other in ((mixed, without), (without, mixed)):
            exact = math.log(float((one**order * other ** (1 - order)).sum())) / (order - 1)
            assert found >= exact * (1 - 1e-9)


def test_discrete_laplace_has_the_renyi_divergence_of_its_shift() -> None:
    orders = (1.5, 2.0, 8.0)
    for scale, shift in ((1.0, 1), (4.0, 4), (2.5, 7), (3e6, 10**6)):
        found = DiscreteLaplace(scale, shift).rdp(orders)
        if shift < 100:
            x = np.arange(-4000, 4000)
            P = np.exp(-np.abs(x) / scale)
            Q = np.exp(-np.abs(x - shift) / scale)
            ratio = (np.abs(x - shift) - np.abs(x)) / scale
            mass = P / P.sum()
            exact = [math.log((mass * np.exp((a - 1) * ratio)).sum()) / (a - 1) for a in orders]
            assert Q.sum() == pytest.approx(P.sum())
        else:
            exact = list(laplace_rdp(shift / scale, orders))
        np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert DiscreteLaplace(1000, 1000).rdp((2.0,))[0] == pytest.approx(0.62, abs=2e-3)


@pytest.mark.parametrize(
    ("one", "q", "eta"),
    [
        (PoissonSubsampledDraws(1e-7, 1.0, 1), 1e-7, 1.0),
        (PoissonSubsampledDraws(1e-8, 2.0, 1), 1e-8, 2.0),
        (DiscreteLaplace(1e8, 1), 1.0, 2e-8),
    ],
    ids=str,
)
def test_no_rounding_makes_many_tiny_losses_free(one: Event, q: float, eta: float) -> None:
    """Their divergences are below the rounding of a float near 1. They were 0, and so was epsilon,
    where the outputs of two neighbours differ by more than delta."""
    p = first_mass(eta / 2, eta)
    without, moved = p * math.exp(-eta / 2), p * -math.expm1(-eta / 2)
    chi_square = (q * moved) ** 2 / (without * (1 - without))
    orders = (1.1, 2.0, 8.0, 64.0)
    assert np.all(one.rdp(orders) >= np.array(orders) / 2 * chi_square * (1 - 1e-6))
    # By the central limit, the total variation of 10^7 of them is about sqrt(n chi^2 / (2 pi)).
    count, delta = 10**7, 1e-6
    assert math.sqrt(count * chi_square / (2 * math.pi)) > 2 * delta
    assert min(bounds(SelfComposed(one, count), delta).values()) > 0


def laplace_rdp(epsilon: float, orders: tuple[float, ...]) -> Array:
    """Return the Rényi divergences of continuous Laplace noise (Mironov 2017, Table II)."""
    a = np.asarray(orders)
    first = a / (2 * a - 1) * np.exp(epsilon * (a - 1))
    return np.log(first + (a - 1) / (2 * a - 1) * np.exp(-epsilon * a)) / (a - 1)


def test_a_curve_becomes_a_distribution_that_is_no_better() -> None:
    curve = composed_draws(0.3, 20)
    pld = plds.PrivacyLossDistribution(curve.pmf(2**-10))
    for epsilon in (0.0, 0.7, 1.9):
        exact = float(curve(np.array([epsilon]))[0])
        assert exact <= pld.get_delta_for_epsilon(epsilon) * (1 + 1e-9)
        assert pld.get_delta_for_epsilon(epsilon) < exact * 1.02


def test_losses_whose_exponential_is_no_float_are_bounded_all_the_same() -> None:
    text = PoissonSubsampledDraws(0.01, 2.5, 500)
    assert text.pure_epsilon() == pytest.approx(1250 + math.log(0.01))
    assert text.rdp((2.0,))[0] == pytest.approx(2 * 500 * 2.5**2 / 8)
    below = PoissonSubsampledDraws(0.01, 2.5, 275)
    assert 0 < below.rdp((2.0,))[0] < text.rdp((2.0,))[0]
    assert cost(SelfComposed(text, 3), 1e-6).epsilon > cost(below, 1e-6).epsilon > 1


@pytest.mark.parametrize(
    "loss",
    [
        plds.from_gaussian_mechanism(
            0.7, sampling_prob=0.1, value_discretization_interval=1e-3
        ).self_compose(20),
        plds.from_randomized_response(0.3, 2, value_discretization_interval=1e-3),
    ],
)
def test_a_whole_curve_is_the_librarys(loss: plds.PrivacyLossDistribution) -> None:
    epsilons = np.concatenate([np.arange(-4000, 4001, 8) * 1e-3, [50.0]])
    found = hockey_stick(loss, epsilons)
    assert found == pytest.approx(loss.get_delta_for_epsilon(epsilons), rel=1e-12, abs=1e-15)
    assert found[0] > 0.9 and (np.diff(found) <= 1e-12).all()


def test_threads_that_price_at_once_find_the_cost() -> None:
    """Without a lock two threads append the same row, and the curve of more draws is that of fewer,
    for as long as the process lives."""
    eta, draws, threads = 0.0723, 64, 6
    alone = _Grid(eta, draws).curve(draws)
    shared, start = _Grid(eta, draws), Barrier(threads)

    def priced(_: int) -> Array:
        start.wait()
        return shared.curve(draws).deltas

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(priced, range(threads)))
    assert all((each == alone.deltas).all() for each in found)
    assert len(shared.deltas) == draws + 1

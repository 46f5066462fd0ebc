"""Every event: its own bounds, its JSON form, and that composing it any way costs the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as plds
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from dpray.accounting.accountant import bounds, cost
from dpray.accounting.composed_events import Composed, Parallel, SelfComposed, event_from_json
from dpray.accounting.event import Event, canonical_json
from dpray.accounting.events import (
    AboveThreshold,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialMechanism,
    Gaussian,
    PoissonSubsampledDraws,
    PoissonSubsampledGaussian,
)

DELTA = 1e-6
LEAVES = [
    Gaussian(2.3),
    DiscreteLaplace(4.1, 2),
    DiscreteGaussian(5.5, 1),
    ExponentialMechanism(0.3),
    AboveThreshold(0.2),
    PoissonSubsampledGaussian(0.03, 0.9),
    PoissonSubsampledDraws(0.03, 0.1, 20),
]
NESTED = [
    SelfComposed(Composed((ExponentialMechanism(0.04), AboveThreshold(0.03))), 40),
    Composed((DiscreteLaplace(10, 1), SelfComposed(DiscreteGaussian(8, 1), 10))),
]
every_leaf = pytest.mark.parametrize("leaf", LEAVES, ids=lambda e: e.name)
every_event = pytest.mark.parametrize(
    "event", LEAVES + NESTED, ids=lambda e: json.dumps(e.to_json())
)


@every_event
def test_json_replays_to_the_same_event_and_epsilon(event: Event) -> None:
    replayed = event_from_json(json.loads(json.dumps(event.to_json())))
    assert replayed == event
    assert list(event.to_json()) == sorted(event.to_json())
    assert canonical_json(replayed.to_json()) == canonical_json(event.to_json())


@every_leaf
def test_self_composed_looped_and_nested_cost_the_same_to_the_last_bit(leaf: Event) -> None:
    """Bounds are of the terms, in a closed form for Gaussian ones."""
    ways = [
        SelfComposed(leaf, 12),
        Composed((leaf,) * 12),
        SelfComposed(SelfComposed(leaf, 3), 4),
        Composed((SelfComposed(leaf, 5), leaf, SelfComposed(leaf, 6))),
    ]
    assert all(way.terms() == {leaf: 12} for way in ways)
    if isinstance(leaf, Gaussian | DiscreteLaplace):
        tables = [bounds(way, DELTA) for way in ways]
        assert all(table == tables[0] for table in tables)
    assert cost(ways[0], DELTA).epsilon > 1.4 * cost(leaf, DELTA).epsilon


def test_the_order_of_composition_does_not_matter() -> None:
    forward, backward = Composed(tuple(LEAVES)), Composed(tuple(reversed(LEAVES)))
    assert bounds(forward, DELTA) == bounds(backward, DELTA)
    assert cost(forward, DELTA).bound == "pld"


@every_leaf
def test_bounds_of_one_mechanism_agree_with_each_other(leaf: Event) -> None:
    orders = (1.5, 2.0, 8.0, 64.0)
    rdp = leaf.rdp(orders)
    assert np.all(np.diff(rdp) >= 0) and np.all(rdp > 0)
    assert np.all(rdp <= leaf.pure_epsilon() * (1 + 1e-12))
    assert np.all(rdp <= leaf.zcdp_rho() * np.asarray(orders) * (1 + 1e-9))


def test_the_formulas_of_the_bounds() -> None:
    assert ExponentialMechanism(0.5).zcdp_rho() == pytest.approx(0.5**2 / 8)
    assert ExponentialMechanism(0.5).pure_epsilon() == 0.5
    assert AboveThreshold(0.2).zcdp_rho() == pytest.approx(0.2**2 / 2)
    assert Gaussian(2).zcdp_rho() == pytest.approx(1 / 8)
    assert DiscreteGaussian(6, 3).zcdp_rho() == pytest.approx(1 / 8)
    assert DiscreteLaplace(10, 5).pure_epsilon() == 0.5
    assert PoissonSubsampledGaussian(0.5, 1).zcdp_rho() == math.inf
    assert bounds(PoissonSubsampledGaussian(1, 2), DELTA) == pytest.approx(
        bounds(Gaussian(2), DELTA), rel=1e-9
    )


@pytest.mark.parametrize(("sigma", "count"), [(3.0, 1), (4.245, 10)])
def test_discrete_gaussian_uses_its_own_privacy_loss(sigma: float, count: int) -> None:
    """Against the exact law of the sum of the noises, which decides the loss of all draws."""
    reach = math.ceil(14 * sigma)
    x = np.arange(-reach, reach + 1)
    one = np.exp(-(x**2) / (2 * sigma**2))
    one /= one.sum()
    law = np.array([1.0])
    for _ in range(count):
        law = np.convolve(law, one)
    losses = (np.arange(-reach * count, reach * count + 1) + count / 2) / sigma**2

    def delta(epsilon: float) -> float:
        return float(-np.expm1(np.minimum(epsilon - losses, 0)) @ law)

    epsilon = bounds(SelfComposed(DiscreteGaussian(sigma, 1), count), DELTA)["pld"]
    assert delta(epsilon) <= DELTA * (1 + 1e-6)
    assert delta(epsilon * (1 - 1e-3)) > DELTA


@pytest.mark.parametrize("sigma", [0.7, 4.0])
def test_all_sensitivity_on_one_coordinate_is_the_worst_case(sigma: float) -> None:
    for splits in [(1, 1), (2, 1), (1, 1, 1)]:
        split = Composed(tuple(DiscreteGaussian(sigma, k) for k in splits))
        assert (
            cost(split, DELTA).epsilon < cost(DiscreteGaussian(sigma, sum(splits)), DELTA).epsilon
        )


def loss_law(shifts: tuple[int, ...], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The losses of counts that move by `shifts`, and their law, from the noise's own masses."""
    r = math.exp(-1 / scale)
    total = np.ones(1)
    for shift in shifts:
        x = np.arange(-400, 401 + shift)
        one = np.zeros(2 * shift + 1)
        np.add.at(one, abs(x - shift) - abs(x) + shift, (1 - r) / (1 + r) * r ** abs(x))
        total = np.convolve(total, one)
    reach = sum(shifts)
    return np.arange(-reach, reach + 1) / scale, total


def exact_curve(shifts: tuple[int, ...], scale: float, epsilons: np.ndarray) -> np.ndarray:
    losses, law = loss_law(shifts, scale)
    found: np.ndarray = np.maximum(0.0, -np.expm1(epsilons[:, None] - losses)) @ law
    return found


def ways(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to move counts by `total` in all, none of them by more than `most`."""
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        yield from ((first, *rest) for rest in ways(total - first, first))


@pytest.mark.parametrize("scale", [0.4, 2.5])
@pytest.mark.parametrize(("most", "counts"), [(1, 4), (2, 3), (6, 1)])
def test_counts_that_move_by_all_they_may_are_the_worst(
    scale: float, most: int, counts: int
) -> None:
    """Every other way to move them has a curve that is nowhere above; and the event's own is."""
    epsilons = np.linspace(-2, most * counts / scale * 1.05, 200)
    worst = exact_curve((most,) * counts, scale, epsilons)
    for total in range(1, most * counts + 1):
        for shifts in ways(total, most):
            assert (exact_curve(shifts, scale, epsilons) <= worst + 1e-13).all()
    # One count that moves by all is worse, where there are several.
    alone = exact_curve((most * counts,), scale, epsilons)
    assert (alone >= worst - 1e-13).all()
    assert counts == 1 or (alone > worst + 1e-3).any()
    charged = DiscreteLaplace(scale, most).pld(2.0**-12, counts)
    found = charged.get_delta_for_epsilon(epsilons)
    assert (worst <= found + 1e-12).all() and (found <= worst + 1e-3).all()


def test_discrete_laplace_on_a_fine_grid_costs_at_least_its_own_privacy_loss() -> None:
    sensitivity = 65_537
    event = DiscreteLaplace(sensitivity / 2.0, sensitivity)
    exact = plds.from_discrete_laplace_mechanism(
        1.0 / event.scale,
        sensitivity=sensitivity,
        value_discretization_interval=2.0**-13,
        use_connect_dots=True,
    )
    found = event.pld(2.0**-13, 1)
    for delta in (1e-6, 1e-3, 0.1):
        own = exact.get_epsilon_for_delta(delta)
        assert own <= found.get_epsilon_for_delta(delta) <= own + 2.0**-12


def test_discrete_laplace_on_a_grid_of_billions_of_steps_costs_what_laplace_does() -> None:
    event = DiscreteLaplace(0.7 * 23_726_566_000, 23_726_566_000)
    assert event.pure_epsilon() == pytest.approx(1 / 0.7, rel=1e-15)
    for delta in (1e-6, 1e-2):
        epsilon = cost(event, delta).epsilon
        real = 1 / 0.7 + 2 * math.log1p(-delta)  # delta = 1 - exp((epsilon - 1 / scale) / 2)
        assert real <= epsilon <= min(real * 1.00001, event.pure_epsilon())


def test_a_unit_may_meet_another_event_each_time() -> None:
    """Twice in parallel is not twice the worst of them: one that is rarely bad, after one that is
    always a little bad, is worse than either of them twice."""
    rarely, always = PoissonSubsampledDraws(1e-3, 14.0, 1), DiscreteLaplace(1.0, 1)
    mixed = Composed((rarely, always))
    for delta in (1e-4, 1e-6):
        alone = max(cost(SelfComposed(event, 2), delta).epsilon for event in (rarely, always))
        twice = bounds(SelfComposed(Parallel((rarely, always)), 2), delta)
        assert alone + 0.5 < bounds(mixed, delta)["pld"] <= twice["pld"]


@settings(max_examples=25)
@given(q=st.floats(1e-4, 0.9), sigma=st.floats(0.5, 30.0), order=st.floats(1.05, 40.0))
def test_an_order_that_is_not_whole_costs_no_more_than_the_next_whole_one(
    q: float, sigma: float, order: float
) -> None:
    """From both sides: never below the divergence, by quadrature, and never above that of a larger
    order. dp-accounting's own bound was up to 72 times the divergence, or infinite."""
    event = PoissonSubsampledGaussian(q, sigma)
    found, above = event.rdp((order, float(math.ceil(order))))
    x = np.linspace(-12 * sigma, 12 * sigma + order, 200_001)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    density = -0.5 * (x / sigma) ** 2 - math.log(sigma * math.sqrt(2 * math.pi))
    moment = float(logsumexp(order * loss + density)) + math.log(x[1] - x[0])
    assert moment / (order - 1) - 1e-9 <= found <= above * (1 + 1e-9)


def test_golden_whole_orders_are_the_librarys_and_the_others_are_smaller() -> None:
    event = PoissonSubsampledGaussian(0.3, 20.0)
    assert event.rdp((1.5, 1.9, 2.0, 2.5, 3.0)) == pytest.approx(
        [2.2526e-4, 2.2526e-4, 2.2526e-4, 3.0046e-4, 3.3806e-4], rel=2e-4
    )
    assert np.isfinite(PoissonSubsampledGaussian(0.5, 2.0).rdp((1.01, 1.5, 1.8))).all()


def test_equal_values_are_equal_events_whatever_their_type() -> None:
    assert Gaussian(2) == Gaussian(np.float64(2.0))
    assert canonical_json(SelfComposed(Gaussian(2), np.int64(3)).to_json()) == (  # type: ignore[arg-type]
        '{"count":3,"event":{"noise_multiplier":2.0,"type":"gaussian"},"type":"self_composed"}'
    )


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("noise_multiplier", Gaussian),
        ("scale", lambda v: DiscreteLaplace(v, 1)),
        ("sigma", lambda v: DiscreteGaussian(v, 1)),
        ("range", ExponentialMechanism),
        ("epsilon", AboveThreshold),
        ("sampling_probability", lambda v: PoissonSubsampledGaussian(v, 1.0)),
        ("noise_multiplier", lambda v: PoissonSubsampledGaussian(0.1, v)),
    ],
)
def test_a_bad_number_is_refused_by_the_name_of_its_field(field, make) -> None:  # type: ignore[no-untyped-def]
    for bad in (math.nan, math.inf, -1.0, 0.0, True, "1", None):
        with pytest.raises(ValueError, match=f"^{field} must be"):
            make(bad)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("sampling_probability must be at most 1", lambda: PoissonSubsampledGaussian(1.01, 1.0)),
        ("sensitivity must be a positive integer", lambda: DiscreteLaplace(1.0, 1.5)),  # type: ignore[arg-type]
        ("sensitivity must be a positive integer", lambda: DiscreteGaussian(1.0, 0)),
        ("count must be a positive integer", lambda: SelfComposed(Gaussian(1), 0)),
        ("count must be a positive integer", lambda: SelfComposed(Gaussian(1), math.nan)),  # type: ignore[arg-type]
        ("count must be a positive integer", lambda: SelfComposed(Gaussian(1), True)),
        ("event must hold", lambda: SelfComposed("gaussian", 1)),  # type: ignore[arg-type]
        ("events must hold", lambda: Composed(())),
        ("unknown or missing 'type'", lambda: event_from_json({"noise_multiplier": 1.0})),
        ("unknown or missing 'type'", lambda: event_from_json({"type": "free_lunch"})),
        ("has the fields", lambda: event_from_json({"type": "gaussian"})),
        (
            "has the fields",
            lambda: event_from_json({"type": "gaussian", "noise_multiplier": 1.0, "count": 2}),
        ),
    ],
)
def test_what_is_not_an_event_is_refused(message, make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()

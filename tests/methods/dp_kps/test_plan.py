"""DP-KPS's settings and plans: both noises calibrated together, never for more than
`privacy.epsilon`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats
from scipy.optimize import brentq

from dpray.accounting.accountant import cost
from dpray.accounting.events import DiscreteLaplace, Gaussian
from dpray.config.config import Config
from dpray.methods.config import parse_config
from dpray.methods.dp_kps.plan import DpKpsPlan
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.registry import make_plan
from dpray.runs.plan import with_spent
from dpray.types import InputError

DELTA = 1e-5
LABELS = Decimal("0.1")
EPSILONS = [Decimal(hundredths) / 100 for hundredths in range(20, 1001, 75)]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Ten terms a record, so that a unit's sensitivity is 10; no data is there to be opened."""
    words, template = tmp_path / "words.txt", tmp_path / "own.yaml"
    words.write_text("fever\ncough\n")
    template.write_text("user: '{terms}'\n")

    def make(
        epsilon: Decimal, shares: str | None, delta: float = DELTA, unit: int = 1, **method: Any
    ) -> Config:
        return parse_config(
            {
                "data": {
                    "path": "nowhere.jsonl", "label": "label", "labels": ["a", "b"],
                    "public_size": 60, "label_proportions": shares,
                    "unit": "label" if unit > 1 else None, "max_records_per_unit": unit,
                },
                "privacy": {
                    "epsilon": float(epsilon), "epsilon_labels": float(LABELS), "delta": delta,
                    "dataset": "notes",
                },
                "method": {
                    "name": "dp_kps", "vocabulary": str(words), "stop_words": "keep",
                    "template": str(template), **method,
                },
                "engine": {"kind": "none"},
            }
        )  # fmt: skip

    return make


def given(epsilon: Decimal, shares: str | None, keys: str) -> dict[str, float]:
    """Two-digit numbers for the keys that are given, which together use up epsilon."""
    left = epsilon - (LABELS if shares else 0)
    vocabulary = (left / 3).quantize(Decimal("0.01"))
    values = {"epsilon_vocabulary": vocabulary, "epsilon_kde": left - vocabulary}
    return {f"epsilon_{key}": float(values[f"epsilon_{key}"]) for key in keys.split()}


def check(plan: DpKpsPlan, epsilon: Decimal, slack: float) -> None:
    cost = plan.cost
    assert float(epsilon) * (1 - slack) <= cost.epsilon <= float(epsilon)
    assert cost.delta == plan.config.privacy.delta


RFF = {"estimator": "rff", "sampling": "iterative", "ensemble": "linear"}
MANY_TERMS = {"phrases_per_record": 10}
"""With only a few counts, the joint cost is nearly the sum of the shares."""

GAUSSIAN = {"estimator": "rff", "noise": "gaussian"}


@pytest.mark.parametrize(("method", "shares"), [({}, None), ({}, "measured"), (RFF, "measured")])
@pytest.mark.parametrize("keys", ["", "vocabulary", "kde", "vocabulary kde"])
def test_at_delta_0_a_plan_costs_the_sum_of_its_shares(
    config: Callable[..., Config], method: dict[str, Any], keys: str, shares: str | None
) -> None:
    for epsilon in EPSILONS:
        plan = make_plan(config(epsilon, shares, 0.0, **method | given(epsilon, shares, keys)))
        check(plan, epsilon, 1e-13)
        assert plan.cost.bound == "basic"
        assert 1.0 <= plan.method.noise_factor < 1 + 1e-12


@pytest.mark.parametrize(
    ("epsilon", "method", "shares", "keys"),
    [
        (Decimal("0.45"), MANY_TERMS, None, ""),
        (Decimal("7.95"), MANY_TERMS, "measured", "vocabulary kde"),
        (Decimal("7.95"), RFF, "measured", ""),
        (Decimal("0.45"), GAUSSIAN, "measured", "vocabulary kde"),
        (Decimal("7.95"), GAUSSIAN, None, ""),
    ],
)
def test_both_noises_are_calibrated_together(
    config: Callable[..., Config],
    epsilon: Decimal,
    method: dict[str, Any],
    shares: str | None,
    keys: str,
) -> None:
    """To a relative 1e-6, on the safe side, with a common factor."""
    plan = make_plan(config(epsilon, shares, **method | given(epsilon, shares, keys)))
    check(plan, epsilon, 1e-5)
    alone = replace(plan.method, noise_factor=1.0)
    factor = plan.method.noise_factor
    assert factor < 1
    assert plan.method.vocabulary.scale == pytest.approx(factor * alone.vocabulary.scale)
    assert plan.method.kde.scale == pytest.approx(factor * alone.kde.scale)
    assert cost(with_spent(plan.config, alone.dp_event), DELTA).epsilon < float(epsilon)


def exact_epsilon(plan: DpKpsPlan) -> float:
    """The epsilon at delta of a plan's counts and, where there are some, its Gaussian features, on
    no grid: a record's losses in S counts are sums of whole numbers over the scale."""
    terms = plan.dp_event.terms()
    losses, law, mu = np.zeros(1), np.ones(1), None
    for event, count in terms.items():
        if isinstance(event, Gaussian):
            mu = math.sqrt(count) / event.noise_multiplier
            continue
        assert isinstance(event, DiscreteLaplace) and event.sensitivity == 1
        up = 1 / (1 + math.exp(-1 / event.scale))
        ups = np.arange(count + 1)
        more = (2 * ups - count) / event.scale
        losses = np.add.outer(losses, more).ravel()
        law = np.outer(law, stats.binom.pmf(ups, count, up)).ravel()

    def delta(epsilon: float) -> float:
        left = epsilon - losses
        if mu is None:
            return float(np.maximum(0.0, -np.expm1(left)) @ law)
        high, low = stats.norm.cdf(mu / 2 - left / mu), stats.norm.cdf(-mu / 2 - left / mu)
        return float((high - np.exp(left) * low) @ law)

    return float(brentq(lambda epsilon: delta(epsilon) - 1e-6, 0, 50, xtol=1e-12))


@pytest.mark.parametrize(
    ("epsilon", "method", "golden"), [(2, {}, 1.79), (2, GAUSSIAN, 1.63), (8, GAUSSIAN, 7.00)]
)
def test_golden_both_together_cost_less_than_their_sum(
    config: Callable[..., Config], epsilon: int, method: dict[str, Any], golden: float
) -> None:
    """The noise of eps/2 for the vocabulary and eps/2 for the densities, S = 10, delta 1e-6."""
    plan = make_plan(config(Decimal(epsilon), None, 1e-6, **MANY_TERMS | method))
    alone = replace(plan, method=replace(plan.method, noise_factor=1.0))
    assert alone.cost.epsilon == pytest.approx(golden, rel=0.01)
    for each in (alone, plan):
        exact = exact_epsilon(each)
        assert exact <= each.cost.epsilon <= exact * 1.001


def test_a_unit_of_several_records_pays_for_all_of_them(config: Callable[..., Config]) -> None:
    """Counts move by k each: k times the noise, but for the grid of whole numbers."""
    for method in ({}, GAUSSIAN):
        one, three = (make_plan(config(Decimal(2), None, unit=k, **method)).method for k in (1, 3))
        assert three.vocabulary.scale == pytest.approx(3 * one.vocabulary.scale, rel=0.02)
        assert three.kde.scale == pytest.approx(3 * one.kde.scale, rel=0.02)


def test_gaussian_noise_needs_a_delta(config: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match=r"^privacy\.delta: must be above 0"):
        make_plan(config(Decimal(2), None, 0.0, **GAUSSIAN))


def test_measured_labels_are_taken_off_before_the_rest_is_shared(
    config: Callable[..., Config],
) -> None:
    method = make_plan(config(Decimal("4.2"), "measured")).method
    assert (method.epsilon_vocabulary, method.epsilon_kde) == (2.05, 2.05)
    too_much = config(Decimal(2), "measured", epsilon_vocabulary=1.0, epsilon_kde=1.0)
    with pytest.raises(InputError, match=r"privacy\.epsilon 2 less privacy\.epsilon_labels 0\.1"):
        make_plan(too_much)


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_noise_that_is_too_large_is_refused_before_it_is_charged(
    config: Callable[..., Config], noise: str
) -> None:
    method = {"estimator": "rff", "noise": noise, "features": 10**8, "epsilon_kde": 1e-9}
    with pytest.raises(InputError, match=r"features is too large for integer noise"):
        make_plan(config(Decimal(1), None, **method))


def changed(config: Config, section: str, **values: Any) -> Config:
    """Return the configuration with values that no file can set."""
    updated = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: updated})


def test_an_epsilon_too_small_for_integer_noise_is_refused_before_it_is_charged(
    config: Callable[..., Config],
) -> None:
    refused = r"^privacy\.epsilon: scale must be .* at most 2\^52"
    for epsilon in (1e-16, 5e-324):
        with pytest.raises(InputError, match=refused):
            make_plan(changed(config(Decimal(1), None, 0.0), "privacy", epsilon=epsilon))
    one = changed(config(Decimal(1), None, 0.0, **RFF), "method", epsilon_vocabulary=1e-16)
    with pytest.raises(InputError, match=refused):
        make_plan(one)
    with pytest.raises(InputError, match=r"^privacy\.epsilon_labels: scale must be"):
        make_plan(changed(config(Decimal(1), "measured"), "privacy", epsilon_labels=1e-16))


def test_shares_below_the_last_digit_of_epsilon_have_a_plan(config: Callable[..., Config]) -> None:
    """The sum of the decimals rounds down and that of the floats up, until the noise is larger by
    half."""
    shares = changed(config(Decimal(600), "measured", 0.0), "privacy", epsilon_labels=599.94)
    plan = make_plan(changed(shares, "method", epsilon_vocabulary=5e-14, epsilon_kde=5e-14))
    assert plan.cost.epsilon <= 599.94 and 1 < plan.method.noise_factor <= 4


def settings(**keys: Any) -> DpKpsSettings:
    return DpKpsSettings.model_validate({"name": "dp_kps", "vocabulary": "terms.txt", **keys})


def sharing(vocabulary: float | None, kde: float | None) -> DpKpsSettings:
    return settings(epsilon_vocabulary=vocabulary, epsilon_kde=kde)


@pytest.mark.parametrize(
    ("vocabulary", "kde", "total", "labels", "expected"),
    [
        (None, None, 4.2, 0.1, (2.05, 2.05, 4.2)),
        (0.1, None, 0.3, 0.0, (0.1, 0.2, 0.3)),
        (None, 0.1, 0.3, 0.0, (0.2, 0.1, 0.3)),
        (0.1, 0.2, 0.3, 0.0, (0.1, 0.2, 0.3)),
        (0.1, 0.2, 5.0, 0.3, (0.1, 0.2, 0.6)),
        (0.1, None, 0.4, 0.1, (0.1, 0.2, 0.4)),
        (None, 0.7, 1.1, 0.3, (0.1, 0.7, 1.1)),
    ],
)
def test_epsilon_is_shared_out_in_decimals(
    vocabulary: float | None,
    kde: float | None,
    total: float,
    labels: float,
    expected: tuple[float, float, float],
) -> None:
    assert sharing(vocabulary, kde).epsilons(total, labels) == expected


@pytest.mark.parametrize(
    ("vocabulary", "kde", "total", "labels"),
    [
        (6.0, None, 6.0, 0.0),
        (None, 7.0, 6.0, 0.0),
        (0.1, 0.2000000000001, 0.3, 0.0),
        (0.1, 0.2, 0.3, 1e-9),
        (0.2, None, 0.3, 0.1),
        (None, 0.2, 0.3, 0.1),
    ],
)
def test_what_is_over_by_any_digit_is_refused(
    vocabulary: float | None, kde: float | None, total: float, labels: float
) -> None:
    with pytest.raises(
        InputError, match=r"^method\.epsilon_vocabulary and .* privacy\.epsilon [06]"
    ):
        sharing(vocabulary, kde).epsilons(total, labels)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"noise": "gaussian"}, "noise"),
        ({"sampling": "iterative"}, "sampling"),
        ({"estimator": "rff", "sampling": "iterative", "bandwidth": 0.05}, "bandwidth"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        settings(**change)


@pytest.mark.parametrize(("records", "warned"), [(8_000, True), (900_000, False)])
def test_a_plan_says_from_how_many_records_on_fourier_features_carry(
    config: Callable[..., Config], records: int, warned: bool
) -> None:
    """Two hundred standard deviations of one density's noise, which does not depend on n."""
    made = config(Decimal("7.95"), None, **RFF | {"sequence_length": 10})
    data = made.data.model_copy(update={"public_size": records})
    plan = make_plan(made.model_copy(update={"data": data}))
    from_on = plan.least_records
    assert from_on is not None and from_on - 1 < 200 * plan.method.density_noise_std <= from_on
    assert f"{from_on:,} records" in plan.lines()["densities"]
    found = [each for each in plan.summary()["warnings"] if each.startswith("method.estimator: ")]
    assert bool(found) is warned, found
    exact = make_plan(config(Decimal("7.95"), None))
    assert exact.least_records is None and "carry" not in exact.lines()["densities"]

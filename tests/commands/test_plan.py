"""`dpray plan` describes a plan's mechanisms in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import dpray
from dpray.accounting.composed_events import Composed, Parallel, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import DiscreteLaplace, ExponentialMechanism, Gaussian
from dpray.commands.plan import _mechanism_in_words, _place_in_words
from dpray.methods.config import parse_config
from dpray.report.tables import person_in_words
from dpray.runs.plan import group_delta, guarantee_of


def test_mechanisms_are_named_in_words() -> None:
    draw, count = ExponentialMechanism(0.5), DiscreteLaplace(1.0, 1)
    for event, words in {
        draw: "exponential mechanism",
        Parallel((SelfComposed(draw, 3), SelfComposed(draw, 5))): (
            "the most expensive of 3 x exponential mechanism and 5 x exponential mechanism"
        ),
        Parallel((draw, ExponentialMechanism(0.7))): "exponential mechanism",
        SelfComposed(Composed((Gaussian(2.0), count)), 3): "3 x (Gaussian and discrete Laplace)",
    }.items():
        assert isinstance(event, Event)
        assert _mechanism_in_words(event.to_json()) == words


@hypothesis_settings(max_examples=30)
@given(st.floats(1e-3, 20), st.floats(1e-12, 1e-2) | st.just(0.0), st.integers(1, 60))
def test_the_delta_of_a_group_is_never_too_small(epsilon: float, delta: float, n: int) -> None:
    exact = Fraction(delta) * sum(Fraction(math.exp(epsilon)) ** i for i in range(n))
    found = group_delta(epsilon, delta, n)
    assert found >= min(exact * (1 - Fraction(1, 10**6)), 1)
    assert found == 1 or found <= exact * (1 + Fraction(1, 10**6))


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        (None, "for example, (2, 3.8e-06)-DP with 2 records, no guarantee with"),
        ("who", "is one unit, with at most 1 of its records; further ones are left out"),
    ],
)
def test_a_plan_says_what_the_guarantee_is_for_a_person(
    settings: Callable[..., dict[str, Any]], sequences: dict[str, Any], unit: str | None, words: str
) -> None:
    config = parse_config(
        settings(
            **sequences | {"privacy__epsilon": 1.0, "privacy__delta": 1e-6, "data__unit": unit}
        )
    )
    assert words in person_in_words(guarantee_of(dpray.plan(config)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actors": 4, "cpus_per_actor": 2, "gpus_per_actor": 1}, "for 1 actor, 2 CPUs and 1 GPU"),
        (
            {},
            "for 1 actor, 1 CPU and 0.875 GiB (and 1 GPU an engine, if the cluster has GPUs), "
            "3600 s at most",
        ),
        ({"cpus_per_actor": 0, "gpus_per_actor": 0, "wait": 60}, "for 1 actor, 0.875 GiB, 60 s"),
        (
            {"cpus_per_actor": 0, "gpus_per_actor": 0, "memory_per_actor": 0},
            "for no CPU and no GPU, 3600 s",
        ),
    ],
)
def test_a_plan_says_what_it_asks_of_a_cluster(
    settings: Callable[..., dict[str, Any]], changes: dict[str, Any], words: str
) -> None:
    ours = {f"runtime__{key}": value for key, value in changes.items()}
    config = parse_config(settings(**{"runtime__ray_address": None} | ours))
    assert words in _place_in_words(config)
    assert f"uses room for {config.runtime.actors}" in _place_in_words(config)

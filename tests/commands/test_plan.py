"""`dpray plan` describes a plan's mechanisms in words."""

from __future__ import annotations

from dpray.accounting.composed_events import Composed, Parallel, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import DiscreteLaplace, ExponentialMechanism, Gaussian
from dpray.commands.plan import _mechanism_in_words


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

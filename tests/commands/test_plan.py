"""What `dpray plan` says of a plan's mechanisms."""

from __future__ import annotations

from dpray.accounting.composed_events import Composed, Parallel, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import DiscreteLaplace, ExponentialMechanism, Gaussian
from dpray.commands.plan import _in_words


def test_mechanisms_are_named_in_words() -> None:
    draw, count = ExponentialMechanism(0.5), DiscreteLaplace(1.0, 1)
    for event, words in {
        draw: "exponential mechanism",
        Parallel((SelfComposed(draw, 3), SelfComposed(draw, 5))): (
            "the dearest of 3 x exponential mechanism, 5 x exponential mechanism"
        ),
        Parallel((draw, ExponentialMechanism(0.7))): "the dearest of exponential mechanism",
        Composed((Gaussian(2.0), count)): "gaussian and discrete laplace",
    }.items():
        assert isinstance(event, Event)
        assert _in_words(event.to_json()) == words

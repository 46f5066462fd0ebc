"""Lists that are joined: all members, once, and none waits long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dpray.workers.groups import batched_within


def lots_of(events: list[Any]) -> Iterator[list[Any]]:
    """Yield the lots one after the other, and raise those that are exceptions."""
    for event in events:
        if isinstance(event, BaseException):
            raise event
        yield event


def test_outcomes_of_many_lots_are_handed_on_together_and_none_waits_long() -> None:
    times = iter([0, 1, 1.9, 2, 2, 3, 4, 4])
    lots = lots_of([["a"], ["b"], ["c"], [], ["d"], []])
    found = list(batched_within(lots, 512, seconds=2, clock=lambda: next(times)))
    assert found == [["a", "b", "c"], ["d"]]


def test_outcomes_are_handed_on_before_they_are_too_many() -> None:
    lots = lots_of([[n, n] for n in range(5)])
    assert list(map(len, batched_within(lots, 4))) == [4, 4, 2]


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_what_was_finished_before_an_error_is_handed_on_and_the_error_raised(
    error: BaseException,
) -> None:
    finished = batched_within(lots_of([[1], [2], [3], error]), 2)
    assert [next(finished), next(finished)] == [[1, 2], [3]]
    with pytest.raises(type(error)):
        next(finished)


def test_what_could_not_be_taken_is_not_handed_on_again() -> None:
    finished = batched_within(lots_of([[1], [2], [3]]), 1)
    assert next(finished) == [1]
    finished.close()
    assert list(finished) == []

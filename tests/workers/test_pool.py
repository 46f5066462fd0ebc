"""The controller of a pool, stepped against actors that are no processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError

from dpray.engines.base import DeviceLost, LoadFailed, SelectorFailed
from dpray.types import DprayError, InputError, Resumable
from dpray.workers.failures import LostTooOften
from dpray.workers.placement import Place
from dpray.workers.pool import ActorPool, Part, RayActors, ends_run
from dpray.workers.pool_actor import Answer

WAIT = 5.0
LOSSES = 3
LOST = ActorDiedError()
MEMORY = OutOfMemoryError("the node was running low on memory")
UNDELIVERED = ObjectLostError("0" * 56, None, "")  # type: ignore[arg-type]


def _raise(error: Exception) -> None:
    raise error


class Dummy:
    """An actor that does one part of its work a call."""

    def __init__(self, number: int, faults: dict[str, list[Exception]]) -> None:
        self.worker_id, self.faults = f"attempt {number}", faults
        self.parts: list[str] = []
        self.has_ended = self.is_draining = False

    def load(self) -> Answer:
        if self.faults.get("load"):
            raise self.faults["load"].pop(0)
        return Answer(self.worker_id, [], is_ready=True, is_idle=True)

    def take(self, names: str, left: set[str] | None) -> list[str] | None:
        if names == "undelivered":
            return None
        self.parts += [name for name in names.split() if left is None or name in left]
        return list(self.parts)

    def finish(self) -> None:
        self.is_draining = True

    def more(self) -> Answer:
        results = []
        if self.parts:
            name = self.parts.pop(0)
            if self.faults.get(name):
                raise self.faults[name].pop(0)
            results = [(name, f"{name} by {self.worker_id}")]
        is_ready = not self.parts
        return Answer(self.worker_id, results, is_ready, is_ready and self.is_draining)  # type: ignore[arg-type]


class Dummies(RayActors):
    """`faults` are raised by the actors that come to these parts, one after the other. Actors that
    are `held` answer nothing."""

    def __init__(self, faults: dict[str, list[Exception]] | None = None) -> None:
        super().__init__(None, lambda: None)
        self.faults = faults or {}
        self.made: list[Dummy] = []
        self.held: set[int] = set()
        self.taken: Counter[str] = Counter()

    def start(self) -> Dummy:
        self.made.append(Dummy(len(self.made), self.faults))
        return self.made[-1]

    def call(self, actor: Dummy, method: str, *arguments: Any) -> tuple[Dummy, Callable[[], Any]]:
        assert not actor.has_ended
        if method == "take":
            self.taken.update(arguments[-1] or arguments[0].split())
            names = actor.take(*arguments)
            return actor, lambda: names if names is not None else _raise(UNDELIVERED)
        if method == "finish":
            actor.finish()
        return actor, getattr(actor, method)

    def first_done(self, calls: Sequence[Any], seconds: float) -> Any:
        waiting = (call for call in calls if self.made.index(call[0]) not in self.held)
        return next(waiting, None)

    def result(self, call: Any) -> Any:
        assert not call[0].has_ended, "nobody reads what a lost actor sends later"
        return call[1]()

    def end(self, actor: Dummy) -> None:
        actor.has_ended = True

    def living(self) -> int:
        return sum(not actor.has_ended for actor in self.made)


def work(*names: str) -> list[Part]:
    return [Part((each,)) for each in names]


def done(
    actors: Dummies, queue: list[Part], size: int = 1, losses: int = LOSSES
) -> tuple[list[Any], Exception | None]:
    """Return the parts whose outcomes came, and the error at the end."""
    found: list[Any] = []
    try:
        for results in ActorPool(actors, losses, size, WAIT).run(queue):
            found += [name for name, _ in results]
    except Exception as error:
        return found, error
    finally:
        assert actors.living() == 0
    return found, None


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_part_comes_once(size: int) -> None:
    actors = Dummies()
    found, error = done(actors, work("a b", "c", "d e f"), size)
    assert error is None and sorted(found) == list("abcdef")
    assert len(actors.made) == min(size, 3), "no more actors than parts"


def test_no_work_waits_for_a_machine_and_the_pool_for_no_actor_without_one() -> None:
    actors = Dummies()
    actors.held = {0, 2}
    steps = ActorPool(actors, LOSSES, 3, WAIT).run(work("a", "b", "c", "d"))
    assert next(steps) == [] and not actors.taken
    found = [name for results in steps for name, _ in results]
    assert found == ["a", "b", "c", "d"] and actors.living() == 0
    assert actors.made[0].parts == actors.made[2].parts == []


def test_a_pool_without_an_actor_waits_no_longer_than_it_may() -> None:
    """Its only actor's machine was lost, and no other one comes."""
    actors = Dummies({"b": [LOST]})
    actors.held = {1}
    steps = ActorPool(actors, LOSSES, 1, WAIT).run(work("a", "b", "c"))
    found: list[str] = []

    def all_steps() -> None:
        for results in steps:
            found.extend(name for name, _ in results or [("", "")])

    with pytest.raises(Resumable, match=r"waited for an actor for 5 s \(runtime\.wait\)"):
        all_steps()
    assert found[-5:] == [""] * 5 and {*found} == {"a", ""} and actors.living() == 0


def test_an_actor_ends_when_there_is_no_work_for_it() -> None:
    actors = Dummies()
    actors.held = {1}
    steps = ActorPool(actors, LOSSES, 2, WAIT).run(work("a", "b c"))
    while not actors.taken["b"]:
        next(steps)
    assert actors.living() == 2
    next(steps)
    assert actors.living() == 1, "the one that never came"
    steps.close()
    assert actors.living() == 0


def test_each_actor_whose_work_others_take_over_is_told() -> None:
    told: list[tuple[str, Exception]] = []
    actors = Dummies({"b": [LOST]})
    pool = ActorPool(actors, LOSSES, 1, WAIT, on_loss=lambda *loss: told.append(loss))
    assert sorted(name for lot in pool.run(work("a b")) for name, _ in lot) == ["a", "b"]
    assert told == [("attempt 0", LOST)]


def test_an_actor_that_is_kept_does_the_next_run() -> None:
    actors = Dummies()
    pool = ActorPool(actors, LOSSES, 2, WAIT, keeps_actors=True)
    for run in ("a", "b"):
        results = [each for lot in pool.run(work(run, f"{run}2")) for each in lot]
        assert [name for name, _ in results] == [run, f"{run}2"]
    assert len(actors.made) == actors.living() == 2
    pool.close()
    assert actors.living() == 0


def test_what_a_lost_actor_leaves_is_done_by_another_one_and_nothing_else_twice() -> None:
    actors = Dummies({"b": [LOST], "e": [LOST, LOST]})
    found, error = done(actors, work("a b c", "d", "e"))
    assert error is None and sorted(found) == list("abcde")
    assert actors.taken == Counter(a=1, b=2, c=2, d=1, e=3)
    assert len(actors.made) == 4


def test_work_that_is_repeated_comes_last() -> None:
    actors = Dummies({"a": [LOST]})
    assert done(actors, work("a", "b", "c"))[0] == ["b", "c", "a"]


@pytest.mark.parametrize("error", [LOST, MEMORY, DeviceLost("the GPU is gone")])
def test_work_that_is_lost_too_often_is_left_out(error: Exception) -> None:
    actors = Dummies({"b": [error] * 9})
    found, ended = done(actors, work("a b", "c", "d"), size=2)
    assert sorted(found) == ["a", "c", "d"]
    assert isinstance(ended, LostTooOften) and ended.last is error
    assert actors.taken["b"] == 3


def test_actors_that_only_die_are_given_up() -> None:
    actors = Dummies({"load": [LOST] * 99})
    found, error = done(actors, work("a", "b"), size=2)
    assert found == [] and error is LOST and not actors.taken
    assert len(actors.made) == 2 * 3


def test_an_answer_sets_the_losses_of_a_slot_back() -> None:
    actors = Dummies({name: [LOST] for name in "abc"})
    found, error = done(actors, work("x a", "y b", "z c"), losses=2)
    assert error is None and sorted(found) == list("abcxyz")


@pytest.mark.parametrize("error", [DprayError("ours"), KeyError(5), SelectorFailed("it")])
def test_what_a_worker_raises_ends_the_run_at_once(error: Exception) -> None:
    actors = Dummies({"a": [error]})
    assert done(actors, work("a", "b")) == ([], error)
    assert actors.taken == Counter(a=1)


def test_an_engine_that_cannot_be_made_ends_the_run() -> None:
    error = InputError("no such folder")
    actors = Dummies({"load": [error]})
    assert done(actors, work("a")) == ([], error) and len(actors.made) == 1


def test_work_whose_arguments_are_lost_on_their_way_costs_no_actor() -> None:
    actors = Dummies()
    found, error = done(actors, work("a", "undelivered", "b"))
    assert found == ["a", "b"] and error is UNDELIVERED
    assert len(actors.made) == 1


@pytest.mark.parametrize(
    ("error", "has_run", "ends"),
    [
        (LOST, False, False),
        (MEMORY, False, False),
        (LoadFailed("there is no GPU"), True, False),
        (LoadFailed("there is no GPU"), False, True),
        (SelectorFailed("it"), True, True),
    ],
)
def test_an_engine_that_fails_in_the_first_place_ends_the_run(
    error: Exception, has_run: bool, ends: bool
) -> None:
    """`tests/faults/test_table.py` has all that may be repeated."""
    assert ends_run(error, has_run) == ends


class Started:
    """A remote class, which notes where its actors are started."""

    def __init__(self) -> None:
        self.places: list[Any] = []

    def remote(self, load: Any, place: Any) -> int:
        self.places.append(place)
        return len(self.places)


def test_the_first_actors_and_what_replaces_them_have_the_places_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("ray.kill", killed.append)
    started, place = Started(), Place(None, 0, 1.0, 0.0)
    actors = RayActors(started, lambda: None, places=[place])
    first = actors.start()
    actors.start()
    actors.end(first)
    actors.start()
    assert started.places == [place, None, place] and killed == [first]


def test_a_place_that_nothing_needs_any_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then an autoscaler can take its machine away while other actors work."""
    monkeypatch.setattr("ray.kill", lambda actor: None)
    left: list[Place] = []

    class Placement:
        def leave(self, place: Place) -> bool:
            left.append(place)
            return True

    monkeypatch.setattr("dpray.workers.pool.run_placement", Placement)
    started, place = Started(), Place(None, 0, 1.0, 0.0)
    actors = RayActors(started, lambda: None, places=[place])
    actors.leave(actors.start())
    assert left == [place]
    actors.start()
    assert started.places == [place, None]


def test_an_actor_without_work_leaves_while_others_work() -> None:
    """As `ActorPool` asks for it, and not for one that is replaced."""
    left: list[Dummy] = []

    class Leaving(Dummies):
        def leave(self, actor: Dummy) -> None:
            left.append(actor)
            super().leave(actor)

    actors = Leaving({"b": [LOST]})
    pool = ActorPool(actors, LOSSES, 2, WAIT)
    found = [name for results in pool.run([Part(("a",)), Part(("b",))]) for name, _ in results]
    assert sorted(found) == ["a", "b"]
    assert len(left) == 2 < len(actors.made)

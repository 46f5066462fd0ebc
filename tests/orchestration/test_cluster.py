"""What Ray's errors mean, and what it is not told."""

from __future__ import annotations

import pytest
from ray.data._internal import stats
from ray.exceptions import ActorDiedError, RayTaskError

from dpray.orchestration.cluster import (
    COUNTED_BY,
    find_error,
    keep_counts_here,
    start_ray,
    was_lost,
)
from dpray.types import DprayError, InputError


def wrapped(error: Exception) -> Exception:
    """As Ray raises what a task raised."""
    found: Exception = RayTaskError("f", "Traceback\n  of several\nlines", error)
    return found.as_instanceof_cause()  # type: ignore[attr-defined,no-any-return]


def test_an_error_of_ours_is_found_without_rays_wrapper() -> None:
    ours = InputError("method.template: no")
    outer = RuntimeError("outer")
    outer.__cause__ = wrapped(ours)
    for error in (ours, wrapped(ours), outer, wrapped(wrapped(ours))):
        assert find_error(error, DprayError) is ours
    assert find_error(wrapped(ValueError("private")), DprayError) is None


@pytest.mark.parametrize(("error", "lost"), [(ActorDiedError(), True), (ValueError("x"), False)])
def test_what_is_lost_is_told_from_what_raised(error: Exception, lost: bool) -> None:
    assert was_lost(error) is was_lost(wrapped(error)) is lost


def test_exact_numbers_of_rows_stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new Ray adds to these has to be looked at: does it count private records?"""
    public = {name for name in vars(stats._StatsManager) if not name.startswith("_")}
    assert public == {*COUNTED_BY, "gen_dataset_id_from_stats_actor"}

    told: list[str] = []
    for name in COUNTED_BY:
        was = staticmethod(lambda *_, name=name: told.append(name))
        monkeypatch.setattr(stats._StatsManager, name, was)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    start_ray(None)
    for name in COUNTED_BY:
        getattr(stats._StatsManager, name)("data set", ["operator"], ["tag"], {"total_rows": 37})
    assert told == []

    monkeypatch.delattr(stats._StatsManager, COUNTED_BY[0])
    with pytest.raises(AttributeError, match=COUNTED_BY[0]):
        keep_counts_here()

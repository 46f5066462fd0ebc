"""What Ray's errors mean."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from dpray.orchestration.cluster import find_error, was_lost
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

"""Ray's errors are interpreted, and Ray is not given exact numbers of rows."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.data._internal import stats
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from tenacity import stop_after_attempt, wait_fixed

from dpray.config.sections import RuntimeConfig
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.types import DprayError, InputError, Resumable
from dpray.workers import cluster
from dpray.workers.cluster import (
    COUNTED_BY,
    ended_for_memory,
    find_error,
    keep_counts_here,
    own_errors,
    start_ray,
    threads,
    was_lost,
)


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


# What Ray 2.60 says of a process that its memory monitor ended.
ENDED = "1 worker(s) were killed due to the node running low on memory. Memory on the node was 9GB"
# What it says of one that the kernel may have ended, or anybody else.
KILLED = "Some common causes include: (1) the process was killed by the OOM killer"


def actor_died(message: str) -> ActorDiedError:
    return ActorDiedError(ActorDiedErrorContext(error_message=message, actor_id=b"0" * 16))


@pytest.mark.parametrize(
    ("error", "lost", "for_memory"),
    [
        (ActorDiedError(), True, False),
        (WorkerCrashedError(), True, False),
        (ValueError("x"), False, False),
        (OutOfMemoryError(ENDED), False, True),
        (actor_died(ENDED), False, True),
        (actor_died(KILLED), True, False),
    ],
)
def test_what_is_lost_is_told_from_what_raised_and_from_want_of_memory(
    error: Exception, lost: bool, for_memory: bool
) -> None:
    outer = RuntimeError("Ray Data's")
    outer.__context__ = error
    each_way = [error, outer]
    if not str(error).startswith("The actor died unexpectedly before finishing this task.\n"):
        each_way.append(wrapped(error))  # Ray cannot send the others, with their context, at all
    for each in each_way:
        assert was_lost(each) is lost and ended_for_memory(each) is for_memory


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("named_by", ["the configuration", "RAY_ADDRESS"])
def test_an_address_where_nothing_listens_is_refused_before_ray_tries_for_minutes(
    scheme: str, named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # not listening: the connection is refused
        address = f"{scheme}127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setattr(cluster._wait_for_listener.retry, "stop", stop_after_attempt(2))
        monkeypatch.setattr(cluster._wait_for_listener.retry, "wait", wait_fixed(0))
        monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked"))
        if named_by == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InputError, match=f"no connection to Ray at {address};"):
            start_ray(None if named_by == "RAY_ADDRESS" else address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "HTTPS://host"])
@pytest.mark.parametrize(
    ("key", "given"), [("runtime.ray_address", ""), ("RAY_ADDRESS", None), ("RAY_ADDRESS", "auto")]
)
def test_the_address_of_a_dashboard_is_refused_at_once(
    settings: Callable[..., dict[str, Any]],
    key: str,
    given: str | None,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray job submit` reads RAY_ADDRESS, and wants that address. So does Ray for `auto`."""
    monkeypatch.setattr(cluster, "_wait_for_listener", lambda _: pytest.fail("it was called"))
    monkeypatch.setenv("RAY_ADDRESS", address if key == "RAY_ADDRESS" else "")
    named = given if key == "RAY_ADDRESS" else address
    seen: list[Any] = []
    config = parse_config(settings(runtime={"ray_address": named}))
    for start in (lambda: start_ray(named), lambda: methods.run(config, seen.append)):
        with pytest.raises(
            InputError, match=rf"^{key}: http:// is where a cluster takes jobs"
        ) as refused:
            start()
        # With RAY_ADDRESS as it is, `auto` would be refused again.
        assert ("auto" in str(refused.value)) == (key != "RAY_ADDRESS")
    assert seen == []
    alone = parse_config(settings(runtime={"ray_address": "none"}))
    assert cluster.is_local(alone)


def test_an_address_that_is_none_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="no connection to Ray at host:here;"):
        start_ray("host:here")


def test_an_address_without_a_port_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("ray.init", lambda **named: asked.append(named["address"]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address in ("auto", "local", None):
        start_ray(address)
    assert asked == ["auto", "local", None]


def test_a_machine_too_busy_for_ray_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(
        Resumable, match=r"did not start \(The current node timed out during startup\);"
    ):
        start_ray("local")


def test_exact_numbers_of_rows_stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new Ray adds to these, look whether it counts private records."""
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


def test_an_error_of_ours_comes_without_what_ray_data_adds_to_it() -> None:
    from ray.data._internal.util import _annotate_exception_with_retry_context

    error = _annotate_exception_with_retry_context(
        InputError("a.csv, row 2: the label is not one"), description="apply UDF transform",
        attempts=1, max_attempts=1, total_backoff_s=0.0, exception_str="",
    )  # fmt: skip
    assert "To change retry attempts" in str(error)

    def fails() -> None:
        with own_errors():
            raise wrapped(error)  # type: ignore[arg-type]

    with pytest.raises(InputError) as raised:
        fails()
    assert str(raised.value) == "a.csv, row 2: the label is not one"


@pytest.mark.parametrize(
    ("runtime", "cores", "expected"),
    [
        ({}, [8.0], 8),
        ({"actors": 3}, [8.0], 2),
        ({"actors": 16}, [8.0], 1),
        ({"actors": 16, "cpus_per_actor": 4.0}, [8.0], 4),
        ({"actors": 2}, [64.0, 8.0], 4),
        ({}, [], 1),
    ],
)
def test_a_model_on_a_cpu_has_the_cores_that_the_other_actors_leave(
    runtime: dict[str, Any], cores: list[float], expected: int
) -> None:
    assert threads(RuntimeConfig(**runtime), cores) == expected

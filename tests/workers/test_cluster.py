"""Ray is connected to, and is not given exact numbers of rows."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from ray.data._internal import stats
from tenacity import stop_after_attempt, wait_fixed

from dpray.config.sections import RuntimeConfig
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.types import InputError, Resumable
from dpray.workers import cluster
from dpray.workers.cluster import COUNTED_BY, keep_counts_here, of_threads, start_ray


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


def test_rows_are_gathered_in_one_way_whatever_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.data import DataContext

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("dpray.workers.cluster.keep_counts_here", lambda: None)
    context = DataContext.get_current()
    context.shuffle_strategy = "hash_shuffle"
    start_ray(None)
    assert context.shuffle_strategy.value == "shuffle_v2"


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
    found = of_threads(RuntimeConfig(**runtime), cores, {})
    assert found == {"OMP_NUM_THREADS": str(expected), "OMP_WAIT_POLICY": "passive"}
    assert of_threads(RuntimeConfig(**runtime), cores, {"OMP_NUM_THREADS": "3"}) == {}
    asked = of_threads(RuntimeConfig(**runtime), cores, {"OMP_WAIT_POLICY": "active"})
    assert asked["OMP_WAIT_POLICY"] == "active"

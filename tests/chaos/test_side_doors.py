"""Workers of each method quote a private text when they fail, have no memory left, or are ended by
the kernel or by Ray's memory monitor: the word that all private records hold is nowhere but in the
data after that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.kept import keep
from tests.chaos.recount import recount
from tests.chaos.rehearsed import RECORDS
from tests.chaos.side_doors import assert_closed, shown_on_dashboard, with_faulty_workers
from tests.integration.processes import MARKER, Cluster, Ended, Runs, ray_cluster, short

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1800)]

CASES = [
    ("private_prediction", "rows"),
    ("private_prediction", "decoder"),
    ("aug_pe", "rows"),
    ("aug_pe", "embedder"),
    ("dp_kps", "rows"),
    ("dp_kps", "shard"),
    ("dp_sgd", "rank"),
]

ENDS = {"quotes": (1, 2), "memory": (1, 2, 4), "killed": (0, 4), "monitored": (0, 4)}
"""The exit codes after each fault: a lost worker's work is repeated, or can be."""

ROOM = 4 * 2**30
"""Bytes that a run may take until Ray's memory monitor ends one of its workers."""


@pytest.fixture(scope="module")
def homes() -> Iterator[Path]:
    """The folder for all that the processes write elsewhere: caches and temporary files."""
    with short() as folder:
        for name in ("home", "tmp"):
            (folder / name).mkdir()
        yield folder


def variables(homes: Path) -> dict[str, str]:
    home = homes / "home"
    return {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": str(homes / "tmp")}


@pytest.fixture(scope="module")
def cluster(homes: Path) -> Iterator[Cluster]:
    with closed_cluster(homes) as made:
        yield made


@contextmanager
def closed_cluster(homes: Path, **more: str) -> Iterator[Cluster]:
    """A cluster that spills each object at once, and may dump cores."""
    settings: dict[str, Any] = {
        "cpus": 3,
        "RAY_object_spilling_threshold": "0.0",
        "RAY_min_spilling_size": "1",
        "RAY_metrics_report_interval_ms": "5000",
    }
    settings |= variables(homes) | more
    with short() as folder, ray_cluster(folder, jobs=True, **settings) as made:
        yield made


@pytest.fixture
def full_cluster(homes: Path) -> Iterator[Cluster]:
    """The same, whose memory monitor has room for a run, but not for one that fills the memory."""
    memory = psutil.virtual_memory()
    share = (memory.total - memory.available + ROOM) / memory.total
    assert share < 0.8, "too little memory is free"
    with closed_cluster(homes, RAY_memory_usage_threshold=f"{share:.3f}") as made:
        yield made


@pytest.mark.parametrize("fault", ["quotes", "memory", "killed"])
@pytest.mark.parametrize(("method", "place"), CASES)
def test_a_worker_that_ends_at_a_private_text(
    runs: Callable[..., Runs],
    cluster: Cluster,
    homes: Path,
    method: str,
    place: str,
    fault: str,
) -> None:
    run = with_faulty_workers(runs(data__public_size=RECORDS), method, place, fault)
    assert_held(run, cluster, homes, method, place, fault)


@pytest.mark.parametrize(("method", "place"), CASES)
def test_a_worker_that_rays_memory_monitor_ends(
    runs: Callable[..., Runs], full_cluster: Cluster, homes: Path, method: str, place: str
) -> None:
    run = with_faulty_workers(runs(data__public_size=RECORDS), method, place, "monitored")
    run.cluster = full_cluster
    ended = assert_held(run, full_cluster, homes, method, place, "monitored")
    assert "memory" in ended.err


def assert_held(
    run: Runs, cluster: Cluster, homes: Path, method: str, place: str, fault: str
) -> Ended:
    began = time.time()
    result = "held"
    try:
        ended = run.run(**variables(homes))
        # A machine that others fill up may be short of memory by itself.
        by_monitor = "want of memory" in ended.err or "low on memory" in ended.err
        assert ended.code in ENDS[fault] or (by_monitor and ended.code == 4), ended.err
        assert ended.code == 0 or ended.err.count("\n") == 1, ended.err
        assert run.marker.exists() == (fault in ("killed", "monitored"))
        assert recount(run.url, [run.output]) == []
        assert_closed(cluster, began, homes, run.output)
        assert MARKER.decode() not in shown_on_dashboard(cluster)
        return ended
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        keep(side_door=place, method=method, fault=fault, result=result)

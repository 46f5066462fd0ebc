"""Workers of each method quote a private text when they fail, have no memory left, or are killed
by the kernel: the word that all private records hold is nowhere but in the data after that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.kept import keep
from tests.chaos.recount import recount
from tests.chaos.rehearsed import RECORDS
from tests.integration.processes import MARKER, Cluster, Runs, ray_cluster, short
from tests.integration.side_doors import assert_closed, shown_on_dashboard, with_faulty_workers

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

ENDS = {"quotes": (1, 2), "memory": (1, 2, 4), "killed": (0, 4)}
"""The exit codes after each fault: a lost worker's work is repeated, or can be."""


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
    """One that spills each object at once, and may dump cores."""
    settings: dict[str, Any] = {
        "cpus": 3,
        "RAY_object_spilling_threshold": "0.0",
        "RAY_min_spilling_size": "1",
        "RAY_metrics_report_interval_ms": "5000",
    }
    with short() as folder, ray_cluster(folder, jobs=True, **settings, **variables(homes)) as made:
        yield made


@pytest.mark.parametrize("fault", ENDS)
@pytest.mark.parametrize(("method", "place"), CASES)
def test_a_worker_that_ends_at_a_private_text(
    runs: Callable[..., Runs],
    cluster: Cluster,
    homes: Path,
    method: str,
    place: str,
    fault: str,
) -> None:
    began = time.time()
    run = with_faulty_workers(runs(data__public_size=RECORDS), method, place, fault)
    result = "held"
    try:
        ended = run.run(**variables(homes))
        # A machine that others fill up may be short of memory by itself.
        by_monitor = "want of memory" in ended.err or "low on memory" in ended.err
        assert ended.code in ENDS[fault] or (by_monitor and ended.code == 4), ended.err
        assert ended.code == 0 or ended.err.count("\n") == 1, ended.err
        assert run.marker.exists() == (fault == "killed")
        assert recount(run.url, [run.output]) == []
        assert_closed(cluster, began, homes, run.output)
        assert MARKER.decode() not in shown_on_dashboard(cluster)
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        keep(side_door=place, method=method, fault=fault, result=result)

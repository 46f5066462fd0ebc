"""Memory that does not grow with the data: the driver's, and a reading worker's.

`benchmarks/bench_shards.py` does the same with a million rows.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.integration.processes import TIMEOUT, Cluster, environment

pytestmark = pytest.mark.slow

SIZES = (1_000, 100_000)


def test_neither_the_driver_nor_a_reader_holds_the_rows(cluster: Cluster) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_shards", "--json", *map(str, SIZES)],
        cwd=ROOT,
        env=environment(RAY_ADDRESS=cluster.address),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    small, large = json.loads(ended.stdout)
    # 100,000 rows are ten MB in Arrow and a hundred as Python objects; the growth of the driver,
    # some MB, is of names and of Ray's bookkeeping.
    assert large["peak_mb"] - small["peak_mb"] < 50
    assert large["read_growth_mb"] < 20

"""Memory that does not grow with the data: the driver's, and a reading worker's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dpray.config.config import parse_config
from dpray.mechanisms.partition import new_salt
from dpray.methods.private_prediction.rows import batch_rows
from dpray.registry import make_plan
from tests.integration import shard_driver
from tests.integration.processes import TIMEOUT, Cluster, environment

pytestmark = pytest.mark.slow

SIZES = (1_000, 100_000, 1_000_000)


def test_the_driver_holds_no_rows(cluster: Cluster):
    ended = subprocess.run(
        [sys.executable, shard_driver.__file__, *map(str, SIZES)],
        env=environment(RAY_ADDRESS=cluster.address),
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    small, middle, large = map(json.loads, ended.stdout.splitlines())
    for each, rows in zip((small, middle, large), SIZES, strict=True):
        assert each["rows"] == rows and each["batches"] == each["expected"]
    # Ten times the rows (100 MB of them in Arrow): the growth is of names and of Ray's bookkeeping.
    assert large["peak_mb"] - small["peak_mb"] < 300
    assert large["peak_mb"] - middle["peak_mb"] < 100


def test_a_file_is_read_row_by_row(settings: Callable[..., dict[str, Any]], tmp_path: Path):
    rows = 1_000_000
    path = tmp_path / "many.jsonl"
    with open(path, "w") as file:
        for number in range(rows):
            file.write(f'{{"text": "note {number} of a cough", "label": "a"}}\n')
    config = parse_config(settings(data__path=str(path)))
    plan = make_plan(config).with_salt(new_salt())
    process, read, growth = psutil.Process(), 0, 0
    before = process.memory_info().rss
    for _ in batch_rows(str(path), plan.config.data, plan.template, plan.partition):
        read += 1
        if read % 10_000 == 0:
            growth = max(growth, process.memory_info().rss - before)
    assert read == rows
    # The file is 46 MB, its rows as Python objects ten times that.
    assert growth < 20e6

"""Tests which process of the suite runs a file (`tests/conftest.py`)."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from pathlib import Path

from tests.conftest import LONGEST, ROOT, TOGETHER, name_of, scope_of

FILES = [file for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name != "chaos"]
ON_A_CLUSTER = r'[(\s](cluster: (Cluster|Any)|driver: |accountant: )|usefixtures\("driver"\)'


def test_the_files_that_are_named_are_there_and_each_in_one_process() -> None:
    there = Counter(map(name_of, FILES))
    assert all(there[name] == 1 for name in LONGEST)
    assert sum(map(len, TOGETHER.values())) == len({*chain(*TOGETHER.values())})


def test_the_files_that_share_a_cluster_share_a_process() -> None:
    def shares(file: Path) -> bool:
        text = file.read_text()
        return bool(re.search(ON_A_CLUSTER, text)) and "def cluster(" not in text

    assert {name_of(file) for file in FILES if shares(file)} == {*TOGETHER["cluster"]}


def test_a_process_gets_all_files_that_share_something() -> None:
    files = ["tests/faults/test_kills.py", "tests/integration/test_job.py"]
    assert {scope_of(f"{file}::test[a::b]") for file in files} == {"cluster"}
    for alone in ("tests/chaos/test_kills.py", "tests/workers/test_memory.py"):
        assert scope_of(f"{alone}::test") == alone

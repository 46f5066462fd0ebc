"""A run's finished calls: each is kept once, whatever ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpray.runs.call_cache import Call, CallCache, CallCacheError


def test_a_call_that_was_put_is_there_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    cache = CallCache(path)
    assert cache.get({"a": "1"}) == {} and tuple(cache.totals().values()) == (0, 0, 0)
    cache.put(Call("a", "1", "text\x00 ü\n", 5, 2))
    cache.put(Call("b", "2", "", 7, 0))
    with open(path, "ab") as file:
        file.write(b'["c", "3", "a write that was cut')
    for again in (CallCache(path), CallCache(path)):
        assert again.get({"b": "2", "a": "1", "c": "3"}) == {"a": "text\x00 ü\n", "b": ""}
        assert tuple(again.totals().values()) == (2, 12, 2)
    assert path.stat().st_mode & 0o077 == 0


def test_an_id_stands_for_one_prompt(tmp_path: Path) -> None:
    cache = CallCache(tmp_path / "calls.jsonl")
    cache.put(Call("x/0", "1", "first words", 5, 2))
    cache.put(Call("x/0", "1", "other words", 9, 9))
    assert cache.get({"x/0": "1"}) == {"x/0": "first words"}
    for act in (
        lambda: cache.get({"x/0": "2"}),
        lambda: cache.put(Call("x/0", "2", "text", 1, 1)),
    ):
        with pytest.raises(CallCacheError, match=r"call x/0 .* another") as wrong:
            act()
        assert "words" not in str(wrong.value)
    assert tuple(cache.totals().values()) == (1, 5, 2)


def test_many_threads_share_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    cache = CallCache(path)
    calls = [Call(str(i % 500), "d", "text " * 50, 1, 2) for i in range(1000)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cache.put, calls))
    assert tuple(CallCache(path).totals().values()) == (500, 500, 1000)


def test_a_killed_process_loses_no_call(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dpray.runs.call_cache import Call, CallCache\n"
        "cache = CallCache(Path(sys.argv[1]))\n"
        "for i in range(50):\n"
        "    cache.put(Call(str(i), 'd', f'text {i}', 1, 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "calls.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert CallCache(path).totals()["calls"] == 50


def test_a_file_that_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a cache\n" * 100)
    with pytest.raises(CallCacheError, match="holds no calls"):
        CallCache(tmp_path / "text")

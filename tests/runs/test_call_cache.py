from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dpray.runs.call_cache import CallCache, CallCacheError


def test_what_was_put_is_there_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    cache = CallCache(path)
    assert cache.get({"a": "1"}) == {} and tuple(cache.totals().values()) == (0, 0, 0)
    cache.put("a", "1", "text\x00 ü \udcff", 5, 2)
    cache.put("b", "2", "", 7, 0)
    cache.close()
    again = CallCache(path)
    assert again.get({"b": "2", "a": "1", "c": "3"}) == {"a": "text\x00 ü ?", "b": ""}
    assert tuple(again.totals().values()) == (2, 12, 2)


def test_an_id_stands_for_one_prompt(tmp_path: Path) -> None:
    cache = CallCache(tmp_path / "calls.db")
    cache.put("variation-1-World/0/0", "1", "first words", 5, 2)
    cache.put("variation-1-World/0/0", "1", "other words", 9, 9)
    assert cache.get({"variation-1-World/0/0": "1"}) == {"variation-1-World/0/0": "first words"}
    for act in (
        lambda: cache.get({"variation-1-World/0/0": "2"}),
        lambda: cache.put("variation-1-World/0/0", "2", "text", 1, 1),
    ):
        with pytest.raises(CallCacheError, match=r"call variation-1-World/0/0 .* another") as wrong:
            act()
        assert "words" not in str(wrong.value)
    assert tuple(cache.totals().values()) == (1, 5, 2)


def test_many_calls_and_many_threads(tmp_path: Path) -> None:
    cache = CallCache(tmp_path / "calls.db")
    errors: list[Exception] = []

    def work(thread: int) -> None:
        try:
            for i in range(150):
                cache.put(f"{thread}/{i}", str(i), f"text {i}", 1, 2)
                assert cache.get({f"{thread}/{i}": str(i)})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and tuple(cache.totals().values()) == (1200, 1200, 2400)
    digests = {f"{thread}/{i}": str(i) for thread in range(9) for i in range(150)}
    assert len(cache.get(digests)) == 1200


def test_a_killed_process_loses_no_call(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from dpray.runs.call_cache import CallCache\n"
        "cache = CallCache(sys.argv[1])\n"
        "for i in range(50):\n"
        "    cache.put(str(i), 'd', f'text {i}', 1, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "calls.db"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert CallCache(path).totals()["calls"] == 50


def test_a_file_that_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but a rather long text " * 100)
    with pytest.raises(CallCacheError, match="not a database"):
        CallCache(tmp_path / "text")
    with pytest.raises(CallCacheError, match="unable to open"):
        CallCache(tmp_path / "no" / "folder")
    cache = CallCache(tmp_path / "calls.db")
    cache.close()
    with pytest.raises(CallCacheError, match="closed"):
        cache.get({"a": "1"})
    assert os.path.exists(tmp_path / "calls.db")

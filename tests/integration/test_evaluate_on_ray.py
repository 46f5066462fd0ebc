"""`dpray evaluate` on a real Ray against the same in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.test_evaluate import notes
from tests.integration.processes import MARKER, TIMEOUT, Cluster, end, environment, wait_for

pytestmark = pytest.mark.slow

SMALL_CHUNKS = """
import sys
from dpray.cli import main
from dpray.evaluation import copies

copies.CHUNK_SIZE = 24
main(["evaluate", *sys.argv[1:]])
"""


def start(code: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], cluster: Cluster) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        end(process)
        raise
    assert process.returncode == 0, err
    assert MARKER.decode() not in err
    assert not any(MARKER in path.read_bytes() for path in cluster.logs())
    return out, err


def test_figures_are_the_same_on_ray_though_an_actor_is_killed(
    cluster: Cluster, model_folder: str, tmp_path: Path
):
    sets = {"real": notes(150, 1), "train": notes(120, 2), "synthetic": notes(100, 3)}
    files: list[Any] = []
    for name, records in sets.items():
        path = tmp_path / f"{name}.jsonl"
        rows = [json.dumps({"text": f"{t} {MARKER.decode()}", "label": y}) for t, y in records]
        path.write_text("\n".join(rows))
        files += [f"--{name}", path]
    options = [*files, "--embedder", model_folder, "--seeds", 1]
    on_ray = start(
        SMALL_CHUNKS, *options, "--out", tmp_path / "ray",
        "--ray-address", cluster.address, "--actors", 2,
    )  # fmt: skip
    wait_for(lambda: cluster.workers("EvaluationActor.more"), on_ray)
    cluster.workers("EvaluationActor.more")[0].kill()
    # A process of its own: libraries choose their number of threads when they are loaded.
    here = start(SMALL_CHUNKS, *options, "--out", tmp_path / "here")
    finish(here, cluster)
    finish(on_ray, cluster)

    found, same = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("ray", "here")
    )
    assert_the_same(found, same)
    assert found["copies"]["private_records"] == 120
    wait_for(lambda: not cluster.workers("EvaluationActor"))


def assert_the_same(found: Any, expected: Any, where: str = "") -> None:
    """Names, counts and texts exactly; figures but for the rounding of float32 sums, whose order no
    library promises: another number of threads, or another kernel, gives other last bits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_the_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_the_same(*pair, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), where
    else:
        assert found == expected and type(found) is type(expected), where


A_MAP = """
import json, os, sys, time
from dpray.workers.engine_pool import RayMap
from dpray.types import DprayError, InputError

def sleep(n):
    time.sleep(0.1 * (n % 2))
    return n

def fail(text):
    raise ValueError(text)

def refuse(text):
    raise InputError("embedder: cannot load it")

def error(function):
    try:
        list(RayMap(sys.argv[1], 1)(function, ["Mar" "lowe"] * 4))
    except DprayError as error:
        return [error.exit_code, str(error)]

found = {"order": list(RayMap(sys.argv[1], 5)(sleep, range(12)))}
found |= {"failed": error(fail), "refused": error(refuse)}
found["lost"] = error(lambda text: os._exit(1))
print(json.dumps(found))
"""


def test_more_actors_than_there_is_room_for_and_functions_that_fail(cluster: Cluster):
    out, err = finish(start(A_MAP, cluster.address), cluster)

    assert err == "", "Ray has nothing to say of the errors either"
    assert json.loads(out) == {
        "order": list(range(12)),
        "failed": [1, "an actor of the evaluation failed: ValueError"],
        "refused": [2, "embedder: cannot load it"],
        "lost": [1, "the evaluation's actors stopped: ActorDiedError"],
    }

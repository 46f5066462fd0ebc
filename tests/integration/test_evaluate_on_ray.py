"""`dpray evaluate` on a real Ray against the same in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_limits

from dpray.cli import run_command
from tests.evaluation.test_evaluate import notes
from tests.integration.processes import MARKER, TIMEOUT, Cluster, end, environment, wait_for

pytestmark = pytest.mark.slow

SMALL_SLICES = """
import sys
from dpray.cli import main
from dpray.evaluation import slices

slices.SLICE = 24
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
    cluster: Cluster, model_folder: str, tmp_path: Path, one_thread: None, monkeypatch: Any
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
        SMALL_SLICES, *options, "--out", tmp_path / "ray",
        "--ray-address", cluster.address, "--actors", 2,
    )  # fmt: skip
    wait_for(lambda: cluster.workers("EvaluationActor.call"), on_ray)
    cluster.workers("EvaluationActor.call")[0].kill()
    monkeypatch.setattr("dpray.evaluation.slices.SLICE", 24)
    with threadpool_limits(1):
        assert run_command(["evaluate", *map(str, options), "--out", str(tmp_path / "here")]) == 0
    finish(on_ray, cluster)

    # To the last bit.
    found = [(tmp_path / name / "evaluation.json").read_text() for name in ("ray", "here")]
    assert found[0] == found[1]
    assert json.loads(found[0])["copies"]["private_records"] == 120
    wait_for(lambda: not cluster.workers("EvaluationActor"))


A_MAP = """
import json, os, sys, time
from dpray.orchestration.evaluation import RayMap
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

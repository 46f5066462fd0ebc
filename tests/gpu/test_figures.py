"""The script of all figures runs on a host with small models: its form, and what has to hold."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_table
import pytest

from benchmarks.bench_voting import SEARCHES, WRONG
from tests.conftest import ROOT
from tests.gpu import figures, parts
from tests.gpu.decoding import side_by_side
from tests.gpu.figures import MEASUREMENTS, hardware, measured, rows_of


@pytest.mark.slow
def test_the_script_prints_figures_with_the_hardware(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "small.json"
    figures.main(small=True, only=["votes"], minutes=60.0, out=out, worker="")
    found = json.loads(capfd.readouterr().out)
    assert json.loads(out.read_text()) == found
    assert found["small"] and {"gpu", "cpu", "cores", "torch", "python"} <= set(found["hardware"])
    [(name, measurement)] = found["measurements"].items()
    assert name == "votes" and "failure" not in measurement
    assert len(measurement["rows"]) == 2 * len(SEARCHES) >= 8


ABSENT = ("ray", "vllm", "pandas", "pyarrow", "dp_accounting", "opendp", "fastapi", "ahocorasick")
"""Packages that `make wheels` does not bring."""


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The figures of ZeRO where there are torch and DeepSpeed only. Python imports `sitecustomize`
    before all else, in every rank."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(
        f"import sys; sys.modules |= dict.fromkeys({ABSENT})\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        return list(rows_of("zero", small=True))


@pytest.mark.slow
def test_zero_trains_under_torchrun_where_ray_is_not(zero: list[dict[str, Any]]) -> None:
    found = [(row["stage"], row["model"]) for row in zero]
    assert found == [(2, "gpt2"), (2, "llama_lora"), (3, "gpt2"), (3, "llama_lora")]
    for row in zero:
        assert row["off the reference"] < 5e-6 < 1e-2 < row["weights moved"]
        assert (row["ranks"], row["backend"], row["with Ray"]) == (2, "gloo", False)


IMPORTS = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder

class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in ABSENT:
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Present
for name in MODULES:
    import_module(name)
"""


@pytest.mark.slow
def test_the_figures_import_what_make_wheels_brings() -> None:
    """Modules of all other packages that are installed here cannot be imported."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["gpu"]
    has = re.search(r"^GPU_HAS \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert has is not None
    brought = with_what_they_need([*group, *has[1].split(), "deepspeed"])
    owners = metadata.packages_distributions()
    absent = {name for name, by in owners.items() if brought.isdisjoint(map(canonical, by))}
    assert {"ray", "pandas", "dp_accounting"} <= absent - {"dpray", "tests"}
    modules = [f"tests.gpu.{name}" for name in ("decoding", "training", "votes", "zero_rank")]
    modules += ["tests.gpu.lockstep_driver", "tests.gpu.row_driver", "tests.databases"]
    absent -= {"dpray", "tests", "benchmarks"}
    program = f"ABSENT = {absent!r}\nMODULES = {modules!r}\n{IMPORTS}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name)[0]).lower()


def with_what_they_need(requirements: list[str]) -> set[str]:
    """Return the packages, and those that they need here."""
    found, todo = set[str](), requirements
    while todo:
        name, _, marker = todo.pop().partition(";")
        if "extra" in marker or canonical(name) in found:
            continue
        found.add(canonical(name))
        try:
            todo += metadata.requires(canonical(name)) or []
        except metadata.PackageNotFoundError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_all_figures_hold_on_a_host_and_make_a_page(zero: list[dict[str, Any]]) -> None:
    without = {"zero"} if find_spec("vllm") else {"zero", "probe", "vllm"}
    names = [name for name in MEASUREMENTS if name not in without]
    rows = {"zero": zero} | {name: list(rows_of(name, small=True)) for name in names}
    assert all(found and all("failure" not in row for row in found) for found in rows.values())
    for row in rows.get("probe", []):
        assert row["attention"] == "CPU_ATTN" and row["logits moved, nats"] == 0.0 < row["seconds"]
    for name in ("rows", "chunks"):
        moved = [row["logits moved, nats"] for row in rows[name] if row["dtype"] == "float32"]
        assert 0.0 <= max(moved) < 1e-3
    assert all(
        row["same tokens"] == row["tokens"] > 0
        for row in rows["chunks"]
        if row["dtype"] == "float32"
    )
    assert max(row["difference, of C"] for row in rows["steps"]) < 1e-3
    assert {row["other votes"] for row in rows["votes"] if row["way"] != WRONG} == {0}
    for row in rows.get("vllm", []):
        assert row["attention"] == "CPU_ATTN" and row["tokens a second"] > 0
    assert {"plain, these passes", "dclip"} <= {row["way"] for row in rows["lockstep"]}
    for name in {"lockstep", "speed", "vllm"} & rows.keys():
        assert {row["of plain"] > 0 for row in rows[name] if "of plain" in row} == {True}

    measurements = {name: {"seconds": 1.0, "rows": found} for name, found in rows.items()}
    found = {"hardware": hardware(), "small": True, "measurements": measurements}
    page = "\n".join(gpu_table.table(found))
    assert "| model | trained | texts | way | examples a second | of plain | GiB |" in page
    assert found["hardware"]["cpu"] in page and "small models" in page


def test_what_fails_keeps_its_name_and_the_others() -> None:
    found = measured("nothing", True, 600.0)
    assert found["rows"] == [] and found["failure"].startswith("KeyError")
    assert measured("votes", True, 0.1) == {
        "seconds": pytest.approx(0.1, abs=600),
        "rows": [],
        "failure": "not done in 0 seconds",
    }


def test_a_failure_is_in_the_table() -> None:
    failed = {"seconds": 3.0, "rows": [{"s": 16}], "failure": "OutOfMemoryError"}
    hardware = {"gpu": "A GPU", "driver": "1.2", "cpu": "A CPU", "cores": 16, "torch": "2.13.0"}
    lines = gpu_table.table(
        {"hardware": hardware, "small": False, "measurements": {"rows": failed}}
    )
    assert lines[0] == "## GPU: A GPU"
    assert "| 16 |" in lines and any("OutOfMemoryError" in line for line in lines)


def test_a_run_goes_on_from_the_figures_of_the_same_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made, gpu = tmp_path / "gpu.json", list[tuple[str, float]](), "one"

    def measure(name: str, small: bool, seconds: float) -> dict[str, object]:
        made.append((name, seconds))
        failure = {"failure": "not done"} if name == fails else {}
        return {"seconds": 0.0, "rows": []} | failure

    monkeypatch.setattr(figures, "MEASUREMENTS", dict.fromkeys("abc", ("", 10)))
    monkeypatch.setattr(figures, "measured", measure)
    monkeypatch.setattr(figures, "hardware", lambda: {"gpu": gpu})

    def run(*only: str) -> list[str]:
        made.clear()
        figures.main(only=list(only), minutes=1.0, out=out, worker="")
        return [name for name, _ in made]

    fails = "b"
    assert run("b", "a") == ["a", "b"]
    assert made[0] == ("a", 30.0), "the named ones share the time"
    fails = ""
    assert run() == ["b", "c"]
    assert list(json.loads(out.read_text())["measurements"]) == ["a", "b", "c"]
    assert run() == []
    assert run("a") == ["a"]
    gpu = "another"
    assert run() == ["a", "b", "c"]


def library(code: bytes, other: bytes, ptx: bytes) -> bytes:
    """Return a library with a kernel's code for capability 8.0, 9.0 as PTX, and 9.0."""
    codes = b""
    for kind, capability, each in ((2, 80, other), (1, 90, ptx), (2, 90, code)):
        codes += parts.CODE.pack(kind, 0x101, 64, len(each), 0, 0, 0, capability)
        codes += b"\1" * (64 - parts.CODE.size) + each
    return b"ELF" + parts.KERNEL + len(codes).to_bytes(8, "little") + codes


def test_vllm_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, folder, site = tmp_path / "wheels", tmp_path / "parts", tmp_path / "site"
    wheels.mkdir()
    rng = random.Random(0)
    needed = {
        "vllm/a.py": b"import torch\n",
        "vllm/_C_stable_libtorch.abi3.so": library(rng.randbytes(250_000), b"\0" * 8, b"\0" * 8),
        "vllm-0.26.0.dist-info/METADATA": b"Name: vllm\n",
        "cbor2/_c.so": b"x",
    }
    left_out = [
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/vllm-rs",
        "vllm/third_party/a.hpp",
    ]
    code = needed["vllm/_C_stable_libtorch.abi3.so"][-250_000:]
    packed = {"vllm/_C_stable_libtorch.abi3.so": library(code, b"for 8.0.", b"some PTX")}
    with zipfile.ZipFile(wheels / "one.whl", "w") as wheel:
        for name in left_out:
            wheel.writestr(name, b"y")
        for name, data in (needed | packed).items():
            wheel.writestr(name, data)
    needed |= parts.STAND_INS
    monkeypatch.setattr(parts, "MOST", 100_000)
    names = parts.pack(wheels, folder)
    assert names == ["part-0", "part-1", "part-2"]
    assert max((folder / name).stat().st_size for name in names) == 100_000

    last = (folder / "part-2").rename(tmp_path / "later")
    damaged = (folder / "part-0").read_bytes()
    (folder / "part-0").write_bytes(damaged[:-1] + b"\0")
    with pytest.raises(SystemExit, match="part-0, part-2 missing or damaged"):
        parts.join(folder, site)
    assert not site.exists()
    (folder / "part-0").write_bytes(damaged)
    last.rename(folder / "part-2")
    parts.join(folder, site)
    files = (path for path in site.rglob("*") if path.is_file() and path.name != parts.INDEX)
    assert {str(path.relative_to(site)): path.read_bytes() for path in files} == needed
    (folder / "part-1").unlink()
    parts.join(folder, site)  # it is there already


def test_programs_side_by_side_leave_their_rows() -> None:
    def program(*rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from rows
        if len(rows) == 1:
            raise RuntimeError("it failed")

    programs = [program({"a": 1}), program({"b": 1}, {"b": 2})]
    found = list[dict[str, Any]]()
    with pytest.raises(RuntimeError, match="it failed"):
        found.extend(side_by_side(programs))
    assert sorted(map(str, found)) == ["{'a': 1}", "{'b': 1}", "{'b': 2}"]


def test_the_makefile_names_tests_that_there_are() -> None:
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    [named] = re.findall(r"^GPU_TESTS := (.*)$", recipe, re.M)
    assert len(named.split()) >= 3
    for path in named.split():
        assert (ROOT / path).exists(), path
        texts = [
            file.read_text()
            for file in [*(ROOT / path).rglob("test_*.py"), ROOT / path]
            if file.is_file()
        ]
        assert any("device: str" in text or "mark.gpu" in text for text in texts), path

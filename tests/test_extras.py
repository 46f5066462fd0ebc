"""With the base installation alone, a run of DP-KPS works, and a missing extra is one
sentence with the command that installs it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpray.extras import Late

ROOT = Path(__file__).parents[1]

BASE_ALONE = """
import sys
from importlib.machinery import PathFinder

EXTRAS = {
    "accelerate", "deepspeed", "fastapi", "limits", "opacus", "openpyxl", "peft", "phonenumbers",
    "psycopg", "sentence_transformers", "starlette", "stopwordsiso", "tensorboardX", "torch",
    "uvicorn", "vllm", "wordfreq",
}

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in EXTRAS
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
from dpray.cli import main
main()
"""


def dpray(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command as if no extra were installed."""
    return subprocess.run(
        [sys.executable, "-c", BASE_ALONE, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def test_a_run_of_sequences_needs_no_extra(tmp_path: Path) -> None:
    ledger, folder = f"privacy.ledger=sqlite:///{tmp_path}/ledger.db", tmp_path / "run"
    made = dpray("run", "jobs/dp_kps_cpu.yaml", ledger, f"output.path={folder}")
    assert made.returncode == 0, made.stderr
    assert len((folder / "synthetic.jsonl").read_bytes().splitlines()) == 500
    assert (folder / "privacy_report.html").exists()
    described = dpray("card", folder)
    assert described.returncode == 0, described.stderr
    assert "Personal data" not in (folder / "README.md").read_text()
    shown = dpray("ledger", "show", "--ledger", f"sqlite:///{tmp_path}/ledger.db")
    assert shown.returncode == 0 and "clinic-notes" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "jobs/dp_sgd_cpu.yaml", "output.path=OUT", "privacy.ledger=sqlite:///OUT.db"],
            "method dp_sgd needs DeepSpeed, which is not installed: pip install 'dpray[train]'; "
            "nothing was charged",
        ),
        (
            ["run", "jobs/private_prediction_cpu.yaml", "output.path=OUT",
             "privacy.ledger=sqlite:///OUT.db"],
            "method private_prediction needs PyTorch, which is not installed: "
            "pip install 'dpray[torch]'; nothing was charged",
        ),
        (
            ["serve", "jobs/serve_cpu.yaml"],
            "dpray serve needs Ray Serve, which is not installed: pip install 'dpray[serve]'",
        ),
        (
            ["ledger", "show", "--ledger", "postgresql://localhost/ledger"],
            "a ledger on PostgreSQL needs psycopg, which is not installed: "
            "pip install 'dpray[postgres]'",
        ),
        (
            ["evaluate", "--real", "none.jsonl", "--synthetic", "none.jsonl", "--out", "OUT"],
            "dpray evaluate needs PyTorch, which is not installed: pip install 'dpray[eval]'",
        ),
        (
            ["run", "jobs/dp_kps_cpu.yaml", "output.path=OUT", "privacy.ledger=sqlite:///OUT.db",
             "data.language=German"],
            "method.stop_words needs stopwordsiso, which is not installed: "
            "pip install 'dpray[languages]'; nothing was charged",
        ),
    ],
    ids=["train", "torch", "serve", "postgres", "eval", "languages"],
)  # fmt: skip
def test_a_missing_extra_is_one_sentence_before_anything_is_charged(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    refused = dpray(*(word.replace("OUT", str(tmp_path / "out")) for word in arguments))
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [f"dpray: {sentence}"]
    assert not (tmp_path / "out.db").exists()


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether Python's collector was at work before."""
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_a_library_is_imported_while_the_collector_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    (tmp_path / "a_large_library.py").write_text("import gc\nat_work = gc.isenabled()\n")
    (tmp_path / "a_broken_library.py").write_text("raise ImportError('damaged')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_large_library", raising=False)
    assert Late("a_large_library").at_work is False
    assert gc.isenabled() is collects
    with pytest.raises(ImportError, match="damaged"):
        Late("a_broken_library").anything  # noqa: B018
    assert gc.isenabled() is collects

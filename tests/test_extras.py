"""With the base installation alone, a run of DP-KPS works, and a missing extra is one
sentence with the command that installs it."""

from __future__ import annotations

import gc
import json
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
from tests.integration.command_lines import main
main()
"""
"""Several command lines in one process, as if no extra were installed."""

OUTPUT = ["output.path=OUT/refused", "privacy.ledger=sqlite:///OUT/refused.db"]

REFUSED = {
    "train": (
        ["run", "jobs/dp_sgd_cpu.yaml", *OUTPUT],
        "method dp_sgd needs DeepSpeed, which is not installed: pip install 'dpray[train]'; "
        "nothing was charged",
    ),
    "torch": (
        ["run", "jobs/private_prediction_cpu.yaml", *OUTPUT],
        "method private_prediction needs PyTorch, which is not installed: "
        "pip install 'dpray[torch]'; nothing was charged",
    ),
    "serve": (
        ["serve", "jobs/serve_cpu.yaml"],
        "dpray serve needs Ray Serve, which is not installed: pip install 'dpray[serve]'",
    ),
    "postgres": (
        ["ledger", "show", "--ledger", "postgresql://localhost/ledger"],
        "a ledger on PostgreSQL needs psycopg, which is not installed: "
        "pip install 'dpray[postgres]'",
    ),
    "eval": (
        ["evaluate", "--real", "none.jsonl", "--synthetic", "none.jsonl", "--out", "OUT/refused"],
        "dpray evaluate needs PyTorch, which is not installed: pip install 'dpray[eval]'",
    ),
    "languages": (
        ["run", "jobs/dp_kps_cpu.yaml", *OUTPUT, "data.language=German"],
        "method.stop_words needs stopwordsiso, which is not installed: "
        "pip install 'dpray[languages]'; nothing was charged",
    ),
}

DONE = (
    ["run", "jobs/dp_kps_cpu.yaml", "output.path=OUT/run", "privacy.ledger=sqlite:///OUT/run.db"],
    ["card", "OUT/run"],
    ["ledger", "show", "--ledger", "sqlite:///OUT/run.db"],
)


def test_a_run_of_sequences_needs_no_extra_and_a_missing_one_is_a_sentence_before_any_charge(
    tmp_path: Path,
) -> None:
    lines = [*(arguments for arguments, _ in REFUSED.values()), *DONE]
    told = json.dumps([[word.replace("OUT", str(tmp_path)) for word in line] for line in lines])
    ended = subprocess.run(
        [sys.executable, "-c", BASE_ALONE, told], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    *printed, outcomes = ended.stdout.splitlines()
    refusals, done = (found := json.loads(outcomes))[: len(REFUSED)], found[len(REFUSED) :]
    assert refusals == [[2, f"dpray: {sentence}\n"] for _, sentence in REFUSED.values()]
    assert not (tmp_path / "refused.db").exists()
    assert [code for code, _ in done] == [0] * len(DONE), done
    folder = tmp_path / "run"
    assert len((folder / "synthetic.jsonl").read_bytes().splitlines()) == 500
    assert (folder / "privacy_report.html").exists()
    assert "Personal data" not in (folder / "README.md").read_text()
    assert "clinic-notes" in "".join(printed)


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
    """So are the modules that a library imports when they are named, as transformers does."""
    (tmp_path / "a_large_library.py").write_text(
        "import gc\nat_work = gc.isenabled()\n"
        "def __getattr__(name):\n    return gc.isenabled() if name == 'later' else vars()[name]\n"
    )
    (tmp_path / "a_broken_library.py").write_text("raise ImportError('damaged')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_large_library", raising=False)
    library = Late("a_large_library")
    assert (library.at_work, library.later) == (False, False)
    monkeypatch.setattr("a_large_library.at_work", "another value")
    assert library.at_work == "another value"
    assert gc.isenabled() is collects
    with pytest.raises(ImportError, match="damaged"):
        Late("a_broken_library").anything  # noqa: B018
    assert gc.isenabled() is collects

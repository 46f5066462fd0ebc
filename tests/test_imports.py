"""Commands start quickly: each imports the heavy libraries that it needs, and no others. No file is
in a circle of imports."""

from __future__ import annotations

import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from dpray.ledger.ledger import Ledger
from dpray.types import Budget

ROOT = Path(__file__).resolve().parent.parent

HEAVY = [
    "deepspeed",
    "dp_accounting",
    "matplotlib",
    "openai",
    "pandas",
    "ray",
    "scipy.stats",
    "sentence_transformers",
    "sklearn",
    "torch",
    "transformers",
    "vllm",
]
ACCOUNTANT = {"dp_accounting", "scipy.stats"}
STOP_WORDS = {"sklearn", "pandas"}
TOKENIZER = {"torch", "transformers", "sklearn", "pandas"}
"""transformers' AutoTokenizer imports all of them."""

HUB = "engine.model=owner/name"
"""A model that is not a folder: its tokenizer is not read before the run."""

COMMANDS: dict[str, set[str]] = {
    "--help": set(),
    "--version": set(),
    "plan --help": set(),
    "run --help": set(),
    "report --help": set(),
    "serve --help": set(),
    "evaluate --help": set(),
    "demo --help": set(),
    "ledger show --ledger LEDGER": ACCOUNTANT,
    f"plan jobs/private_prediction_cpu.yaml {HUB}": ACCOUNTANT,
    "plan jobs/private_prediction_cpu.yaml": ACCOUNTANT | TOKENIZER,
    "plan jobs/aug_pe_cpu.yaml": ACCOUNTANT,
    "plan jobs/dp_kps_cpu.yaml method.stop_words=keep": ACCOUNTANT,
    "plan jobs/dp_kps_cpu.yaml": ACCOUNTANT | STOP_WORDS,
    f"plan jobs/chain_topics_cpu.yaml {HUB}": ACCOUNTANT | STOP_WORDS,
    f"plan jobs/dp_sgd_cpu.yaml {HUB}": ACCOUNTANT,
    "plan jobs/dp_sgd_cpu.yaml method.noise_multiplier=2": ACCOUNTANT | TOKENIZER,
}
"""Each command, and the heavy libraries that it may import."""

CODE = """
import json, sys
from dpray.cli import run_command
code = run_command(sys.argv[2:])
print(json.dumps([code, [name for name in sys.argv[1].split() if name in sys.modules]]))
"""


SLOW = [command for command, allowed in COMMANDS.items() if "torch" in allowed]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow) if command in SLOW else command
        for command in COMMANDS
    ],
)
def test_a_command_imports_no_more_than_it_needs(command: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    if "LEDGER" in command:
        ledger = Ledger.create_or_open(url)
        ledger.create_dataset("notes", Budget(1.0, 1e-5), "record", "add_or_remove_one")
    arguments = command.replace("LEDGER", url).split()
    done = subprocess.run(
        [sys.executable, "-c", CODE, " ".join(HEAVY), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    code, imported = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    assert set(imported) <= COMMANDS[command]


WORKERS = (
    "dpray.methods.private_prediction.decoder",
    "dpray.methods.private_prediction.release",
)
"""Modules that engine actors and the driver import on Ray, before they do anything."""


@pytest.mark.parametrize("module", WORKERS)
def test_a_process_on_ray_imports_no_more_than_it_needs(module: str) -> None:
    code = (
        f"import sys, dpray.workers.groups, dpray.workers.shards, {module}; "
        "print(*(name for name in sys.argv[1:] if name in sys.modules))"
    )
    command = [sys.executable, "-c", code, *HEAVY, "ray.data"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ray"]


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports for types alone and those within functions count, too. The sorter raises CycleError,
    which names the files of the circle."""
    graph = grimp.build_graph("dpray")
    imported = {file: graph.find_modules_directly_imported_by(file) for file in graph.modules}
    assert len(list(TopologicalSorter(imported).static_order())) == len(graph.modules)

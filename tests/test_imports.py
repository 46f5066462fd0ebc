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
    "deepspeed", "dp_accounting", "matplotlib", "openai", "pandas", "ray", "scipy.stats",
    "sentence_transformers", "sklearn", "torch", "transformers", "vllm",
]  # fmt: skip
ACCOUNTANT = {"dp_accounting", "scipy.stats"}
STOP_WORDS = {"sklearn", "pandas"}
TOKENIZER = {"transformers"}
"""transformers' AutoTokenizer would also import torch, scikit-learn and pandas by itself."""

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
import json, os, sys
from dpray.cli import run_command

heavy, bare, others = sys.argv[1].split(), *map(json.loads, sys.argv[2:])

def outcome(command):
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = run_command(command.split(), alone=True)
        imported = [name for name in heavy if name in sys.modules]
        os.write(write, json.dumps([code, imported]).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(read, 10_000))

found = {command: outcome(command) for command in bare}
import dp_accounting.pld.privacy_loss_distribution, scipy.stats
print(json.dumps(found | {command: outcome(command) for command in others}))
"""
"""Each command runs in a fork, those that may import the accountant's libraries after these."""

TOKENIZERS = [command for command, allowed in COMMANDS.items() if "transformers" in allowed]


def outcomes(commands: list[str], ledger: str = "") -> dict[str, tuple[int, list[str]]]:
    """Return the exit code of each command, and the heavy libraries that it imports."""
    groups = [[c for c in commands if bool(COMMANDS[c]) is heavy] for heavy in (False, True)]
    given = [json.dumps(group).replace("LEDGER", ledger) for group in groups]
    done = subprocess.run(
        [sys.executable, "-c", CODE, " ".join(HEAVY), *given],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return dict(zip([c for group in groups for c in group], found.values(), strict=True))


def assert_no_more_than_needed(found: dict[str, tuple[int, list[str]]]) -> None:
    more = {c: {*names} - COMMANDS[c] for c, (_, names) in found.items()}
    assert {c: names for c, names in more.items() if names} == {}
    assert {code for code, _ in found.values()} == {0}


def test_a_command_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", Budget(1.0, 1e-5), "record", "add_or_remove_one")
    assert_no_more_than_needed(outcomes([c for c in COMMANDS if c not in TOKENIZERS], url))


@pytest.mark.slow
def test_a_plan_that_reads_a_tokenizer_imports_no_more_than_it_needs() -> None:
    assert_no_more_than_needed(outcomes(TOKENIZERS))


WORKERS = (
    "dpray.methods.private_prediction.decoder",
    "dpray.methods.private_prediction.release",
)
"""Modules that engine actors and the driver import on Ray, before they do anything."""


def test_a_process_on_ray_imports_no_more_than_it_needs() -> None:
    code = (
        f"import sys, dpray.workers.gathering, dpray.workers.shards, {', '.join(WORKERS)}; "
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

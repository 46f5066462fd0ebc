"""A run prints its own lines alone: libraries' notes on the machine are not shown, errors are."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpray.cli import LEVELS, run_command
from dpray.methods.dp_sgd.training.model import is_error


@pytest.mark.slow
def test_a_training_prints_its_result_alone(tmp_path: Path, model_folder: str) -> None:
    """DeepSpeed, which saves the model, and vLLM, which writes the texts, have much to say of a
    machine without a GPU."""
    rows = [{"text": f"note {number} of Marlowe"} for number in range(20)]
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(
        f"""
data: {{path: notes.jsonl, public_size: 20}}
privacy: {{epsilon: 8, delta: 1e-4, dataset: notes}}
method: {{name: dp_sgd, epochs: 1, batch_size: 20, max_length: 16, records: 2, lora_rank: 2}}
engine:
  kind: {"vllm" if importlib.util.find_spec("vllm") else "transformers"}
  model: {model_folder}
  kv_cache_gib: 0.1
  max_num_seqs: 8
runtime: {{ray_address: none}}
"""
    )
    # What the tests themselves set for libraries does not count.
    environment = {name: value for name, value in os.environ.items() if name not in LEVELS}
    done = subprocess.run(
        [sys.executable, "-m", "dpray", "run", "job.yaml", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["llm_calls"] == 2
    # Without a terminal, a long run has lines of its own (tests/test_terminal.py).
    assert [line for line in done.stderr.splitlines() if not line.startswith("{")] == []


def test_errors_of_libraries_are_kept() -> None:
    def record(level: int) -> logging.LogRecord:
        return logging.LogRecord("DeepSpeed", level, "", 0, "", None, None)

    assert is_error(record(logging.ERROR)) and not is_error(record(logging.WARNING))
    assert {level.upper() for level in LEVELS.values()} == {"ERROR"}


def test_a_level_that_a_person_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEVELS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "debug")
    assert run_command(["--version"]) == 0
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "debug"
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"

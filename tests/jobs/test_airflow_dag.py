"""`jobs/airflow_dag.py`, read as it stands: Airflow is not installed here."""

from __future__ import annotations

import ast
from pathlib import Path

from dpray.methods.config import load_config

ROOT = Path(__file__).parents[2]
TREE = ast.parse((ROOT / "jobs" / "airflow_dag.py").read_text())


def keywords(name: str) -> dict[str, ast.expr]:
    """Return the keywords of the only call of this name."""
    calls = [node for node in ast.walk(TREE) if isinstance(node, ast.Call)]
    [call] = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == name]
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def test_a_retry_is_the_same_command_for_a_job_that_is_there() -> None:
    operator = keywords("BashOperator")
    python, script, config, *overrides = ast.literal_eval(operator["bash_command"]).split()
    assert python == ".venv/bin/python" and (ROOT / script).is_file()
    loaded = load_config(ROOT / config, overrides)
    assert Path(loaded.output.path).is_absolute() and "my-bucket" in loaded.data.path
    # Airflow fills nothing in: each attempt names the same folder.
    assert not any(sign in " ".join(overrides) for sign in ("{{", "{%", "$"))
    assert ast.literal_eval(operator["retries"]) > 0


def test_nothing_charges_a_budget_by_the_clock() -> None:
    dag = keywords("DAG")
    assert ast.literal_eval(dag["schedule"]) is None and not ast.literal_eval(dag["catchup"])
    assert ast.literal_eval(dag["max_active_runs"]) == 1

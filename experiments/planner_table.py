"""The plan of each method beside its run, for results_tables.md: epsilon and records, and the
seconds that the run took.

`python experiments/planner_table.py METHOD...` plans and runs a method, on a machine that should
have nothing else to do, and keeps the figures in experiments/measured. METHOD is a key of METHODS.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from runs import HERE, RUNS, released

MODEL = "../shared/models/publm-12m"

METHODS: dict[str, tuple[str, list[str]]] = {
    "private_prediction": (
        "agnews_secret",
        ["method.batches=poisson", "method.max_records=null", "method.texts=200"],
    ),
    "aug_pe": (
        "aug_pe_agnews",
        ["method.records=60", f"engine={{kind: vllm, model: {MODEL}, dtype: float32}}"],
    ),
    "dp_kps": ("kps_agnews", []),
    "dp_sgd": ("dp_sgd_agnews", ["method.records=200"]),
}


def kept(method: str) -> Path:
    return HERE / "measured" / "planner" / f"{method}.json"


def dpray(command: str, method: str) -> dict[str, Any]:
    """Return the answer of `dpray COMMAND` to the method's configuration."""
    file, changes = METHODS[method]
    out = RUNS / "planner" / method
    places = [f"output.path={out}", f"privacy.ledger=sqlite:///{out}.db"]
    line = [sys.executable, "-m", "dpray", command, str(HERE / f"{file}.yaml"), *changes, *places]
    settings = ["runtime.ray_address=none", "--json"]
    done = subprocess.run([*line, *settings], check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure(method: str) -> None:
    planned = dpray("plan", method)
    began = monotonic()
    made = dpray("run", method)
    seconds = monotonic() - began
    figures = {
        "planned": {"epsilon": planned["epsilon"], "records": planned["records"]},
        "made": {
            "epsilon": made["epsilon"],
            "records": len(released(RUNS / "planner" / method)),
            "seconds": round(seconds, 1),
        },
    }
    kept(method).parent.mkdir(parents=True, exist_ok=True)
    kept(method).write_text(json.dumps(figures, indent=1) + "\n")


def table() -> list[str]:
    """Return the section of the page; empty where nothing was measured."""
    found = {name: json.loads(kept(name).read_text()) for name in METHODS if kept(name).exists()}
    if not found:
        return []
    lines = [
        "## The plan against the run: agnews, 4,000 private records",
        "",
        f"`python experiments/planner_table.py {' '.join(METHODS)}`, with the model of 12.5 M "
        "parameters on two cores: `dpray plan`, `dpray run`. During the run of Aug-PE "
        "a part of the machine did other work.",
        "",
        "| method | eps planned | charged | records planned | made | seconds taken |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        cells = [
            f"{figures[when][what]:{form}}"
            for what, form in (("epsilon", ".6f"), ("records", ","))
            for when in ("planned", "made")
        ]
        seconds = f"{figures['made']['seconds']:.0f}"
        lines.append("| " + " | ".join([name, *cells, seconds]) + " |")
    return lines


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        measure(wanted)

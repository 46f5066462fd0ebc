"""The section of results_gpu.md for each machine on which `tests.gpu.figures` ran: its JSON lies in
measured/gpu/."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "measured" / "gpu"

HEAD = """# On a GPU

Written by `python experiments/make.py` from the files in `experiments/measured/gpu`, which
`python -m tests.gpu.figures` prints on a machine with a GPU
([how to](../docs/installation.md#a-gpu-in-ten-minutes)). Models have random weights.
"""

NONE = "No GPU has run it yet. The same script has run with small models on a host, as a test."

TITLES = {
    "rows": "How far a row's logits move with the rows beside it",
    "probe": "How far they move in vLLM, by the test of every start",
    "chunks": "A group in chunks of rows, from the same coins as the whole group",
    "steps": "Sums of clipped gradients, against gradients of one text at a time (small models)",
    "zero": "Four steps under DeepSpeed's ZeRO (torchrun, no Ray), against those of one process",
    "votes": "Votes of private records (Aug-PE)",
    "lockstep": "Private decoding in the transformers engine, and plain sampling of the groups",
    "vllm": "Private decoding in vLLM, and plain sampling of the same groups",
    "speed": "DP-SGD's micro-batches of texts of 128 tokens, beside plain training and Opacus",
}


def sections() -> dict[str, Callable[[], list[str]]]:
    """Return a section for each kept file, by the heading that it begins with."""
    files = sorted(FOLDER.glob("*.json"))
    found = [json.loads(path.read_text()) for path in files]
    made: dict[str, Callable[[], list[str]]] = {heading(one): partial(table, one) for one in found}
    return made or {"GPU: none yet": lambda: ["## GPU: none yet", "", NONE]}


def heading(found: dict[str, Any]) -> str:
    hardware = found["hardware"]
    name = f"GPU: {hardware['gpu']}" if hardware["gpu"] else f"Host: {hardware['cpu']}"
    return f"{name}, small models" if found["small"] else name


def table(found: dict[str, Any]) -> list[str]:
    """Return the section of one machine."""
    known = ((name, value) for name, value in found["hardware"].items() if value is not None)
    lines = [
        f"## {heading(found)}",
        "",
        ", ".join(f"{name} {value}" for name, value in known) + ".",
    ]
    for name, measurement in found["measurements"].items():
        lines += [
            "",
            f"**{TITLES.get(name, name)}**, {measurement['seconds']:.0f} seconds in all",
            "",
        ]
        lines += rows_table(measurement["rows"])
        if "failure" in measurement:
            lines += ["", f"Not all was measured: {measurement['failure']}."]
    return lines


def rows_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table whose columns are the rows' keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return []
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(cell(row.get(name)) for name in columns) + " |" for row in rows),
    ]


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

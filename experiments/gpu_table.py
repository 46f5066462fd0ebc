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
    "chunks": "A group in chunks of rows, from the same coins as the whole group",
    "steps": "Sums of clipped gradients, against gradients of one text at a time (small models)",
    "votes": "Votes of private records (Aug-PE)",
    "lockstep": "Private decoding in the transformers engine, and plain sampling of the same group",
    "speed": "DP-SGD's micro-batches of texts of 128 tokens, beside plain training and Opacus",
}


READINGS = {
    "NVIDIA H200": """\
- In float32 a row's logits move by 0.0001 nats with 64 others beside it, and a group in chunks of
  rows draws the tokens that it draws whole. In bfloat16 they move by 0.2 nats, and it draws others:
  the claim is made up to what the rows move by, which the report of a run states.
- DP-SGD's clipped sums are those of plain gradients to 0.0001 of C. In float32 it makes 1.5 to 2.4
  times as many examples a second as Opacus' ghost clipping, in no more memory, and 0.57 to 0.90 of
  plain training.
- In bfloat16 and micro-batches of 32 it makes 0.59 and 0.66 of plain training with LoRA, and 0.25
  and 0.32 with all weights, whose clipped sums are made in float32. With micro-batches of 8 the GPU
  waits for the host: 32 make 2 to 4 times as many examples a second
  (`method.micro_batch_size`). These rows were measured anew after linear layers that are trained
  came to compute in bfloat16, too: on the same GPU, one after the other, 43 examples a second came
  to 88 (Llama, all weights), 57 to 92 (GPT-2, all), 149 to 250 and 115 to 127 (LoRA).
- Private decoding makes 0.34 to 0.81 of plain sampling's tokens. A token takes two passes, one of
  the private rows and one of the public row by itself. vLLM was not measured.
- Votes are counted on the host, exactly: 70,000 records a second for 5,000 texts. A search in
  float32 on the GPU makes 3 million, and 12 of a million votes are others.
- Of the tests 43 passed and 6 need vLLM (`make gpu-offline`).
- Fourteen trainings by `dpray run` (LoRA of SmolLM2 and of the packaged model, some at once) ended
  with their texts on such a machine; their figures are in [results.md](../docs/results.md).
""",
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
    if reading := READINGS.get(found["hardware"]["gpu"] or ""):
        lines += ["", *reading.splitlines()]
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
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

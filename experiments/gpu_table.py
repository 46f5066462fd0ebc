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
    "speed": "DP-SGD's micro-batches of 8 texts of 128 tokens, beside plain training and Opacus",
}


READINGS = {
    "NVIDIA H200": """\
- In float32 a row's logits move by 0.0001 nats with 64 others beside it, and a group in chunks of
  rows draws the tokens that it draws whole. In bfloat16 they move by 0.2 nats, and it draws others:
  the claim is made up to what the rows move by, which the report of a run states.
- DP-SGD's clipped sums are those of plain gradients to 0.0001 of C. With micro-batches of 8 it
  makes 1.7 to 1.8 times as many examples a second as Opacus' ghost clipping, in no more memory, and
  0.61 to 0.82 of plain training. In bfloat16 it is no faster, where plain training of all weights
  is twice as fast: the time is that of launching kernels on this host, not that of arithmetic.
- Private decoding makes 0.36 to 0.78 of plain sampling's tokens. A token takes two passes, one of
  the private rows and one of the public row by itself. vLLM was not measured.
- Votes are counted on the host, exactly: 76,000 records a second for 5,000 texts. A search in
  float32 on the GPU makes 3.3 million, and 12 of a million votes are others.
- The minutes were cut to 4.5 of the usual 8. Of the tests 6 passed, 6 need vLLM, and two failed for
  the speed that they asked for: 0.6 of plain training, where smaller models than these had 0.42 and
  0.38. They took so long that the tests after them were not reached. The two are gone: a speed is a
  figure, not a test.
- Fourteen trainings by `dpray run` (LoRA of SmolLM2 and of the packaged model, some at once) ended
  with their texts on the same machine; their figures are in [results.md](../docs/results.md).
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

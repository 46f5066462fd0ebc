"""Attacks on releases for results_small_model.md: membership by the four methods' runs, and
canaries.

`python experiments/attack_table.py DATA METHOD...` makes the runs with canaries that are not there
yet, at eps 8 and with reproduction.py's settings. Membership is computed from reproduction.py's
runs when the page is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import reproduction
from runs import DATA, RUNS, audit_canaries, finished

from dpray.engines.base import Embedder
from dpray.evaluation.membership import membership
from dpray.io.records import read_rows

EPSILON = 8.0
MEMBERS_OF = (1.0, 8.0)


def canaries_file(data: str, method: str) -> Path:
    return RUNS / f"canaries_{data}" / f"{method}-{EPSILON:g}.json"


def run(data: str, method: str) -> None:
    if (out := canaries_file(data, method)).exists():
        return
    out.parent.mkdir(exist_ok=True)
    file, changes = reproduction.settings(data, method, EPSILON)
    audit_canaries(file, out, EPSILON, changes)


def table(data: str, embedder: Embedder) -> list[str]:
    """The section of the page; empty where no run is at hand."""
    releases = {
        (reproduction.NAMES[method], f"{epsilon:g}"): texts(reproduction.some_records(out))
        for method in reproduction.METHODS
        for epsilon in MEMBERS_OF
        if finished(out := reproduction.folder(data, method, epsilon, 0))
    }
    if not releases:
        return []
    inside, outside = (
        texts(row for _, row in read_rows(str(DATA / data / f"{part}.jsonl")))
        for part in ("private", "test")
    )
    releases[f"{len(inside) // 2:,} of the private records as they are", ""] = inside[::2]
    lines = [
        f"## Attacks: {data}",
        "",
        f"Membership (`dpray audit --members`): {len(inside):,} private records, which the release "
        f"was made of, among {len(outside):,} test texts, told apart by how near they come to any "
        "released text. AUC with its 95 % interval (0.5 is chance), and the members found at 1 % "
        "false ones.",
        "",
        "| release | eps | AUC, nearest embedding | found | AUC, shared 5-grams | found |",
        "|---|---|---|---|---|---|",
    ]
    for (name, epsilon), made in releases.items():
        scores = membership(inside, outside, made, embedder)["scores"]
        cells = [name, epsilon]
        for found in (scores["nearest_cosine"], scores["ngram_overlap"]):
            low, high = found["auc_interval"]
            cells.append(f"{found['auc']:.3f} ({low:.3f} to {high:.3f})")
            cells.append(f"{found['true_positive_rate']:.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, *canaries(data)]


def canaries(data: str) -> list[str]:
    files = {method: canaries_file(data, method) for method in reproduction.METHODS}
    if not any(file.exists() for file in files.values()):
        return []
    lines = [
        "",
        f"Canaries (`dpray audit --canaries`) at eps {EPSILON:g}: records with made-up secrets, "
        "five of each number of repetitions; how many of the secrets stand in a released text.",
        "",
        "| method | repeated once | 10 times | 100 times |",
        "|---|---|---|---|",
    ]
    for method, file in files.items():
        if file.exists():
            secrets = json.loads(file.read_text())["canaries"]["secrets"]
            groups = groupby(secrets, lambda secret: secret["repetitions"])
            counts = [[secret["leaks"] > 0 for secret in group] for _, group in groups]
            cells = [f"{sum(leaked)} of {len(leaked)}" for leaked in counts]
            lines.append("| " + " | ".join([reproduction.NAMES[method], *cells]) + " |")
    return lines


def texts(records: Iterable[dict[str, Any]]) -> list[str]:
    return [record["text"] for record in records]


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        run(sys.argv[1], wanted)

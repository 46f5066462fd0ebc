"""First releases as `dpray init` writes them, with and without a sentence about the texts.

`python experiments/first_release.py DATA[/METHOD]...` makes the runs that are not there yet, keeps
their figures in experiments/measured/first_release, and prints the table of all that are kept.
Every configuration is the one that `dpray init` writes at epsilon 4 with SmolLM2-135M, but for the
number of texts. The floor are texts of `dpray preview`, and `real` are other private records.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedding import embed
from runs import DATA, HERE, RUNS, finished, rows

from dpray.evaluation.fidelity import frechet_distance, mauve

KEPT = HERE / "measured" / "first_release"
TEXTS = 40
ABOUT: dict[str, tuple[str, dict[str, str]]] = {
    "banking77": ("questions that customers ask their bank", {}),
    "agnews": ("first paragraphs of news articles", {}),
    "trec": ("short questions about facts", {}),
    "yelp": ("reviews of local businesses by their customers", {}),
    "pubmed": ("abstracts of medical articles", {}),
    "congressional": ("speeches in the US Congress", {}),
    "mts_dialog": (
        "sections of notes that doctors write after a visit",
        {"GENHX": "history of the present illness", "FAM/SOCHX": "family and social history",
         "PASTMEDICALHX": "past medical history", "CC": "chief complaint",
         "PASTSURGICAL": "past surgical history", "ALLERGY": "allergies",
         "ROS": "review of systems", "MEDICATIONS": "medications", "ASSESSMENT": "assessment"},
    ),
}  # fmt: skip
MOST_LABELS = 8
"""The most common labels of a set are released, with their records."""


def records_of(data: str) -> tuple[Path, list[str]]:
    """Write a set's private texts and labels to a file; return it with the labels."""
    found = rows(DATA / data / "private.jsonl")
    counts: dict[str, int] = {}
    for row in found:
        if row["label"] is not None:
            counts[row["label"]] = counts.get(row["label"], 0) + 1
    labels = sorted(sorted(counts, key=counts.__getitem__)[-MOST_LABELS:])
    kept = [row for row in found if not labels or row["label"] in labels]
    file = RUNS / "first_release" / f"{data}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": row["text"], "label": row["label"]}) + "\n" for row in kept)
    file.write_text("".join(lines))
    return file, labels


def configured(data: str, method: str, says: bool) -> tuple[Path, Path]:
    """Write a configuration by `dpray init`; return it and the folder of its release."""
    file, labels = records_of(data)
    about, words = ABOUT[data]
    out = RUNS / "first_release" / f"{data}-{method}-{'about' if says else 'bare'}"
    config = out.with_suffix(".yaml")
    options = ["--label", "label", "--labels", ",".join(map(json.dumps, labels))] if labels else []
    if says:
        options += ["--about", about]
        known = {label: words[label] for label in labels if label in words}
        options += ["--label-about", json.dumps(known)] if known else []
    if method == "dp_kps":
        options += ["--vocabulary", str(DATA / "vocab" / "public_unigrams.tsv")]
    size = str(round(len(rows(file)), -2))
    command = ["init", str(file), "-o", str(config), "--force", "--text", "text", "--no-unit",
               "--public-size", size, "--epsilon", "4", "--method", method, "--model", "smollm2",
               "--dataset", out.name, "--out", str(out), *options]  # fmt: skip
    dpray(*command)
    return config, out


def dpray(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "dpray", *command], check=True)


def figures(texts: Sequence[str], real: Any) -> dict[str, float]:
    vectors = embed([text for text in texts if text])
    return {
        "texts": len(vectors),
        "frechet": frechet_distance(vectors, real),
        "mauve": mauve(vectors, real[: len(vectors)], 0),
    }


def measure(data: str, method: str) -> None:
    """Make the runs of a set and a method that are not there, and keep their figures."""
    kept = KEPT / f"{data}-{method}.json"
    if kept.exists():
        return
    _, labels = records_of(data)
    test = [r for r in rows(DATA / data / "test.jsonl") if not labels or r["label"] in labels]
    real = embed([row["text"] for row in test[:400]])
    private = [row["text"] for row in rows(RUNS / "first_release" / f"{data}.jsonl")[:TEXTS]]
    found: dict[str, Any] = {"real": figures(private, real)}
    number = f"method.{'max_records' if method == 'private_prediction' else 'records'}={TEXTS}"
    for name, says in (("bare", False), ("about", True)):
        config, out = configured(data, method, says)
        if not finished(out):
            dpray("run", str(config), number, f"privacy.ledger=sqlite:///{out}.db")
        found[name] = figures([row["text"] for row in rows(out / "synthetic.jsonl")], real)
        found[name]["first"] = rows(out / "synthetic.jsonl")[0]["text"]
        if says:
            dpray("preview", str(config), number, "--records", str(TEXTS), "--write")
            found["floor"] = figures([row["text"] for row in rows(out / "floor.jsonl")], real)
    KEPT.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def table() -> str:
    names = ("bare", "floor", "about", "real")
    head = "".join(f" {name} |" for name in names)
    lines = [f"| set, method |{head}", f"|---|{'---|' * len(names)}"]
    for file in sorted(KEPT.glob("*.json")):
        found = json.loads(file.read_text())
        cells = "".join(f" {found[n]['frechet']:.2f}, {found[n]['mauve']:.2f} |" for n in names)
        lines.append(f"| {file.stem.replace('-', ', ')} |{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        name, _, chosen = asked.partition("/")
        measure(name, chosen or "private_prediction")
    print(table())

"""The sparse vector of Amin et al. (2024), Table 4, with SmolLM2-135M: records of films, one clip,
theta off, 0.9 and 1.5, and every token public, for docs/results.md.

`python experiments/sparse_vector.py [WAY[#RUN]]...` makes the runs that are not there yet, of 30
texts each, and keeps their figures in experiments/measured/sparse_vector. Batches have 16 records,
so that a run takes minutes on a CPU, and epsilon pays for whole texts of them: the rows differ in
theta alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import jsonschema
from four_methods import Cell, changes, make_once
from runs import HERE, RUNS, left, released
from sets import FILM_SCHEMA

EPSILON, BATCH, CLIP, TEXTS, RUNS_OF_EACH = 60.0, 16, 2.0, 30, 2
NOISE, PUBLIC_TEMPERATURE = 0.2, 1.5
KEPT = HERE / "measured" / "sparse_vector"


class Way(NamedTuple):
    title: str
    threshold: float | None
    public_temperature: float = PUBLIC_TEMPERATURE


WAYS = {
    "off": Way("off", None),
    "0.9": Way("0.9", 0.9),
    "1.5": Way("1.5", 1.5),
    "public": Way("every token public", 9.0),
    "1.5_cool": Way("1.5, public temperature 0.7", 1.5, 0.7),
    "public_cool": Way("every token public, public temperature 0.7", 9.0, 0.7),
}


def settings(way: Way) -> list[str]:
    vector = None if way.threshold is None else {"threshold": way.threshold, "noise": NOISE}
    return [
        *changes(Cell("wikimovies", "private_prediction", 4.0, 0)),
        "method.batches=disjoint",
        "method.texts=null",
        f"method.max_records={TEXTS}",
        f"method.batch_size={BATCH}",
        f"method.clip_bound={CLIP}",
        f"method.sparse_vector={json.dumps(vector)}",
        f"method.public_temperature={way.public_temperature}",
        "method.longest_copy=null",
    ]


def kept(name: str, number: int) -> Path:
    return KEPT / f"{name}-{number}.json"


def share(texts: list[str], schema: dict[str, object]) -> float:
    """Return the share of texts that are JSON and fit the schema."""
    validator, fits = jsonschema.Draft202012Validator(schema), 0
    for text in texts:
        try:
            fits += validator.is_valid(json.loads(text))
        except ValueError:
            continue
    return round(fits / len(texts), 4)


def measure(name: str, number: int) -> None:
    out = RUNS / "sparse_vector" / f"{name}-{number}"
    minutes = make_once("smollm2/private_prediction", out, EPSILON, settings(WAYS[name]))
    records = released(out)
    texts = [record["text"] for record in records]
    report = json.loads((out / "privacy_report.json").read_text())
    found = {
        "texts": len(texts),
        "parses": share(texts, {}),
        "validates": share(texts, FILM_SCHEMA),
        "tokens": report.get("tokens"),
        "cpu_minutes": minutes and round(minutes, 2),
    }
    KEPT.mkdir(parents=True, exist_ok=True)
    kept(name, number).write_text(json.dumps(found, indent=1) + "\n")
    print(name, number, found, flush=True)


def section() -> list[str]:
    """Return the section of the page, of the runs that were made."""
    lines = [
        "## The sparse vector, on records of films",
        "",
        f"`python experiments/sparse_vector.py` makes {TEXTS} texts a run with SmolLM2-135M, "
        f"batches of {BATCH}, dclip with c {CLIP:g}, and sigma {NOISE:g}. Epsilon {EPSILON:g} is "
        "enough for whole texts from such small batches. The rows differ in theta, and the last "
        f"two in the temperature of public tokens, elsewhere {PUBLIC_TEMPERATURE:g} as in the "
        "paper. Each run has a figure. The last column says how many texts need as many private "
        "tokens as one text without the sparse vector.",
        "",
        "| theta | private tokens | parse | fit the schema | texts for one without |",
        "|---|---|---|---|---|",
    ]
    for name, way in WAYS.items():
        files = [kept(name, number) for number in range(RUNS_OF_EACH)]
        runs = [json.loads(file.read_text()) for file in files if file.exists()]
        if not runs:
            continue
        shares = [run["tokens"]["private"] / run["tokens"]["total"] for run in runs]
        more = ", ".join("any number" if share == 0 else f"{1 / share:.0f}" for share in shares)
        cells = [
            ", ".join(f"{share:.0%}" for share in shares),
            *(", ".join(f"{run[key]:.2f}" for run in runs) for key in ("parses", "validates")),
            more,
        ]
        lines.append(f"| {way.title} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    for name, number in left(sys.argv[1:], WAYS, RUNS_OF_EACH, kept):
        measure(name, number)

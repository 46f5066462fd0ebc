"""Do texts follow the attributes that they are written for? For docs/results.md.

`python experiments/attributes_in_texts.py [METHOD...]` releases reviews of Yelp for their stars by
each method, and prints how often a classifier of real reviews finds the stars of a released text.
Without attributes a text is written for no stars: the same texts with their stars shuffled.
With METHOD `prompts` it prints instead for how many real reviews SmolLM2 finds the review likelier
after a public prompt with its own stars than after one with others, in numbers and in words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from embedding import embed
from runs import DATA, RUNS, finished, released, rows

from dpray.config.sections import EngineConfig
from dpray.engines.transformers import TransformersEngine
from dpray.evaluation.downstream import Embedded, logistic_regression
from dpray.io.template_file import About
from dpray.methods import registry
from dpray.methods.aug_pe.prompts import Kind, load_variation_prompts
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.prompts import load_template

STARS = (1, 5)
REVIEWS = 40
SAID = {"stars": ("1", "5"), "experience": ("terrible", "excellent")}
METHODS: dict[str, dict[str, Any]] = {
    "aug_pe": {"records": 30, "iterations": 1, "variations": 2, "max_tokens": 32,
               "word_var": None, "temperature": 0.7},
    "dp_kps": {"vocabulary": str(DATA / "vocab" / "public_unigrams.tsv"), "records": 30,
               "phrases_per_record": 10, "max_tokens": 32, "generation_temperature": 0.7},
    "private_prediction": {"batches": "disjoint", "batch_size": 5, "max_records": 20,
                           "max_tokens": 24, "max_prompt_tokens": 32},
}  # fmt: skip


def some(part: str) -> list[dict[str, Any]]:
    """Return as many reviews of one star as of five."""
    found = rows(DATA / "yelp" / f"{part}.jsonl")
    of = [[row for row in found if row["stars"] == stars] for stars in STARS]
    return [row for pair in zip(*of, strict=False) for row in pair]


def release(method: str) -> list[dict[str, Any]]:
    """Return the records of a method's run at epsilon 4, which is made once."""
    folder = RUNS / "attributes_in_texts"
    out, file, private = folder / method, folder / "private.jsonl", some("private")
    if not finished(out):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in private))
        config = {
            "data": {"path": str(file), "public_size": len(private), "attributes": {"stars": STARS},
                     "about": "reviews of businesses by their customers", "language": "en"},
            "privacy": {"epsilon": 4.0, "delta": 1e-6, "dataset": method,
                        "ledger": f"sqlite:///{folder}/{method}.db"},
            "method": {"name": method, **METHODS[method]},
            "engine": {"kind": "transformers", "model": "smollm2"},
            "runtime": {"ray_address": "none"},
            "output": {"path": str(out)},
        }  # fmt: skip
        registry.run(parse_config(config))
    return released(out)


def likelier() -> None:
    """Print the share of real reviews that are likelier after their own attributes."""
    from prompt_likelihood import nats

    reviews = [row | {"text": row["text"][:240]} for row in some("test")[:REVIEWS]]
    about = About("reviews of businesses by their customers", "English", attributes={"": ""})
    engine = EngineConfig(kind="transformers", model="smollm2", max_model_len=512)
    prompts = {
        "private_prediction": lambda said: replace(
            read := load_template("texts", about=about), template=read.template.saying(said)
        ).public_prompt(""),
        "aug_pe": lambda said: replace(
            load_variation_prompts("texts", about=about), kinds={"x": Kind("", said, 1)}
        ).random("x", np.random.default_rng(0)),
    }
    with closing(TransformersEngine(engine)) as model:
        for name, prompt in prompts.items():
            for column, words in SAID.items():
                hits = []
                for row in reviews:
                    own = int(row["stars"] == STARS[1])
                    found = [nats(model, prompt({column: w}), row["text"])[0] for w in words]
                    hits.append(found[own] < found[1 - own])
                print(f"{name}, {column}: {np.mean(hits):.2f} of {len(hits)}", flush=True)


def embedded(records: list[dict[str, Any]]) -> Embedded:
    vectors = embed([row["text"] for row in records])
    return Embedded(vectors, np.array([int(row["stars"]) for row in records]))


def table(methods: Sequence[str]) -> None:
    guess = logistic_regression(embedded(some("test"))).predict
    print("| texts | number | stars found | shuffled |\n|---|---|---|---|", flush=True)
    for name in ("real", *methods):
        found = embedded(some("private") if name == "real" else release(name))
        guessed = guess(found.vectors)
        # Of all orders of the stars; a share of texts guessed and a share written agree by chance.
        chance = sum(np.mean(guessed == s) * np.mean(found.labels == s) for s in {*found.labels})
        hits = np.mean(guessed == found.labels)
        print(f"| {name} | {len(guessed)} | {hits:.2f} | {chance:.2f} |", flush=True)


if __name__ == "__main__":
    asked = sys.argv[1:] or [*METHODS]
    likelier() if asked == ["prompts"] else table(asked)

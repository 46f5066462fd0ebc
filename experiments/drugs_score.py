"""`score` counts the facts about new drugs that a release states, and those in fluent sentences. A
language model answers the questions on them, by what it reads in released records, and says how
likely a sentence is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drugs import Fact, Question, World, questions, statements
from joblib import Memory
from runs import RUNS, rows

from dpray.engines.model_path import resolve_model

SHOWN = 2
"""Records that the model reads before a question, at most."""

LEAST_WORDS = 3
LEAST_LIKELY = 0.01
KNOWN_DRUG = "Aspirin"
"""A sentence is fluent if it is whole, and as likely, for SmolLM2, as all but this share of the
real ones; a drug that the model knows stands in the place of the new one."""


def score(world: World, notes: Path, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of facts that are stated, in any sentence and in fluent ones, the share of
    statements that are false, and that of questions answered. `notes` is the file of real ones."""
    true = set(world.private)
    texts = [row["text"] for row in records]
    made = [each for text in texts for each in statements(text)]
    least = least_likely(notes)
    fluent = [(s, fact) for s, fact in made if is_fluent(s, fact, least)]
    found = {
        "texts": len(texts),
        "stated": share_stated([fact for _, fact in made], true),
        "stated_fluently": share_stated([fact for _, fact in fluent], true),
        "false": sum(f not in true for _, f in fluent) / max(1, len(fluent)),
        "silent": sum(not list(statements(text)) for text in texts) / max(1, len(texts)),
    }
    asked = questions(world.private)
    found["answered"] = sum(answered(records, asked)) / len(asked)
    return {name: round(value, 4) for name, value in found.items()}


def share_stated(made: Sequence[Fact], true: set[Fact]) -> float:
    """Return the share of facts that are stated more often than any other value of the drug's
    attribute."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for drug, attribute, value in made:
        counts.setdefault((drug, attribute), Counter())[value] += 1
    right = 0
    for drug, attribute, value in true:
        of = counts.get((drug, attribute), Counter())
        right += of[value] > max((n for v, n in of.items() if v != value), default=0)
    return right / len(true)


def is_fluent(sentence: str, fact: Fact, least: float) -> bool:
    whole = sentence[:1].isupper() and sentence.endswith(".")
    return whole and len(sentence.split()) >= LEAST_WORDS and likelihood(sentence, fact) >= least


def likelihood(sentence: str, fact: Fact) -> float:
    return float(log_likelihood(re.sub(fact.drug, KNOWN_DRUG, sentence, flags=re.IGNORECASE)))


def least_likely(notes: Path) -> float:
    """Return the log-likelihood a token that all but `LEAST_LIKELY` of real sentences exceed."""
    real = rows(notes)[:300]
    made = [each for row in real for each in statements(row["text"])]
    found = sorted(likelihood(*each) for each in made)
    return found[int(LEAST_LIKELY * len(found))]


def answered(records: Sequence[Mapping[str, Any]], questions: Sequence[Question]) -> list[bool]:
    """Say of every question whether its answer is the likeliest of the choices."""
    return [
        question.choices[likeliest(prompt(shown(records, question), question), question.choices)]
        == question.answer
        for question in questions
    ]


def shown(records: Sequence[Mapping[str, Any]], question: Question) -> list[str]:
    """Return the records that name the question's drug, of those whose label begins with its
    attribute, evenly spread over the release and `SHOWN` at most."""
    drug = re.compile(rf"\b{question.drug}\b", re.IGNORECASE)
    about = [
        record["text"]
        for record in records
        if str(record["label"]).split()[0] == question.attribute and drug.search(record["text"])
    ]
    return about[:: -(-len(about) // SHOWN) or 1]


def prompt(texts: Sequence[str], question: Question) -> str:
    lines = [*texts, f"Question: {question.question}", "Answer:"]
    return "\n".join(lines)


def likeliest(start: str, choices: list[str]) -> int:
    """Return the choice whose log-likelihood after `start` gains most over that after "Answer:"
    alone, which takes away how common the words are (Holtzman et al. 2021, PMI_DC)."""
    gains = np.subtract(log_likelihoods(start, choices), log_likelihoods("Answer:", choices))
    return int(gains.argmax())


@Memory(RUNS / "drugs" / "reader", verbose=0).cache
def log_likelihoods(start: str, choices: list[str]) -> list[float]:
    """Return each choice's log-likelihood after `start`; kept on disk."""
    model, tokenizer = language_model()
    ids = tokenizer(start, return_tensors="pt").input_ids
    tails = [tokenizer(" " + choice).input_ids for choice in choices]
    longest = max(map(len, tails))
    padded = torch.tensor([tail + [0] * (longest - len(tail)) for tail in tails])
    with torch.inference_mode():
        read = model(input_ids=ids, logits_to_keep=1)
        read.past_key_values.batch_repeat_interleave(len(choices))
        after = model(input_ids=padded, past_key_values=read.past_key_values)
    first = read.logits.expand(len(choices), -1, -1)
    logits = torch.cat([first, after.logits[:, :-1]], dim=1).log_softmax(-1)
    found = logits.gather(2, padded[..., None])[..., 0]
    return [float(row[: len(tail)].sum()) for row, tail in zip(found, tails, strict=True)]


@Memory(RUNS / "drugs" / "reader", verbose=0).cache
def log_likelihood(sentence: str) -> float:
    """Return the mean log-likelihood of a sentence's tokens; kept on disk."""
    model, tokenizer = language_model()
    ids = tokenizer("\n" + sentence, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return float(logits.gather(2, ids[:, 1:, None]).mean())


@cache
def language_model() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)

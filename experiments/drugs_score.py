"""`score` counts the facts about new drugs that a release states, and those in fluent sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drugs import Fact, World, questions, statements
from drugs_reader import answered, log_likelihood
from runs import rows

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

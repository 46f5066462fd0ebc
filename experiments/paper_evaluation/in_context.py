"""In-context learning shows a language model labelled records and asks it about real ones.

Shape suffixes: N queries, L labels, F content-free inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from scipy.special import softmax

from dpray.engines.base import Engine, PlainPrompt, Sampling
from dpray.evaluation.downstream import accuracy_and_f1, summaries
from paper_evaluation.causal_lm import CausalLM

Example = tuple[str, str]
"""An `Example` is a text and its label."""

SHOTS = (0, 4, 16, 64)

TEST_RECORDS = 250
"""The model is asked about at most this many real records (Amin et al. 2024, Section 5.1)."""

CONTENT_FREE = ("N/A", "[MASK]", "")
"""Zhao et al. (2021), Section 5, calibrate by these inputs."""

# The most tokens of a phrase that the model is asked for.
ANSWER_TOKENS = 24


class InContextClassifier:
    """The classifier answers with the label of the highest calibrated probability (`calibrated`).

    Its demonstrations are `balanced`, equally many of each label; `room` is in tokens, of a prompt.
    """

    task = "classification, with contextual calibration"
    balanced = True
    header = "Classify the following examples:\n"

    def __init__(self, lm: CausalLM, labels: Sequence[str]) -> None:
        self.lm, self.labels, self.cut = lm, sorted(labels), lm.codec.truncate
        self.answers = [lm.ids(f" {label}") for label in self.labels]
        longest = max(map(len, self.answers))
        self.room = lm.codec.context_length - 1 - longest - self.tokens(self.header)

    def tokens(self, piece: str) -> int:
        return len(self.lm.ids(piece))

    def scores(self, shown: Sequence[Example], tested: Sequence[Example]) -> dict[str, float]:
        """Score the answers about the tested records after demonstrations that fit the room."""
        # In pieces, so that a label has the same tokens in a demonstration and as an answer.
        prefix = self.lm.ids(self.header)
        for text, label in shown:
            prefix += self.lm.ids(question(text)) + self.lm.ids(f" {label}") + self.lm.ids("\n")
        asked = [*CONTENT_FREE, *(text for text, _ in tested)]
        queries = [self.lm.ids("\n" + question(text)) for text in asked]
        logs = self.lm.log_likelihoods(prefix, queries, self.answers)
        p_NL = np.exp(logs - np.logaddexp.reduce(logs, axis=1, keepdims=True))
        free_FL, texts_NL = p_NL[: len(CONTENT_FREE)], p_NL[len(CONTENT_FREE) :]
        predicted = np.array(self.labels)[calibrated(texts_NL, free_FL).argmax(axis=1)]
        return accuracy_and_f1([label for _, label in tested], predicted)


class InContextExtractor:
    """The extractor answers with the line that the engine writes, greedily and without calibration:
    for labels that are phrases of their text (MIT-G and MIT-D in Amin et al. 2024)."""

    task = "extraction"
    balanced = False
    header = "Find the phrase in each of the following examples:\n"

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cut = engine, engine.truncate
        self.room = engine.context_length - ANSWER_TOKENS - self.tokens(self.header)

    def tokens(self, piece: str) -> int:
        return len(self.engine.encode(PlainPrompt(user=piece)))

    def scores(self, shown: Sequence[Example], tested: Sequence[Example]) -> dict[str, float]:
        """Score the answers about the tested records after demonstrations that fit the room."""
        before = self.header + "".join(f"{question(text)} {label}\n" for text, label in shown)
        prompts = [PlainPrompt(user=f"{before}\n{question(text)}") for text, _ in tested]
        sampling = Sampling(ANSWER_TOKENS, temperature=0.0, stop=("\n",))
        made = self.engine.generate(prompts, [sampling] * len(prompts))
        answers = [completion.text for completion in made]
        pairs = [
            (answer.lower().split(), truth.lower().split())
            for answer, (_, truth) in zip(answers, tested, strict=True)
        ]
        return {
            "exact_match": float(np.mean([answer == truth for answer, truth in pairs])),
            "word_f1": float(np.mean([word_f1(answer, truth) for answer, truth in pairs])),
        }


Learner = InContextClassifier | InContextExtractor


def compare_in_context(
    learner: Learner,
    sets: Mapping[str, Sequence[Example]],
    test: Sequence[Example],
    seeds: int,
) -> dict[str, Any]:
    """Score n-shot learning (Amin et al. 2024, Section 5.1 and Figure 2) from demonstrations out of
    each of `sets` (synthetic, ceiling, floor) on real test records.

    Each seed draws the demonstrations anew. Texts are cut to a quarter of the context, and
    demonstrations that do not fit the context are left out: `fitted` is how many were shown, on
    average. Without demonstrations (n = 0) all sets have the same scores.
    """
    rng = np.random.default_rng(0)
    tested = _cut(learner, [test[i] for i in rng.permutation(len(test))[:TEST_RECORDS]])
    room = learner.room - max(learner.tokens(question(text)) for text, _ in tested)
    rows: list[dict[str, Any]] = []
    for shots in SHOTS:
        row: dict[str, Any] = {"shots": shots}
        for place, (name, records) in enumerate(sets.items()):
            if place and not shots:
                row[name] = row[next(iter(sets))]
                continue
            drawn = [
                _fitting(learner, _draw(records, shots, learner.balanced, seed), room)
                for seed in range(seeds if shots else 1)
            ]
            found = [learner.scores(shown, tested) for shown in drawn]
            row[name] = {
                "fitted": float(np.mean([len(shown) for shown in drawn])),
                **summaries(found),
            }
        rows.append(row)
    return {"task": learner.task, "test_records": len(tested), "seeds": seeds, "rows": rows}


def calibrated(p_NL: np.ndarray, free_FL: np.ndarray) -> np.ndarray:
    """Calibrate by context (Zhao et al. 2021, Section 5): divide each label's probability by its
    average over inputs without content, `softmax(W p)` with `W = diag(p_cf)^-1`. Shape (N, L).
    The rows of both are probabilities of the labels, which add up to 1.
    """
    weighted_NL = p_NL / np.maximum(free_FL.mean(axis=0), np.finfo(float).tiny)
    return np.asarray(softmax(weighted_NL, axis=1))


def word_f1(answer: Sequence[str], truth: Sequence[str]) -> float:
    """Return the F1 of the words that both share (Rajpurkar et al. 2016, Section 6.1)."""
    shared = sum((Counter(answer) & Counter(truth)).values())
    return 2 * shared / (len(answer) + len(truth)) if shared else 0.0


def question(text: str) -> str:
    """Ask for the label of a text, as in Amin et al. (2024), Figure 2."""
    return f"Text: {text}\nAnswer:"


def _cut(learner: Learner, records: Sequence[Example]) -> list[Example]:
    """Put each text on one line and cut it to a quarter of the room."""
    return [(learner.cut(" ".join(t.split()), learner.room // 4), label) for t, label in records]


def _draw(records: Sequence[Example], shots: int, balanced: bool, seed: int) -> list[Example]:
    """Draw different records in a random order; where `balanced`, equally many of each label, and
    the remainder from labels drawn at random."""
    rng = np.random.default_rng([seed, shots])
    order = rng.permutation(len(records))
    if balanced:
        # One record of each label in turn, the labels in an order that is drawn too.
        labels = rng.permutation(sorted({label for _, label in records}))
        rows = ([i for i in order if records[i][1] == label] for label in labels)
        turns = chain.from_iterable(zip_longest(*rows))
        order = rng.permutation([i for i in turns if i is not None][:shots])
    return [records[i] for i in order[:shots]]


def _fitting(learner: Learner, shown: Sequence[Example], room: int) -> list[Example]:
    """Return the demonstrations, cut, up to the first that does not fit the room."""
    fitting: list[Example] = []
    for text, label in _cut(learner, shown):
        room -= learner.tokens(f"{question(text)} {label}\n") + 2
        if room < 0:
            break
        fitting.append((text, label))
    return fitting

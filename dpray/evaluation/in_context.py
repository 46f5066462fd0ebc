"""In-context learning: a language model that is shown records, and asked about real ones.

Shape suffixes: N queries, L labels, F content-free inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from sklearn.metrics import accuracy_score, f1_score

from dpray.engines.base import Engine, PlainPrompt, Sampling
from dpray.evaluation.causal_lm import CausalLM
from dpray.evaluation.lengths import mean_and_deviation

Shown = tuple[str, str]
"""A text and its label."""

SHOTS = (0, 4, 16, 64)
TEST_RECORDS = 250
"""Real records that are asked about, at most: Amin et al. (2024), Section 5.1."""

CONTENT_FREE = ("N/A", "[MASK]", "")
"""Zhao et al. (2021), Section 5."""

ANSWER_TOKENS = 24
"""Tokens of a phrase that is asked for, at most."""

_DRAW_SEED = 0


class Learner(Protocol):
    """A model that learns from its prompt. Texts come cut, on one line, and prompts fit."""

    task: str
    balanced: bool
    """Whether the demonstrations are to be equally many of each label."""
    room: int
    """Tokens of the longest prompt."""

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text, of so many tokens at most."""
        ...

    def tokens(self, piece: str) -> int: ...

    def scores(self, shown: Sequence[Shown], tested: Sequence[Shown]) -> dict[str, float]:
        """How well the tested records are answered after the demonstrations, by measure."""
        ...


def compare_in_context(
    learner: Learner,
    sets: Mapping[str, Sequence[Shown]],
    test: Sequence[Shown],
    seeds: int,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """n-shot learning (Amin et al. 2024, Section 5.1 and Figure 2) from demonstrations out of each
    of `sets` (synthetic, ceiling, floor), asked about real test records.

    Each seed draws the demonstrations anew. Texts are cut to a quarter of the context, and those
    demonstrations that the context has no room for are left out: `fitted` is how many were shown,
    on average. Without demonstrations (n = 0) all sets are alike.
    """
    rng = np.random.default_rng(_DRAW_SEED)
    tested = _cut(learner, [test[i] for i in rng.permutation(len(test))[:TEST_RECORDS]])
    room = learner.room - max(learner.tokens(question(text)) for text, _ in tested)
    rows: list[dict[str, Any]] = []
    total = len(SHOTS) * len(sets)
    for shots in SHOTS:
        row: dict[str, Any] = {"shots": shots}
        for place, (name, records) in enumerate(sets.items()):
            on_step(len(rows) * len(sets) + place, total)
            if shots or not place:
                drawn = [
                    _fitting(learner, _draw(records, shots, learner.balanced, seed), room)
                    for seed in range(seeds if shots else 1)
                ]
                found = [learner.scores(shown, tested) for shown in drawn]
                row[name] = {
                    "fitted": float(np.mean([len(shown) for shown in drawn])),
                    **{key: mean_and_deviation([one[key] for one in found]) for key in found[0]},
                }
            else:
                row[name] = row[next(iter(sets))]
        rows.append(row)
    return {"task": learner.task, "test_records": len(tested), "seeds": seeds, "rows": rows}


class InContextClassifier:
    """Answers with the label of the highest calibrated probability (`calibrated`)."""

    task = "classification, with contextual calibration"
    balanced = True
    header = "Classify the following examples:\n"

    def __init__(self, lm: CausalLM, labels: Sequence[str]) -> None:
        self.lm, self.labels = lm, sorted(labels)
        self.answers = [lm.ids(f" {label}") for label in self.labels]
        longest = max(map(len, self.answers))
        self.room = lm.context_length - 1 - longest - self.tokens(self.header)

    def cut(self, text: str, tokens: int) -> str:
        return self.lm.codec.truncate(text, tokens)

    def tokens(self, piece: str) -> int:
        return len(self.lm.ids(piece))

    def scores(self, shown: Sequence[Shown], tested: Sequence[Shown]) -> dict[str, float]:
        # In pieces, so that a label has the same tokens as a demonstration's and as an answer.
        prefix = self.lm.ids(self.header)
        for text, label in shown:
            prefix += self.lm.ids(question(text)) + self.lm.ids(f" {label}") + self.lm.ids("\n")
        asked = [*CONTENT_FREE, *(text for text, _ in tested)]
        queries = [self.lm.ids("\n" + question(text)) for text in asked]
        logs = self.lm.log_likelihoods(prefix, queries, self.answers)
        p_NL = np.exp(logs - np.logaddexp.reduce(logs, axis=1, keepdims=True))
        free, of_texts = p_NL[: len(CONTENT_FREE)], p_NL[len(CONTENT_FREE) :]
        predicted = np.array(self.labels)[calibrated(of_texts, free).argmax(axis=1)]
        truth = [label for _, label in tested]
        # Of the labels that were asked about, as downstream: others have no record to be found.
        macro_f1 = f1_score(
            truth, predicted, labels=np.unique(truth), average="macro", zero_division=0.0
        )
        return {
            "accuracy": float(accuracy_score(truth, predicted)),
            "macro_f1": float(macro_f1),
        }


class InContextExtractor:
    """Answers with the line that the engine writes, greedily, without calibration: for labels that
    are phrases of their text (MIT-G and MIT-D in Amin et al. 2024)."""

    task = "extraction"
    balanced = False
    header = "Find the phrase in each of the following examples:\n"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.room = engine.context_length - ANSWER_TOKENS - self.tokens(self.header)

    def cut(self, text: str, tokens: int) -> str:
        return self.engine.truncate(text, tokens)

    def tokens(self, piece: str) -> int:
        return len(self.engine.encode(PlainPrompt(user=piece)))

    def scores(self, shown: Sequence[Shown], tested: Sequence[Shown]) -> dict[str, float]:
        before = self.header + "".join(f"{question(text)} {label}\n" for text, label in shown)
        prompts = [PlainPrompt(user=f"{before}\n{question(text)}") for text, _ in tested]
        sampling = Sampling(ANSWER_TOKENS, temperature=0.0, stop=("\n",))
        answers = [completion.text for completion in self.engine.generate(prompts, sampling)]
        pairs = [(_words(a), _words(truth)) for a, (_, truth) in zip(answers, tested, strict=True)]
        return {
            "exact_match": float(np.mean([answer == truth for answer, truth in pairs])),
            "word_f1": float(np.mean([word_f1(answer, truth) for answer, truth in pairs])),
        }


def calibrated(p_NL: np.ndarray, free_FL: np.ndarray) -> np.ndarray:
    """Contextual calibration (Zhao et al. 2021, Section 5): each label's probability over what
    inputs without content give it on average: `softmax(W p)`, `W = diag(p_cf)^-1`. Shape (N, L).
    Rows of both are probabilities of the labels, which add up to 1.
    """
    weighted = p_NL / np.maximum(free_FL.mean(axis=0), np.finfo(float).tiny)
    largest = weighted.max(axis=1, keepdims=True)
    raised = np.exp(weighted - largest)
    found: np.ndarray = raised / raised.sum(axis=1, keepdims=True)
    return found


def word_f1(answer: Sequence[str], truth: Sequence[str]) -> float:
    """F1 of the words that an answer and the truth share (Rajpurkar et al. 2016, Section 6.1)."""
    shared = sum((Counter(answer) & Counter(truth)).values())
    return 2 * shared / (len(answer) + len(truth)) if shared else 0.0


def question(text: str) -> str:
    """What asks for the label of a text: Amin et al. (2024), Figure 2."""
    return f"Text: {text}\nAnswer:"


def _words(answer: str) -> list[str]:
    return answer.lower().split()


def _cut(learner: Learner, records: Sequence[Shown]) -> list[Shown]:
    return [(learner.cut(" ".join(t.split()), learner.room // 4), label) for t, label in records]


def _draw(records: Sequence[Shown], shots: int, balanced: bool, seed: int) -> list[Shown]:
    """Different records in a random order; where `balanced`, equally many of each label, and those
    that are left over of labels drawn at random."""
    rng = np.random.default_rng([seed, shots])
    order = rng.permutation(len(records))
    if balanced:
        # In turn over the labels, and over them in an order that is drawn too.
        turns: Counter[str] = Counter()
        rank = {
            label: i for i, label in enumerate(rng.permutation(sorted({b for _, b in records})))
        }
        keys = {}
        for i in order:
            label = records[i][1]
            keys[i] = (turns[label], rank[label])
            turns[label] += 1
        order = rng.permutation(sorted(order, key=lambda i: keys[i])[:shots])
    return [records[i] for i in order[:shots]]


def _fitting(learner: Learner, shown: Sequence[Shown], room: int) -> list[Shown]:
    """The demonstrations, cut, up to the first that there is no room for."""
    fitting: list[Shown] = []
    for text, label in _cut(learner, shown):
        room -= learner.tokens(f"{question(text)} {label}\n") + 2
        if room < 0:
            break
        fitting.append((text, label))
    return fitting

"""The figures that four_methods.py takes of a run's release. They are kept beside the scripts, so
that a table can be put together of runs whose folders are gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from embedding import Kept, embed, embedded
from runs import accuracy, as_embedded, rows
from sets import SETS, part
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

from dpray.evaluation.copies import NGRAM, shared_words
from dpray.evaluation.downstream import Embedded, mean_and_deviation
from dpray.evaluation.fidelity import frechet_distance, mauve
from dpray.evaluation.membership import membership
from dpray.evaluation.texts import structure

A_SIDE = 80
"""Records a side of a Fréchet distance; a run may release a few fewer than were asked for."""

COPIED = 8
"""So many words in a row are a copy."""

SAMPLES = 10

Figures = dict[str, float | None]


class Yardstick:
    """A data set's real texts, which releases are compared with."""

    def __init__(self, data: str) -> None:
        self.data = data

    @cached_property
    def test(self) -> Embedded:
        return embedded(part(self.data, "test"))

    def texts(self, name: str) -> list[str]:
        return [row["text"] for row in rows(part(self.data, name))]

    @cached_property
    def public(self) -> list[str]:
        return self.texts("public")

    @cached_property
    def private(self) -> list[str]:
        return self.texts("private")

    @property
    def is_json(self) -> bool:
        return SETS[self.data].is_json

    @property
    def labelled(self) -> bool:
        return len(set(self.test.labels)) > 1

    def of_release(self, records: Sequence[dict[str, Any]]) -> Figures:
        """All figures of a run's records."""
        texts = [record["text"] for record in records]
        scores = membership(self.private, self.texts("test"), texts, Kept())["scores"]
        return {
            "texts": len(texts),
            **self.of_vectors(as_embedded(records, embed)),
            "copies_public": copied(texts, self.public),
            "copies_private": copied(texts, self.private),
            "membership": scores["nearest_cosine"]["auc"],
            "parses": structure(texts, None)["json_parse_share"] if self.is_json else None,
        }

    def of_vectors(self, made: Embedded) -> Figures:
        """The figures that real records have, too; those of a side of `A_SIDE` texts are None for
        fewer."""
        enough = len(made.labels) >= A_SIDE
        return {
            "accuracy": accuracy(made, self.test) if self.labelled else None,
            "by_label": mean_recall(made, self.test) if self.labelled else None,
            "distance": distance(made, self.test, A_SIDE) if enough else None,
            "mauve": self.mauve(made) if enough else None,
        }

    def mauve(self, made: Embedded) -> float:
        sides = (draw(made, A_SIDE, 0).vectors, draw(self.test, A_SIDE, 1).vectors)
        return mauve(*sides, seed=0)

    def samples(self, records: Sequence[dict[str, Any]]) -> list[str]:
        """Records at equal distances in the release, unselected. Of those that copy public texts,
        which have a licence of their own, it says just that."""
        records = records[:: max(1, len(records) // SAMPLES)][:SAMPLES]
        longest = shared_words([record["text"] for record in records], self.public, NGRAM)[0]
        found = []
        for record, words in zip(records, longest, strict=True):
            text = " ".join(record["text"].split())
            if words >= COPIED:
                text = f"(shares {words} words in a row with a public text)"
            found.append(f"*{record['label']}*: {text}" if self.labelled else text)
        return found


def rounded(figures: Figures) -> Figures:
    """Return the figures with the digits that are kept."""
    return {name: value and round(value, 4) for name, value in figures.items()}


def keep(file: Path, figures: Figures) -> None:
    """Write the figures of a run to a file of measured/, and print them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rounded(figures), indent=1) + "\n")
    print(file.parent.name, file.stem, rounded(figures), flush=True)


def mean_recall(train: Embedded, test: Embedded) -> float:
    """The mean of the labels' accuracies, by a logistic regression to which all labels matter
    equally: where one label has most records, few texts teach the usual one that label alone."""
    model = LogisticRegression(class_weight="balanced", max_iter=1000)
    predicted = model.fit(train.vectors, train.labels).predict(test.vectors)
    return float(balanced_accuracy_score(test.labels, predicted))


def copied(texts: Sequence[str], originals: Sequence[str]) -> float:
    """The share of texts with `COPIED` words in a row of an original."""
    return float(np.mean(shared_words(texts, originals, NGRAM)[0] >= COPIED))


def distance(made: Embedded, test: Embedded, a_side: int) -> float:
    """NaN where a run released fewer texts."""
    if len(made.labels) < a_side:
        return float("nan")
    return frechet_distance(draw(made, a_side, 0).vectors, draw(test, a_side, 1).vectors)


def draw(some: Embedded, size: int, seed: int) -> Embedded:
    rows = np.random.default_rng(seed).choice(len(some.labels), size, replace=False)
    return Embedded(some.vectors[rows], some.labels[rows])


def spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    found = mean_and_deviation(list(values))
    return f"{found['mean']:.3f} ± {found['deviation']:.3f} ({len(values)})"

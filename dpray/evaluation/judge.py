"""A judge scores several releases by the same real records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpray.engines.base import Embedder
from dpray.evaluation.downstream import Embedded, compare_downstream
from dpray.evaluation.fidelity import compare_fidelity

SEEDS = 5


class Judge:
    """Scores records against `test`, real ones that had no part in them. `train` are other real
    records, and `text` and `label` are the columns of both; without `label` they have none.

    `score` names the measure that decides: `accuracy`, where records have labels, or else
    `frechet_distance`.
    """

    def __init__(
        self,
        embedder: Embedder,
        train: Sequence[Mapping[str, Any]],
        test: Sequence[Mapping[str, Any]],
        text: str,
        label: str | None,
    ) -> None:
        self._embedder = embedder
        self._train, self._test = (self._embedded(rows, text, label) for rows in (train, test))
        self.score = "accuracy" if label is not None else "frechet_distance"

    def scores(
        self, records: Sequence[Mapping[str, Any]], text: str = "text", label: str | None = "label"
    ) -> dict[str, Any]:
        """Return the number of records, and mean and deviation of each measure over draws of them.
        A release has the columns `text` and `label`."""
        labelled = self.score == "accuracy"
        made = self._embedded(records, text, label if labelled else None)
        found: dict[str, Any] = {"records": len(records)}
        if labelled:
            sets = {"synthetic": made, "ceiling": self._train}
            found["accuracy"] = compare_downstream(sets, self._test, SEEDS)["synthetic"]["accuracy"]
        sides = (made.vectors, self._train.vectors, self._test.vectors)
        measures = compare_fidelity({"": sides}, SEEDS)["measures"]
        for name in ("frechet_distance", "mauve"):
            found[name] = measures[name]["synthetic_to_real"]
        return found

    def _embedded(
        self, rows: Sequence[Mapping[str, Any]], text: str, label: str | None
    ) -> Embedded:
        vectors = self._embedder.embed([str(row[text]) for row in rows])
        labels = [str(row[label]) if label is not None else "" for row in rows]
        return Embedded(vectors, np.array(labels))

"""A judge scores several releases by the same real records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpray.engines.base import Embedder
from dpray.evaluation.downstream import Embedded, compare_downstream
from dpray.evaluation.fidelity import compare_fidelity
from dpray.io.columns import label_name

SEEDS = 5


class Judge:
    """Scores records against `test`, real ones that had no part in them. `train` are other real
    records. All have a `text` and a `label`, which counts where they are `labelled`.

    `score` names the measure that decides: `accuracy`, where records have labels, or else
    `frechet_distance`.
    """

    def __init__(
        self,
        embedder: Embedder,
        train: Sequence[Mapping[str, Any]],
        test: Sequence[Mapping[str, Any]],
        labelled: bool,
    ) -> None:
        self._embedder, self._labelled = embedder, labelled
        self._train, self._test = (self._embedded(rows) for rows in (train, test))
        self.score = "accuracy" if labelled else "frechet_distance"

    def scores(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the number of records, and mean and deviation of each measure over draws of
        them."""
        made = self._embedded(records)
        found: dict[str, Any] = {"records": len(records)}
        if self._labelled:
            sets = {"synthetic": made, "ceiling": self._train}
            found["accuracy"] = compare_downstream(sets, self._test, SEEDS)["synthetic"]["accuracy"]
        sides = (made.vectors, self._train.vectors, self._test.vectors)
        measures = compare_fidelity({"": sides}, SEEDS)["measures"]
        for name in ("frechet_distance", "mauve"):
            found[name] = measures[name]["synthetic_to_real"]
        return found

    def _embedded(self, rows: Sequence[Mapping[str, Any]]) -> Embedded:
        vectors = self._embedder.embed([row["text"] for row in rows])
        labels = [label_name(row["label"]) if self._labelled else "" for row in rows]
        return Embedded(vectors, np.array(labels))

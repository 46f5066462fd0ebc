"""`evaluate`: measures of a synthetic data set against real records.

Nothing here is differentially private: every number is computed from private records, and no
budget pays for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpray.engines.base import Embedder
from dpray.evaluation.downstream import Embedded, compare_downstream, label_counts
from dpray.evaluation.fidelity import compare_fidelity
from dpray.evaluation.lengths import compare_lengths
from dpray.evaluation.structure import structure
from dpray.types import InputError

NOT_FOR_RELEASE = "computed from private data; not for release"

Labelled = tuple[str, str | None]
"""A text and its label, None where the data has none."""


def evaluate(
    real: Sequence[Labelled],
    synthetic: Sequence[Labelled],
    embedder: Embedder,
    *,
    train: Sequence[Labelled] | None = None,
    floor: Sequence[Labelled] | None = None,
    schema: dict[str, Any] | None = None,
    seeds: int = 5,
) -> dict[str, Any]:
    """What `evaluation.json` holds: `downstream` (None without labels), `fidelity`, `lengths` and
    `structure`.

    `real` are the test records, `train` other real records for the ceiling; without `train`, `real`
    is split in two halves (`split`). `floor` are labelled texts that owe nothing to the private
    data. Raises `InputError` where a part is empty, has one label only, or shares no label with the
    real records.
    """
    if seeds < 1:
        raise InputError("seeds: has to be 1 or more")
    sets = {"real": real, "synthetic": synthetic, "train": train, "floor": floor}
    given = {name: records for name, records in sets.items() if records is not None}
    _check(given)
    test = real
    if train is None:
        train, test = split(real)
        _check({"first half of the real": train, "second half of the real": test})
    made, trained, tested = (_embed(r, embedder) for r in (synthetic, train, test))
    downstream = None
    if made.labels is not None:
        of_floor = None if floor is None else _embed(floor, embedder)
        downstream = compare_downstream(made, trained, tested, of_floor, seeds)
    return {
        "private": NOT_FOR_RELEASE,
        "records": {
            name: label_counts([str(label or "") for _, label in r]) for name, r in given.items()
        },
        "test_records": len(test),
        "downstream": downstream,
        "fidelity": compare_fidelity(made.vectors, trained.vectors, tested.vectors, seeds),
        "lengths": compare_lengths(_texts(synthetic), _texts(train), _texts(test), seeds),
        "structure": {
            "real": structure(_texts(real), schema),
            "synthetic": structure(_texts(synthetic), schema),
        },
    }


def split(real: Sequence[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
    """Two halves (train, test) of the real records, by a hash of each text: the same whatever the
    order of the rows, and two copies of one text are never on both sides."""
    halves: tuple[list[Labelled], list[Labelled]] = ([], [])
    for record in real:
        digest = hashlib.sha256(record[0].encode("utf-8", "surrogatepass")).digest()
        halves[digest[0] & 1].append(record)
    return halves


def _check(sets: dict[str, Sequence[Labelled]]) -> None:
    known: set[str | None] | None = None
    unlabelled: list[str] = []
    for name, records in sets.items():
        labels = {label for _, label in records}
        if not records:
            raise InputError(f"{name} records: there are none")
        if labels == {None}:
            if len(records) < 2:
                raise InputError(f"{name} records: there is one only")
            unlabelled.append(name)
            continue
        if None in labels:
            raise InputError(f"{name} records: some have a label and some have none")
        if len(labels) == 1:
            raise InputError(f"{name} records: all have one label, a classifier needs two")
        known = known or labels
        if not labels & known:
            raise InputError(f"{name} records: no label in common with the real records")
    if unlabelled and known is not None:
        raise InputError(f"{unlabelled[0]} records: they have no label, and others have one")


def _texts(records: Sequence[Labelled]) -> list[str]:
    return [text for text, _ in records]


def _embed(records: Sequence[Labelled], embedder: Embedder) -> Embedded:
    vectors = np.asarray(embedder.embed(_texts(records)), dtype=np.float32)
    labels = [label for _, label in records]
    return Embedded(vectors, None if None in labels else np.array(labels))

"""`evaluate` measures a synthetic data set against real records.

Nothing here is differentially private: private records make every number, and no budget pays.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dpray.engines.base import Embedder, Engine
from dpray.evaluation import NOT_FOR_RELEASE
from dpray.evaluation.causal_lm import CausalLM
from dpray.evaluation.chunks import ChunkMap, chunks
from dpray.evaluation.copies import compare_copies
from dpray.evaluation.downstream import Embedded, compare_classifier, compare_downstream
from dpray.evaluation.fidelity import DRAW, FEW, compare_fidelity, embedding_map
from dpray.evaluation.fine_tuning import Encoder, compare_next_word
from dpray.evaluation.in_context import (
    InContextClassifier,
    InContextExtractor,
    Learner,
    compare_in_context,
)
from dpray.evaluation.network import NETWORKS
from dpray.evaluation.structure import structure
from dpray.evaluation.texts import compare_diversity, compare_lengths
from dpray.evaluation.topics import Cluster, compare_topics, k_means
from dpray.types import InputError, OnProgress, Progress

Labelled = tuple[str, str | None]
"""A `Labelled` record is a text and its label, None where the data has none."""

SIDES = ("synthetic", "ceiling", "test")

Sets = Mapping[str, Sequence[Labelled]]
"""The `Sets` are `synthetic`; `ceiling`, other real records; `test`, real ones; maybe `floor`."""


def evaluate(
    real: Sequence[Labelled],
    synthetic: Sequence[Labelled],
    embedder: Embedder | Mapping[str, Embedder],
    *,
    train: Sequence[Labelled] | None = None,
    floor: Sequence[Labelled] | None = None,
    schema: dict[str, Any] | None = None,
    seeds: int = 5,
    networks: bool = False,
    encoder: Encoder | None = None,
    lm: CausalLM | None = None,
    extractor: Engine | None = None,
    cluster: Cluster = k_means,
    map_chunks: ChunkMap = map,
    on_progress: OnProgress = lambda progress: None,
) -> dict[str, Any]:
    """Return the content of `evaluation.json`: `downstream` (None without labels), `in_context` and
    `next_word` (None without `lm`), `fidelity`, `copies`, `topics`, `map`, `diversity`, `lengths`
    and `structure`, and `warnings` on how to read them.

    `real` are the test records. `train` are other real records, best the private ones that the
    synthetic were made of: they train the ceiling and are searched for near-duplicates. Without
    `train`, `real` is split into halves (`split`). `floor` are labelled texts that owe nothing to
    the private data. With several embedders, given by name, the fidelity is their average; the
    first one serves the rest. `networks` and a fine-tuned `encoder` are added to `downstream`. With
    an `extractor` the labels are phrases to be found in their texts: in-context learning asks this
    engine for them, and nothing classifies. `cluster` finds the topics. `map_chunks` distributes
    the work that grows with the data: the embedding, and the search for near-duplicates.

    Raises InputError where a set is empty, too small (`FEW`), has only one label, or shares no
    label with the real records, and where all real texts are the same.
    """
    given = {"real": real, "synthetic": synthetic, "train": train, "floor": floor}
    records = {name: rows for name, rows in given.items() if rows is not None}
    sets = _sets(records, classes=extractor is None)
    texts = {name: [text for text, _ in rows] for name, rows in sets.items()}
    made, other, tested = sides = texts["synthetic"], texts["ceiling"], texts["test"]
    # A bad schema is refused before the long work.
    shares = {
        "real": structure([text for text, _ in real], schema),
        "synthetic": structure(made, schema),
    }
    embedders = embedder if isinstance(embedder, Mapping) else {"embedder": embedder}
    vectors = _embed_all(sets, embedders, map_chunks, on_progress)
    arrays = {name: [of_set[key].vectors for key in SIDES] for name, of_set in vectors.items()}
    first, first_arrays = next(iter(vectors.values())), next(iter(arrays.values()))
    downstream = None
    if first["test"].labels is not None and extractor is None:
        downstream = _downstream(sets, first, seeds, networks, encoder, on_progress)
    trained_on: dict[str, Any] = {name: rows for name, rows in sets.items() if name != "test"}
    in_context = next_word = None
    if learner := _learner(sets["test"], lm, extractor):
        test: Any = sets["test"]  # with labels
        in_context = compare_in_context(learner, trained_on, test, seeds, on_progress)
    if lm is not None:
        next_word = compare_next_word(
            lm, {name: texts[name] for name in trained_on}, tested, seeds, on_progress
        )
    fidelity = compare_fidelity(arrays, seeds, on_progress)
    searched = _with_progress(map_chunks, "near-duplicates", on_progress)
    copies = compare_copies(*sides, first_arrays, searched)
    on_progress(Progress("topics, words"))
    return {
        "private": NOT_FOR_RELEASE,
        "warnings": _warnings(made, fidelity["records_a_side"], train is None),
        "records": {
            name: dict(sorted(Counter(label or "" for _, label in rows).items()))
            for name, rows in records.items()
        },
        "test_records": len(tested),
        "downstream": downstream,
        "in_context": in_context,
        "next_word": next_word,
        "fidelity": fidelity,
        "copies": copies,
        "topics": compare_topics(sides, first_arrays, cluster),
        "map": embedding_map(first_arrays[0], first_arrays[2]),
        "diversity": compare_diversity(made, tested, other, seeds),
        "lengths": compare_lengths(*sides, seeds),
        "structure": shares,
    }


def split(real: Sequence[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
    """Split the real records into halves (train, test) by a hash of each text: the order of the
    rows does not matter, and copies of one text are never on both sides."""
    halves: tuple[list[Labelled], list[Labelled]] = ([], [])
    for record in real:
        halves[is_for_test(record[0])].append(record)
    return halves


def is_for_test(text: str) -> bool:
    """Return whether a text falls into the second half of `split`."""
    return bool(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] & 1)


def _sets(records: Sets, classes: bool) -> Sets:
    """Check the records and return the `Sets`."""
    _check(records, classes)
    real = records["real"]
    if len({text for text, _ in real}) == 1:
        raise InputError("real records: all have one text")
    if "train" in records:
        named = {name: records[name] for name in ("synthetic", "train", "real")}
    else:
        train, test = split(real)
        halves = {"first half of the real": train, "second half of the real": test}
        _check(halves, classes)
        named = {"synthetic": records["synthetic"], **halves}
    for name, rows in named.items():
        if len(rows) < FEW:
            raise InputError(f"{name} records: too few, it takes {FEW}")
    sets = dict(zip(SIDES, named.values(), strict=True))
    return sets | ({"floor": records["floor"]} if "floor" in records else {})


def _check(sets: Sets, classes: bool) -> None:
    labels_of = {name: {label for _, label in records} for name, records in sets.items()}
    known = next((labels for labels in labels_of.values() if labels - {None}), {None})
    for name, labels in labels_of.items():
        if not labels:
            raise InputError(f"{name} records: there are none")
        if None in labels and labels != {None}:
            raise InputError(f"{name} records: some have a label and some have none")
        if labels == {None} and known != {None}:
            raise InputError(f"{name} records: they have no label, and others have one")
        if classes and len(labels) == 1 and known != {None}:
            raise InputError(f"{name} records: all have one label, a classifier needs two")
        if classes and not labels & known:
            raise InputError(f"{name} records: no label in common with the real records")


def _downstream(
    sets: Sets,
    vectors: Mapping[str, Embedded],
    seeds: int,
    networks: bool,
    encoder: Encoder | None,
    on_progress: OnProgress,
) -> dict[str, Any]:
    on_progress(Progress("classifiers"))
    trained_on = {name: data for name, data in vectors.items() if name != "test"}
    result = compare_downstream(trained_on, vectors["test"], seeds)
    result["networks"] = [
        compare_classifier(name, fit, trained_on, vectors["test"], seeds)
        for name, fit in (NETWORKS.items() if networks else ())
    ]
    if encoder is not None:
        on_progress(Progress("encoder"))
        texts = {
            name: Embedded(np.array([text for text, _ in rows], dtype=object), vectors[name].labels)
            for name, rows in sets.items()
        }
        test, name = texts.pop("test"), f"fine-tuned {encoder.name}"
        result["networks"].append(compare_classifier(name, encoder.fit, texts, test, seeds))
    return result


def _learner(
    test: Sequence[Labelled], lm: CausalLM | None, extractor: Engine | None
) -> Learner | None:
    """Return what learns in context, None where there is no model for it or there are no labels."""
    labels = {label for _, label in test if label is not None}
    if labels and extractor is not None:
        return InContextExtractor(extractor)
    return InContextClassifier(lm, sorted(labels)) if labels and lm is not None else None


def _warnings(synthetic: Sequence[str], records_a_side: int, halves: bool) -> list[str]:
    """Return warnings on how the numbers can mislead."""
    found = []
    if records_a_side < DRAW:
        found.append(
            f"MAUVE and the other measures of fidelity shift with the number of records: at "
            f"{records_a_side} a side (under {DRAW}) read them beside real to real only"
        )
    different = len(set(synthetic)) / len(synthetic)
    if different < 0.5:
        found.append(f"only {different:.0%} of the synthetic texts are different ones")
    if halves:
        found.append(
            "near-duplicates are looked for in half of the real records only: give the private "
            "ones as train records to look in all of them"
        )
    return found


def _embed_all(
    sets: Sets, embedders: Mapping[str, Embedder], map_chunks: ChunkMap, on_progress: OnProgress
) -> dict[str, dict[str, Embedded]]:
    """Return the sets' embeddings by each embedder; the floor's by the first only."""
    total = len(embedders) * sum(len(sets[key]) for key in SIDES) + len(sets.get("floor", ()))
    done = 0
    found: dict[str, dict[str, Embedded]] = {}
    for name, model in embedders.items():
        rows_of = {key: rows for key, rows in sets.items() if key != "floor" or not found}
        cut = [chunk for rows in rows_of.values() for chunk in chunks([text for text, _ in rows])]
        vectors = []
        on_progress(Progress("embedding", done, total))
        for of_chunk, chunk in zip(map_chunks(model.embed, cut), cut, strict=True):
            vectors.append(np.asarray(of_chunk, dtype=np.float32))
            done += len(chunk)
            on_progress(Progress("embedding", done, total))
        stacked, ends = np.vstack(vectors), np.cumsum([0, *map(len, rows_of.values())])
        found[name] = {
            key: Embedded(stacked[start:end], _labels(rows))
            for (key, rows), (start, end) in zip(rows_of.items(), pairwise(ends), strict=True)
        }
    return found


def _with_progress(map_chunks: ChunkMap, stage: str, on_progress: OnProgress) -> ChunkMap:
    def mapped(function: Callable[[Any], np.ndarray], cut: Sequence[Any]) -> Iterator[np.ndarray]:
        for done, found in enumerate(map_chunks(function, cut)):
            on_progress(Progress(stage, done, len(cut)))
            yield found

    return mapped


def _labels(records: Sequence[Labelled]) -> np.ndarray | None:
    labels = [label for _, label in records]
    return None if None in labels else np.array(labels)

"""`evaluate`: measures of a synthetic data set against real records.

Nothing here is differentially private: every number is computed from private records, and no
budget pays for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpray.engines.base import Embedder, Engine
from dpray.evaluation.causal_lm import CausalLM
from dpray.evaluation.copies import compare_copies
from dpray.evaluation.diversity import compare_diversity
from dpray.evaluation.downstream import (
    Embedded,
    compare_classifier,
    compare_downstream,
    label_counts,
)
from dpray.evaluation.fidelity import DRAW, FEW, compare_fidelity
from dpray.evaluation.fine_tuning import Encoder, compare_next_word
from dpray.evaluation.in_context import (
    InContextClassifier,
    InContextExtractor,
    Learner,
    compare_in_context,
)
from dpray.evaluation.lengths import compare_lengths
from dpray.evaluation.map import embedding_map
from dpray.evaluation.slices import Spread, slices
from dpray.evaluation.structure import structure
from dpray.evaluation.topics import Cluster, compare_topics, k_means
from dpray.types import InputError

NOT_FOR_RELEASE = "computed from private data; not for release"

Labelled = tuple[str, str | None]
"""A text and its label, None where the data has none."""

OnProgress = Callable[[str, int, int], None]
"""Told the name of the part that is at work, how much of it is done, and of how much."""


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
    spread: Spread = map,
    on_progress: OnProgress = lambda part, done, total: None,
) -> dict[str, Any]:
    """What `evaluation.json` holds: `downstream` (None without labels), `in_context` and
    `next_word` (None without `lm`), `fidelity`, `copies`, `topics`, `map`, `diversity`, `lengths`
    and `structure`, and `warnings` on how to read them.

    `real` are the test records, `train` other real records, best the private ones that the
    synthetic were made of: they train the ceiling and are what near-duplicates are looked for in.
    Without `train`, `real` is split in two halves (`split`). `floor` are labelled texts that owe
    nothing to the private data. Of several embedders, given by name, the fidelity is the average;
    the first one serves the rest. `networks` and a fine-tuned `encoder` are added to `downstream`.
    With an `extractor` the labels are phrases to be found in their texts: in-context learning asks
    this engine for them, and nothing classifies. `cluster` finds the topics. `spread` shares out
    what grows with the data: the embedding, and the search for near-duplicates.

    Raises `InputError` where a part is empty, too small (`FEW`), has one label only, or shares no
    label with the real records, and where all real texts are one.
    """
    if seeds < 1:
        raise InputError("seeds: has to be 1 or more")
    sets = {"real": real, "synthetic": synthetic, "train": train, "floor": floor}
    given = {name: records for name, records in sets.items() if records is not None}
    parts = _parts(given, classes=extractor is None)
    made_texts, trained_texts, tested_texts = texts = [_texts(r) for r in parts.values()]
    # First, as a bad schema should not wait for the rest.
    shares = {"real": structure(_texts(real), schema), "synthetic": structure(made_texts, schema)}
    vectors, of_floor = _embed_all(parts, floor, embedder, spread, on_progress)
    made, trained, tested = next(iter(vectors.values()))
    downstream = None
    if made.labels is not None and extractor is None:
        on_progress("classifiers", 0, 1)
        downstream = compare_downstream(made, trained, tested, of_floor, seeds, networks)
    if downstream is not None and encoder is not None:
        on_progress("encoder", 0, 1)
        downstream["networks"].append(_fine_tuned(encoder, parts, floor, seeds))
    in_context, next_word = _language(parts, floor, lm, extractor, seeds, on_progress)
    fidelity = compare_fidelity(
        {name: [side.vectors for side in sides] for name, sides in vectors.items()},
        seeds,
        lambda done: on_progress("fidelity", done, seeds),
    )
    arrays = (made.vectors, trained.vectors, tested.vectors)
    searched = _shown(spread, "near-duplicates", on_progress)
    copies = compare_copies(made_texts, trained_texts, tested_texts, arrays, searched)
    on_progress("topics, words", 0, 1)
    return {
        "private": NOT_FOR_RELEASE,
        "warnings": _warnings(made_texts, fidelity["records_a_side"], train is None),
        "records": {
            name: label_counts([str(label or "") for _, label in r]) for name, r in given.items()
        },
        "test_records": len(tested_texts),
        "downstream": downstream,
        "in_context": in_context,
        "next_word": next_word,
        "fidelity": fidelity,
        "copies": copies,
        "topics": compare_topics(texts, arrays, cluster),
        "map": embedding_map(made.vectors, tested.vectors),
        "diversity": compare_diversity(made_texts, tested_texts, trained_texts, seeds),
        "lengths": compare_lengths(made_texts, trained_texts, tested_texts, seeds),
        "structure": shares,
    }


def split(real: Sequence[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
    """Two halves (train, test) of the real records, by a hash of each text: the same whatever the
    order of the rows, and two copies of one text are never on both sides."""
    halves: tuple[list[Labelled], list[Labelled]] = ([], [])
    for record in real:
        digest = hashlib.sha256(record[0].encode("utf-8", "surrogatepass")).digest()
        halves[digest[0] & 1].append(record)
    return halves


def _parts(given: dict[str, Sequence[Labelled]], classes: bool) -> dict[str, Sequence[Labelled]]:
    """The synthetic, other real and real test records, checked."""
    _check(given, classes)
    real, synthetic = given["real"], given["synthetic"]
    if len({text for text, _ in real}) == 1:
        raise InputError("real records: all have one text")
    if "train" in given:
        parts = {"synthetic": synthetic, "train": given["train"], "real": real}
    else:
        train, test = split(real)
        halves = {"first half of the real": train, "second half of the real": test}
        _check(halves, classes)
        parts = {"synthetic": synthetic, **halves}
    for name, records in parts.items():
        if len(records) < FEW:
            raise InputError(f"{name} records: too few, it takes {FEW}")
    return parts


def _check(sets: Mapping[str, Sequence[Labelled]], classes: bool) -> None:
    known: set[str | None] | None = None
    unlabelled: list[str] = []
    for name, records in sets.items():
        labels = {label for _, label in records}
        if not records:
            raise InputError(f"{name} records: there are none")
        if labels == {None}:
            unlabelled.append(name)
            continue
        if None in labels:
            raise InputError(f"{name} records: some have a label and some have none")
        known = known or labels
        if not classes:
            continue
        if len(labels) == 1:
            raise InputError(f"{name} records: all have one label, a classifier needs two")
        if not labels & known:
            raise InputError(f"{name} records: no label in common with the real records")
    if unlabelled and known is not None:
        raise InputError(f"{unlabelled[0]} records: they have no label, and others have one")


def _language(
    parts: Mapping[str, Sequence[Labelled]],
    floor: Sequence[Labelled] | None,
    lm: CausalLM | None,
    extractor: Engine | None,
    seeds: int,
    on_progress: OnProgress,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """In-context learning and next-word accuracy, each None where it has no model; the first also
    where there are no labels."""
    synthetic, train, asked = parts.values()
    sets: dict[str, Any] = {"synthetic": synthetic, "ceiling": train}
    if floor is not None:
        sets["floor"] = floor
    test = [(text, label) for text, label in asked if label is not None]
    learner: Learner | None = None
    if test and extractor is not None:
        learner = InContextExtractor(extractor)
    elif test and lm is not None:
        learner = InContextClassifier(lm, sorted({label for _, label in test}))
    in_context = next_word = None
    if learner is not None:
        in_context = compare_in_context(
            learner, sets, test, seeds, lambda *step: on_progress("in-context learning", *step)
        )
    if lm is not None:
        next_word = compare_next_word(
            lm,
            {name: _texts(records) for name, records in sets.items()},
            _texts(asked),
            seeds,
            lambda *step: on_progress("next-word accuracy", *step),
        )
    return in_context, next_word


def _fine_tuned(
    encoder: Encoder,
    parts: Mapping[str, Sequence[Labelled]],
    floor: Sequence[Labelled] | None,
    seeds: int,
) -> dict[str, Any]:
    def texts(records: Sequence[Labelled]) -> Embedded:
        return Embedded(
            np.array(_texts(records), dtype=object), np.array([label for _, label in records])
        )

    made, trained, tested = map(texts, parts.values())
    of_floor = None if floor is None else texts(floor)
    return compare_classifier(
        f"fine-tuned {encoder.name}", encoder.fit, made, trained, tested, of_floor, seeds
    )


def _warnings(synthetic: Sequence[str], records_a_side: int, halves: bool) -> list[str]:
    """How the numbers can mislead, in words for people."""
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
    parts: Mapping[str, Sequence[Labelled]],
    floor: Sequence[Labelled] | None,
    embedder: Embedder | Mapping[str, Embedder],
    spread: Spread,
    on_progress: OnProgress,
) -> tuple[dict[str, list[Embedded]], Embedded | None]:
    """The parts' embeddings by each embedder, and the floor's by the first."""
    embedders = embedder if isinstance(embedder, Mapping) else {"embedder": embedder}
    total = len(embedders) * sum(map(len, parts.values())) + len(floor or ())
    done = 0

    def embed(sets: Sequence[Sequence[Labelled]], model: Embedder) -> list[Embedded]:
        nonlocal done
        cut = [block for records in sets for block in slices(_texts(records))]
        vectors = []
        on_progress("embedding", done, total)
        for found, block in zip(spread(model.embed, cut), cut, strict=True):
            vectors.append(np.asarray(found, dtype=np.float32))
            done += len(block)
            on_progress("embedding", done, total)
        ends = np.cumsum([len(records) for records in sets])[:-1]
        return [
            Embedded(of_set, _labels(records))
            for of_set, records in zip(np.split(np.vstack(vectors), ends), sets, strict=True)
        ]

    vectors = {name: embed([*parts.values()], model) for name, model in embedders.items()}
    return vectors, embed([floor], next(iter(embedders.values())))[0] if floor else None


def _shown(spread: Spread, part: str, on_progress: OnProgress) -> Spread:
    def shown(function: Callable[[Any], np.ndarray], cut: Sequence[Any]) -> Iterator[np.ndarray]:
        for done, found in enumerate(spread(function, cut)):
            on_progress(part, done, len(cut))
            yield found

    return shown


def _labels(records: Sequence[Labelled]) -> np.ndarray | None:
    labels = [label for _, label in records]
    return None if None in labels else np.array(labels)


def _texts(records: Sequence[Labelled]) -> list[str]:
    return [text for text, _ in records]

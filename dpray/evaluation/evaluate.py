"""`evaluate` measures a synthetic data set against real records; `Judge` scores several data sets.

Nothing here is differentially private: every number is computed from private records, and no budget
is charged.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

import numpy as np

from dpray.engines.base import Embedder
from dpray.evaluation import NOT_FOR_RELEASE
from dpray.evaluation.columns import compare_columns, other_types
from dpray.evaluation.copies import compare_copies, compare_replays, replays_in_words
from dpray.evaluation.downstream import Embedded, compare_downstream
from dpray.evaluation.fidelity import DRAW, FEWEST_RECORDS, compare_fidelity
from dpray.evaluation.texts import Parse, compare_lengths, compare_topics, parsed_record, structure
from dpray.io.columns import MOST_LETTERS, MOST_NAMES, cut_advice, label_name
from dpray.io.near_labels import nearest, spelled
from dpray.mechanisms.topics import SplitWords
from dpray.types import InputError, Json, OnProgress, Progress, ReadOnlyJson, no_progress

Labelled = tuple[str, str | None]
"""A text and its label, None if the data has none."""

SIDES = ("synthetic", "ceiling", "test")

Sets = Mapping[str, Sequence[Labelled]]
"""`synthetic`, `test` (real records), `ceiling` (other real records) and, if given, `floor`."""

JUDGE_SEEDS = 5

TEXTS_AT_ONCE = 1024
"""Texts embedded between two reports of progress."""


def evaluate(
    real: Sequence[Labelled],
    synthetic: Sequence[Labelled],
    embedder: Embedder,
    *,
    train: Sequence[Labelled] | None = None,
    floor: Sequence[Labelled] | None = None,
    schema: Json | None = None,
    seeds: int = 5,
    units: Sequence[Hashable] | None = None,
    words: SplitWords | None = None,
    on_progress: OnProgress = no_progress,
) -> Json:
    """Return the content of `evaluation.json`. Without labels, `downstream` is null.

    `real` are the test records. `train` are other real records, best the private ones behind the
    synthetic records: they train the ceiling, and near-duplicates of them are looked for. Without
    `train`, `real` is split into halves (`split`). `floor` are labelled texts made without the
    private data. `units` are the persons of the `train` records, or without them of the `real`
    ones, in their order; without `units` each record is one. `words` splits a text into words for
    the terms of topics.

    Raises InputError for a set that is empty, too small (`FEWEST_RECORDS`), or shares no label with
    the real records, and if all real texts are the same.
    """
    given = {"real": real, "synthetic": synthetic, "train": train, "floor": floor}
    records, no_classifier = with_useful_labels(
        {name: rows for name, rows in given.items() if rows is not None}
    )
    sets = checked_sets(records)
    made, tested = ([text for text, _ in rows] for rows in (synthetic, real))
    parse = cache(parsed_record)
    if units is not None and train is None:
        halved = zip(real, units, strict=True)
        units = [unit for (text, _), unit in halved if not is_for_test(text)]
    # A bad schema is refused before the long work.
    shares = {
        "real": structure(tested, schema, parse),
        "synthetic": structure(made, schema, parse),
    }
    embedded = _embed(sets, embedder, on_progress)
    compared = _compare(sets, embedded, seeds, parse, words, on_progress)
    return {
        "private": NOT_FOR_RELEASE,
        "warnings": _warnings(
            made,
            other_types(made, tested, parse),
            compared["fidelity"]["records_a_side"],
            train is None,
        )
        + _label_warnings(records)
        + no_classifier,
        "records": {name: _by_label(rows) for name, rows in records.items()},
        "test_records": len(sets["test"]),
        **compared,
        "replays": compare_replays(
            made, [text for text, _ in sets["ceiling"]], [text for text, _ in sets["test"]], units
        ),
        "structure": shares,
    }


def _compare(
    sets: Sets,
    embedded: Mapping[str, Embedded],
    seeds: int,
    parse: Parse,
    words: SplitWords | None,
    on_progress: OnProgress,
) -> Json:
    """Return the parts of the result that compare the `SIDES`."""
    made, other, tested = texts = [[text for text, _ in sets[key]] for key in SIDES]
    made_ND, other_MD, tested_KD = vectors = [embedded[key].vectors for key in SIDES]
    downstream = None
    if embedded["test"].labels is not None:
        on_progress(Progress("classifiers"))
        trained_on = {name: data for name, data in embedded.items() if name != "test"}
        downstream = compare_downstream(trained_on, embedded["test"], seeds)
    fidelity = compare_fidelity(made_ND, other_MD, tested_KD, seeds, on_progress)
    on_progress(Progress("near-duplicates"))
    copies = compare_copies(made, other, tested, vectors)
    on_progress(Progress("topics, lengths, columns"))
    return {
        "downstream": downstream,
        "fidelity": fidelity,
        "copies": copies,
        "topics": compare_topics(texts, vectors, words),
        "lengths": compare_lengths(made, other, tested, seeds),
        "columns": compare_columns(made, other, tested, seeds, parse),
    }


def verdict(
    result: ReadOnlyJson,
    cut_share: float | None,
    method: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """Return the sentence with which an evaluation ends: how near the texts come to real ones, what
    was copied, and the key of the run's method to turn if many texts are cut."""
    found: list[str] = []
    if (scores := result["downstream"]) is not None:
        made, real, floor = (
            scores[side]["accuracy"]["mean"] for side in ("synthetic", "ceiling", "floor")
        )
        side = "nearer to real texts" if real - made < made - floor else "nearer to the floor"
        found.append(
            f"for training a classifier, these texts are "
            f"{side if made > floor else 'no better than the floor'}: accuracy {made:.2f}, "
            f"floor {floor:.2f}, real texts {real:.2f}"
        )
    distance = result["fidelity"]["measures"]["frechet_distance"]
    made, real = (distance[side]["mean"] for side in ("synthetic_to_real", "real_to_real"))
    found.append(f"their Fréchet distance is {made:.2f}, that of real texts {real:.2f}")
    if (replayed := replays_in_words(result["replays"])) != "":
        found.append(replayed)
    if (cut := cut_advice(cut_share, method)) is not None:
        found.append(cut)
    sentence = "; ".join(found)
    return f"{sentence[0].upper()}{sentence[1:]}."


class Judge:
    """Scores releases against real records: `test`, which had no part in the releases, and `train`.
    All records have a `text` and, if `labelled`, a `label`.

    `score` names the measure that decides: `accuracy` with labels, else `frechet_distance`.
    """

    def __init__(
        self,
        embedder: Embedder,
        train: Sequence[Mapping[str, object]],
        test: Sequence[Mapping[str, object]],
        labelled: bool,
    ) -> None:
        self._embedder, self._labelled = embedder, labelled
        self._train, self._test = (self._embedded(rows) for rows in (train, test))
        self.score = "accuracy" if labelled else "frechet_distance"

    def scores(self, records: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Return the number of records, and each measure's mean and deviation over draws."""
        made = self._embedded(records)
        found: Json = {"records": len(records)}
        if self._labelled:
            sets = {"synthetic": made, "ceiling": self._train}
            scores = compare_downstream(sets, self._test, JUDGE_SEEDS)["synthetic"]
            found["accuracy"] = scores["accuracy"]
        sides = (made.vectors, self._train.vectors, self._test.vectors)
        measures = compare_fidelity(*sides, JUDGE_SEEDS)["measures"]
        for name in ("frechet_distance", "mauve"):
            found[name] = measures[name]["synthetic_to_real"]
        return found

    def _embedded(self, rows: Sequence[Mapping[str, object]]) -> Embedded:
        vectors = self._embedder.embed([str(row["text"]) for row in rows])
        labels = [label_name(row["label"]) if self._labelled else "" for row in rows]
        return Embedded(vectors, np.array(labels))


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


def with_useful_labels(records: Sets) -> tuple[Sets, list[str]]:
    """Return the records; without their labels, and with a warning that says why, if a classifier
    cannot be trained and tested, because a set has no label or only one."""
    found = {name: {label for _, label in rows} for name, rows in records.items()}
    if not set().union(*found.values()) - {None}:
        return records, []
    for name, labels in found.items():
        if len(labels) == 1:
            what = "have no label" if None in labels else "all have one label"
            bare = {key: [(text, None) for text, _ in rows] for key, rows in records.items()}
            return bare, [f"no classifier was trained: the {name} records {what}"]
    return records, []


def checked_sets(records: Sets) -> Sets:
    """Check the records, as `evaluate` says, and return the `Sets`."""
    _check_sets(records)
    real = records["real"]
    if len({text for text, _ in real}) == 1:
        raise InputError("real records: all have one text")
    if "train" in records:
        named = {name: records[name] for name in ("synthetic", "train", "real")}
    else:
        train, test = split(real)
        halves = {"first half of the real": train, "second half of the real": test}
        _check_sets(halves)
        named = {"synthetic": records["synthetic"], **halves}
    for name, rows in named.items():
        if len(rows) < FEWEST_RECORDS:
            raise InputError(f"{name} records: {len(rows)} are too few, it takes {FEWEST_RECORDS}")
    sets = dict(zip(SIDES, named.values(), strict=True))
    return sets | ({"floor": records["floor"]} if "floor" in records else {})


def _check_sets(sets: Sets) -> None:
    known = {label for _, label in next(iter(sets.values()))}
    for name, records in sets.items():
        labels = {label for _, label in records}
        if not records:
            raise InputError(f"{name} records: there are none")
        if (None in labels) != (None in known):
            raise InputError(f"{name} records: they have a label or none, unlike the real records")
        if None not in labels and len(labels) == 1:
            raise InputError(f"{name} records: all have one label, a classifier needs two")
        if not labels & known:
            names = [str(label) for label in known]
            found = (nearest(str(label), names) for label in labels)
            why = next((f"; they differ in {each[1]}" for each in found if each), "")
            raise InputError(f"{name} records: no label in common with the real records{why}")


def _embed(sets: Sets, embedder: Embedder, on_progress: OnProgress) -> dict[str, Embedded]:
    total, done = sum(map(len, sets.values())), 0
    embedded = {}
    for name, rows in sets.items():
        vectors = []
        for start in range(0, len(rows), TEXTS_AT_ONCE):
            on_progress(Progress("embedding", done + start, total))
            texts = [text for text, _ in rows[start : start + TEXTS_AT_ONCE]]
            vectors.append(np.asarray(embedder.embed(texts), dtype=np.float32))
        done += len(rows)
        labels = [label for _, label in rows]
        embedded[name] = Embedded(np.vstack(vectors), None if None in labels else np.array(labels))
    return embedded


def _by_label(records: Sequence[Labelled]) -> dict[str, int]:
    return dict(sorted(Counter(label or "" for _, label in records).items()))


def _warnings(
    synthetic: Sequence[str], of_other_types: Sequence[str], records_a_side: int, halves: bool
) -> list[str]:
    """Return warnings about numbers that may mislead."""
    found = [
        f"column '{name}' has texts on one side and none on the other: with a schema, the cells of "
        "CSV have its types"
        for name in of_other_types
    ]
    if records_a_side < DRAW:
        found.append(
            f"MAUVE and the Fréchet distance shift with the number of records: at "
            f"{records_a_side} a side (under {DRAW}) compare them only with real to real"
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


def _label_warnings(records: Sets) -> list[str]:
    """Return warnings about labels that only one side has: a classifier gets none of them right."""
    counts = {name: Counter(str(label) for _, label in rows) for name, rows in records.items()}
    found = []
    for side in ("synthetic", "train", "floor"):
        real, made = counts["real"], counts.get(side, counts["real"])
        lacking, more = sorted({*real} - {*made}), sorted({*made} - {*real})
        for label in [*lacking]:
            near = nearest(label, more)
            if near is not None and all(map(_may_be_shown, (label, near[0]))):
                lacking.remove(label)
                more.remove(near[0])
                found.append(
                    f"{spelled(label)} of the real records is {spelled(near[0])} in the {side} "
                    f"ones, and counts as another label: they differ in {near[1]}"
                )
        for labels, where, rows in ((lacking, "real", real), (more, side, made)):
            if labels:
                other = side if where == "real" else "real"
                total = sum(rows[label] for label in labels)
                found.append(
                    f"{len(labels)} labels of {total:,} {where} records are in no {other} record"
                    f"{_label_words(labels)}"
                )
    return found


def _label_words(labels: Sequence[str]) -> str:
    """Return labels in words, but those that may be texts."""
    shown = [spelled(label) for label in labels if _may_be_shown(label)][:MOST_NAMES]
    more = ", ..." if len(shown) < len(labels) else ""
    return f": {', '.join(shown)}{more}" if shown else ""


def _may_be_shown(label: str) -> bool:
    return len(label) <= MOST_LETTERS

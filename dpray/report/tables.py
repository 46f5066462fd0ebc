"""The report's private page and the terminal show the same tables of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpray.report.figures import number, plus_minus

FIDELITY = {
    "frechet_distance": "Fréchet distance (0)",
    "precision": "precision (1)",
    "recall": "recall (1)",
    "f1": "F1 of the two (1)",
    "mauve": "MAUVE (1)",
    "kl": "KL on clusters (0)",
    "total_variation": "total variation on clusters (0)",
}
SYNTHETIC = "these synthetic records"
TRAINED_ON = {"ceiling": "real records (ceiling)", "synthetic": SYNTHETIC, "floor": "file (floor)"}
SIDES = {"real": "real", "other_real": "other real", "synthetic": "synthetic"}

Result = Mapping[str, Any]


@dataclass(frozen=True)
class DataTable:
    """A `DataTable` has a name in the first cell of each row, and figures in the others."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def evaluation_tables(result: Result) -> dict[str, list[DataTable]]:
    """Return the tables of each part of `evaluation.json` that the file has. Those of `classes` and
    `topics` show labels and words of private texts."""
    parts: dict[str, Callable[[Any], DataTable | None]] = {
        "classes": _classes,
        "in_context": _in_context,
        "next_word": _next_word,
        "fidelity": _fidelity,
        "copies": _copies,
        "topics": _topics,
        "diversity": _diversity,
        "lengths": _lengths,
        "structure": _structure,
    }
    found: dict[str, list[DataTable]] = {}
    given = dict(result)
    if first := given.get("downstream"):
        tested = number(result["test_records"])
        classifiers = (first, *first.get("networks", ()))
        found["downstream"] = [_classifier(each, tested) for each in classifiers]
        given["classes"] = first.get("classes") and first
    tables = {name: make(given[name]) for name, make in parts.items() if given.get(name)}
    return found | {name: [table] for name, table in tables.items() if table is not None}


def _classifier(found: Result, tested: str) -> DataTable:
    name, sides = found["classifier"], {key: found[key] for key in TRAINED_ON}
    names = TRAINED_ON | {"floor": f"{sides['floor']['kind']} (floor)"}
    return DataTable(
        f"{name[:1].upper()}{name[1:]}, tested on {tested} real records. Mean ± standard deviation "
        f"over {found['seeds']} resamplings.",
        ("Trained on", "Records", "Accuracy", "Macro F1"),
        [
            (names[key], number(side["train_records"]),
             *_means((side["accuracy"], side["macro_f1"])))
            for key, side in sides.items()
        ],
    )  # fmt: skip


def _classes(downstream: Result) -> DataTable:
    classes = downstream["classes"]
    sides = (classes[side]["accuracy"] for side in ("synthetic", "ceiling"))
    return DataTable(
        "Accuracy on each label's real records, by what the "
        f"{downstream['classifier']} was trained on.",
        ("Label", "Test records", "Synthetic", "Real (ceiling)"),
        [
            (str(label), number(records), *_means(accuracies))
            for label, records, *accuracies in zip(
                classes["labels"], classes["records"], *sides, strict=True
            )
        ],
    )


def _in_context(found: Result) -> DataTable:
    measure = "accuracy" if "accuracy" in found["rows"][0]["synthetic"] else "exact_match"
    names = {"synthetic": "Synthetic", "ceiling": "Real (ceiling)", "floor": "File (floor)"}
    sides = [side for side in names if side in found["rows"][0]]
    return DataTable(
        f"In-context {found['task']}: {measure.replace('_', ' ')} on "
        f"{number(found['test_records'])} real records, by where the demonstrations came from. "
        f"Mean ± standard deviation over {found['seeds']} draws; in brackets, how many the context "
        "had room for.",
        ("Demonstrations", *(names[side] for side in sides)),
        [
            (str(row["shots"]),
             *(f"{plus_minus(row[s][measure], 3)} ({row[s]['fitted']:.0f})" for s in sides))
            for row in found["rows"]
        ],
    )  # fmt: skip


def _next_word(found: Result) -> DataTable:
    return DataTable(
        f"Next-word accuracy of a small language model on {number(found['test_records'])} real "
        "records, by what it was fine-tuned on. Mean ± standard deviation over "
        f"{found['seeds']} resamplings.",
        ("Trained on", "Records", "Accuracy"),
        [
            ("nothing: the model as it came", "0", f"{found['base']:.3f}"),
            *(
                (name, number(side["train_records"]), *_means([side["accuracy"]]))
                for key, name in TRAINED_ON.items()
                if (side := found.get(key))
            ),
        ],
    )


def _fidelity(found: Result) -> DataTable:
    models = len(found["embedders"])
    pair = ("synthetic", "real")
    average = f", average of {models} embedding models" if models > 1 else ""
    return DataTable(
        f"Embeddings beside those of real test records: {number(found['records_a_side'])} a side, "
        f"{number(found['records_a_draw'])} a side for all but the Fréchet distance. Mean ± "
        f"standard deviation over {found['draws']} draws{average}.",
        ("Measure (best)", "Synthetic", "Other real records"),
        [
            (name, *_means(found["measures"][key][f"{side}_to_real"] for side in pair))
            for key, name in FIDELITY.items()
        ],
    )


def _copies(found: Result) -> DataTable:
    sides = (found["synthetic"], found["held_out"])
    rows = {
        "longest_shared_words": ("longest shared run of words", 0),
        "ngram_overlap": (f"share of {found['ngram']}-grams", 3),
        "nearest_cosine": ("cosine with the nearest", 3),
    }
    figures = [
        (name, *(_figure(side[key][at], digits) for side in sides for at in ("quantile_95", "max")))
        for key, (name, digits) in rows.items()
    ]
    exact = [cell for side in sides for cell in (f"{side['exact_share']:.2%}", "")]
    return DataTable(
        f"Near-duplicates among {number(found['private_records'])} private records, of "
        f"{number(found['records_a_side'])} synthetic and as many held-out real records. Real "
        "texts resemble one another too: look where the synthetic ones do so more.",
        ("", "Synthetic, 95 %", "most", "Held-out, 95 %", "most"),
        [("exact copies", *exact), *figures],
    )


def _topics(topics: Sequence[Result]) -> DataTable:
    return DataTable(
        "Topics: clusters of embeddings, with the terms that mark them and their share of the "
        "records.",
        ("Terms", *(name.capitalize() for name in SIDES.values())),
        [
            (", ".join(topic["terms"]) or "none", *(f"{topic[side]:.1%}" for side in SIDES))
            for topic in topics
        ],
    )


def _diversity(found: Result) -> DataTable:
    return DataTable(
        "Diversity: different texts of each set; different n-grams out of all, in "
        f"{number(found['records_a_side'])} records of each.",
        ("", "Different texts", "distinct-1", "distinct-2", "distinct-3"),
        [
            (name, f"{found[key]['distinct_texts']:.1%}",
             *_means(found[key][f"distinct_{n}"] for n in (1, 2, 3)))
            for key, name in SIDES.items()
        ],
    )  # fmt: skip


def _lengths(found: Result) -> DataTable:
    return DataTable(
        f"Lengths in {found['unit']}. Distance: 1-Wasserstein to the real test records; for real "
        "records, to other real ones.",
        ("", "Mean", *(f"{float(q):.0%}" for q in found["real"]["quantiles"]), "Distance"),
        [
            (side, f"{found[side]['mean']:.1f}",
             *(f"{words:.0f}" for words in found[side]["quantiles"].values()),
             plus_minus(found["wasserstein"][f"{side}_to_real"], 2))
            for side in ("real", "synthetic")
        ],
    )  # fmt: skip


def _structure(found: Result) -> DataTable | None:
    sides = {name: found[name] for name in ("real", "synthetic")}
    if not any(s["json_parse_share"] or s["schema_share"] is not None for s in sides.values()):
        return None
    rows = []
    for name, side in sides.items():
        fits = side["schema_share"]
        fitting = "no schema given" if fits is None else f"{fits:.1%}"
        rows.append((name, f"{side['json_parse_share']:.1%}", fitting))
    return DataTable("Structure", ("", "Is JSON", "Fits the schema"), rows)


def _means(values: Iterable[Mapping[str, float]]) -> list[str]:
    return [plus_minus(value, 3) for value in values]


def _figure(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"

"""The terminal shows an evaluation as tables, which hold no word of any record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dpray.commands.terminal import Terminal, titled_table
from dpray.report.figures import plus_minus

MEASURES = {
    "frechet_distance": "Fréchet distance (0 is best)",
    "precision": "precision (1)",
    "recall": "recall (1)",
    "f1": "F1 of the two (1)",
    "mauve": "MAUVE (1)",
    "kl": "KL on clusters (0)",
    "total_variation": "total variation on clusters (0)",
}
TRAINED_ON = {"synthetic": "synthetic records", "ceiling": "real records (ceiling)"}


def show_evaluation(result: dict[str, Any], path: Path) -> None:
    """Print the tables of `evaluation.json`, which is at `path`."""
    console = Terminal()
    console.note("NOT PRIVATE", "bold", f"{result['private']}.")
    for table in _tables(result):
        console.print(table)
    for warning in result["warnings"]:
        console.print(f"Note: {warning}.", highlight=False, soft_wrap=True)
    # The topics' terms are words of private texts: they stay in the file and the report.
    console.print(
        f"Written to {path}, with {len(result['topics'])} topics and their shares",
        soft_wrap=True,
    )


def _tables(result: dict[str, Any]) -> Iterator[Table]:
    if result["downstream"] is not None:
        yield _downstream_table(result["downstream"], result["test_records"])
    if result["in_context"] is not None:
        yield _in_context_table(result["in_context"])
    if result["next_word"] is not None:
        yield _next_word_table(result["next_word"])
    yield _fidelity_table(result["fidelity"])
    yield _copies_table(result["copies"])
    yield _diversity_table(result["diversity"])
    yield _lengths_table(result["lengths"])
    real, synthetic = result["structure"]["real"], result["structure"]["synthetic"]
    if real["json_parse_share"] > 0 or real["schema_share"] is not None:
        rows = [("real", *_shares(real)), ("synthetic", *_shares(synthetic))]
        yield _table("Structure", ("", "is JSON", "fits the schema"), rows)


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = titled_table(title, *columns)
    for row in rows:
        table.add_row(*row)
    return table


def _downstream_table(downstream: dict[str, Any], test_records: int) -> Table:
    table = titled_table(
        f"Classifiers tested on {test_records} real records",
        *("trained on", "records", "accuracy", "macro F1"),
    )
    names = TRAINED_ON | {"floor": f"{downstream['floor']['kind']} (floor)"}
    for classifier in (downstream, *downstream["networks"]):
        if downstream["networks"]:
            table.add_section()
            table.add_row(Text(classifier["classifier"], "bold"))
        for key, name in names.items():
            row = classifier[key]
            scores = (plus_minus(row[measure], 3) for measure in ("accuracy", "macro_f1"))
            table.add_row(name, str(row["train_records"]), *scores)
    return table


def _in_context_table(found: dict[str, Any]) -> Table:
    measure = next(key for key in found["rows"][0]["synthetic"] if key != "fitted")
    names = {"synthetic": "synthetic", "ceiling": "real (ceiling)", "floor": "file (floor)"}
    sides = [key for key in names if key in found["rows"][0]]
    return _table(
        f"In-context {found['task']}: {measure.replace('_', ' ')} on {found['test_records']} real "
        "records (demonstrations that fitted)",
        ("demonstrations", *(names[side] for side in sides)),
        (
            (
                str(row["shots"]),
                *(f"{plus_minus(row[s][measure], 3)} ({row[s]['fitted']:.0f})" for s in sides),
            )
            for row in found["rows"]
        ),
    )


def _next_word_table(found: dict[str, Any]) -> Table:
    table = titled_table(
        f"Next-word accuracy on {found['test_records']} real records", "trained on", "records", ""
    )
    table.add_row("none (the model as it came)", "0", f"{found['base']:.3f}")
    for key, name in (TRAINED_ON | {"floor": "file (floor)"}).items():
        if row := found.get(key):
            table.add_row(name, str(row["train_records"]), plus_minus(row["accuracy"], 3))
    return table


def _fidelity_table(fidelity: dict[str, Any]) -> Table:
    sizes = f"{fidelity['records_a_side']} records a side"
    models = len(fidelity["embedders"])
    if models > 1:
        sizes += f", average of {models} embedding models"
    return _table(
        f"Embeddings, {sizes}",
        ("to real test records", "synthetic", "other real"),
        (
            (
                MEASURES[measure],
                plus_minus(values["synthetic_to_real"], 3),
                plus_minus(values["real_to_real"], 3),
            )
            for measure, values in fidelity["measures"].items()
        ),
    )


def _copies_table(copies: dict[str, Any]) -> Table:
    table = titled_table(
        f"Near-duplicates among {copies['private_records']} private records, "
        f"of {copies['records_a_side']} records each (95 %, most)",
        *("", "synthetic", "held-out real"),
    )
    sides = (copies["synthetic"], copies["held_out"])
    table.add_row("exact copies", *(f"{side['exact_share']:.2%}" for side in sides))
    for key, name, digits in (
        ("longest_shared_words", "longest shared run of words", 0),
        ("ngram_overlap", f"share of {copies['ngram']}-grams", 3),
        ("nearest_cosine", "cosine with the nearest", 3),
    ):
        table.add_row(name, *(_tail(side[key], digits) for side in sides))
    return table


def _tail(values: dict[str, float | None], digits: int) -> str:
    if values["max"] is None:
        return "-"
    return f"{values['quantile_95']:.{digits}f}, {values['max']:.{digits}f}"


def _diversity_table(diversity: dict[str, Any]) -> Table:
    measures = [key for key in diversity["synthetic"] if key != "distinct_texts"]
    names = {"real": "real", "other_real": "other real", "synthetic": "synthetic"}
    return _table(
        f"Diversity of {diversity['records_a_side']} records",
        ("", "different texts", *(key.replace("_", "-") for key in measures)),
        (
            (
                name,
                f"{diversity[key]['distinct_texts']:.1%}",
                *(plus_minus(diversity[key][measure], 3) for measure in measures),
            )
            for key, name in names.items()
        ),
    )


def _lengths_table(lengths: dict[str, Any]) -> Table:
    quantiles = list(lengths["real"]["quantiles"])
    table = titled_table(
        "Lengths in words",
        *("", "mean", *(f"{float(q):.0%}" for q in quantiles), "distance to real"),
    )
    for key, to_real in (("real", "real_to_real"), ("synthetic", "synthetic_to_real")):
        row, distance = lengths[key], lengths["wasserstein"][to_real]
        cells = [f"{row['quantiles'][q]:.0f}" for q in quantiles]
        table.add_row(key, f"{row['mean']:.1f}", *cells, plus_minus(distance, 2))
    return table


def _shares(structure: dict[str, Any]) -> tuple[str, str]:
    fits = structure["schema_share"]
    return f"{structure['json_parse_share']:.1%}", "-" if fits is None else f"{fits:.1%}"

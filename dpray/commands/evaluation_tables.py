"""What `dpray evaluate` shows on the terminal: tables, and no word of any record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dpray.commands.terminal import Terminal, titled_table
from dpray.evaluation.evaluate import NOT_FOR_RELEASE

MEASURES = {
    "frechet_distance": "Fréchet distance (0 is best)",
    "precision": "precision (1)",
    "recall": "recall (1)",
    "f1": "F1 of the two (1)",
    "mauve": "MAUVE (1)",
    "kl": "KL on clusters (0)",
    "total_variation": "total variation on clusters (0)",
}


def show_evaluation(result: dict[str, Any], path: Path) -> None:
    """The tables of `evaluation.json`, which is at `path`."""
    console = Terminal()
    console.note("NOT PRIVATE", "bold", f"{NOT_FOR_RELEASE}.")
    if result["downstream"] is not None:
        console.print(_downstream_table(result))
    if result["in_context"] is not None:
        console.print(_in_context_table(result["in_context"]))
    if result["next_word"] is not None:
        console.print(_next_word_table(result["next_word"]))
    console.print(_fidelity_table(result["fidelity"]))
    console.print(_copies_table(result["copies"]))
    console.print(_diversity_table(result["diversity"]))
    console.print(_lengths_table(result["lengths"]))
    real, synthetic = result["structure"]["real"], result["structure"]["synthetic"]
    if real["json_parse_share"] > 0 or real["schema_share"] is not None:
        console.print(_structure_table(real, synthetic))
    for warning in result["warnings"]:
        console.print(f"Note: {warning}.", highlight=False, soft_wrap=True)
    # The topics' terms are words of private texts: they stay in the file and the report.
    console.print(
        f"Written to {path}, with {len(result['topics'])} topics and their shares",
        soft_wrap=True,
    )


def _downstream_table(result: dict[str, Any]) -> Table:
    downstream = result["downstream"]
    table = titled_table(
        f"Classifiers tested on {result['test_records']} real records",
        "trained on",
        "records",
        "accuracy",
        "macro F1",
    )
    names = {
        "synthetic": "synthetic records",
        "ceiling": "real records (ceiling)",
        "floor": f"{downstream['floor']['kind']} (floor)",
    }
    for classifier in (downstream, *downstream["networks"]):
        if downstream["networks"]:
            table.add_section()
            table.add_row(Text(classifier["classifier"], "bold"))
        for key, name in names.items():
            row = classifier[key]
            table.add_row(
                name,
                str(row["train_records"]),
                _spread(row["accuracy"], 3),
                _spread(row["macro_f1"], 3),
            )
    return table


def _in_context_table(found: dict[str, Any]) -> Table:
    measure = next(key for key in found["rows"][0]["synthetic"] if key != "fitted")
    sides = [key for key in ("synthetic", "ceiling", "floor") if key in found["rows"][0]]
    table = titled_table(
        f"In-context {found['task']}: {measure.replace('_', ' ')} on {found['test_records']} real "
        "records (demonstrations that fitted)",
        "demonstrations",
        *({"ceiling": "real (ceiling)", "floor": "file (floor)"}.get(side, side) for side in sides),
    )
    for row in found["rows"]:
        cells = (f"{_spread(row[s][measure], 3)} ({row[s]['fitted']:.0f})" for s in sides)
        table.add_row(str(row["shots"]), *cells)
    return table


def _next_word_table(found: dict[str, Any]) -> Table:
    table = titled_table(
        f"Next-word accuracy on {found['test_records']} real records", "trained on", "records", ""
    )
    table.add_row("none (the model as it came)", "0", f"{found['base']:.3f}")
    names = {"synthetic": "synthetic records", "ceiling": "real records (ceiling)"}
    for key, name in (names | {"floor": "file (floor)"}).items():
        if key in found:
            table.add_row(
                name, str(found[key]["train_records"]), _spread(found[key]["accuracy"], 3)
            )
    return table


def _fidelity_table(fidelity: dict[str, Any]) -> Table:
    sizes = f"{fidelity['records_a_side']} records a side"
    models = len(fidelity["embedders"])
    if models > 1:
        sizes += f", average of {models} embedding models"
    table = titled_table(f"Embeddings, {sizes}", "to real test records", "synthetic", "other real")
    for measure, values in fidelity["measures"].items():
        table.add_row(
            MEASURES[measure],
            _spread(values["synthetic_to_real"], 3),
            _spread(values["real_to_real"], 3),
        )
    return table


def _copies_table(copies: dict[str, Any]) -> Table:
    title = (
        f"Near-duplicates among {copies['private_records']} private records, "
        f"of {copies['records_a_side']} records each (95 %, most)"
    )
    table = titled_table(title, "", "synthetic", "held-out real")
    sides = (copies["synthetic"], copies["held_out"])
    table.add_row("exact copies", *(f"{side['exact_share']:.2%}" for side in sides))
    rows = {
        "longest_shared_words": ("longest shared run of words", 0),
        "ngram_overlap": (f"share of {copies['ngram']}-grams", 3),
        "nearest_cosine": ("cosine with the nearest", 3),
    }
    for key, (name, digits) in rows.items():
        table.add_row(name, *(_tail(side[key], digits) for side in sides))
    return table


def _tail(values: dict[str, float | None], digits: int) -> str:
    if values["max"] is None:
        return "-"
    return f"{values['quantile_95']:.{digits}f}, {values['max']:.{digits}f}"


def _diversity_table(diversity: dict[str, Any]) -> Table:
    measures = [key for key in diversity["synthetic"] if key != "distinct_texts"]
    table = titled_table(
        f"Diversity of {diversity['records_a_side']} records",
        "",
        "different texts",
        *(key.replace("_", "-") for key in measures),
    )
    for key, name in (("real", "real"), ("other_real", "other real"), ("synthetic", "synthetic")):
        row = diversity[key]
        cells = (_spread(row[measure], 3) for measure in measures)
        table.add_row(name, f"{row['distinct_texts']:.1%}", *cells)
    return table


def _lengths_table(lengths: dict[str, Any]) -> Table:
    quantiles = list(lengths["real"]["quantiles"])
    columns = ("", "mean", *(f"{float(q):.0%}" for q in quantiles), "distance to real")
    table = titled_table("Lengths in words", *columns)
    distance = lengths["wasserstein"]
    for key, to_real in (("real", "real_to_real"), ("synthetic", "synthetic_to_real")):
        row = lengths[key]
        cells = [f"{row['quantiles'][q]:.0f}" for q in quantiles]
        table.add_row(key, f"{row['mean']:.1f}", *cells, _spread(distance[to_real], 2))
    return table


def _structure_table(real: dict[str, Any], synthetic: dict[str, Any]) -> Table:
    table = titled_table("Structure", "", "is JSON", "fits the schema")
    for name, shares in (("real", real), ("synthetic", synthetic)):
        fits = shares["schema_share"]
        table.add_row(
            name, f"{shares['json_parse_share']:.1%}", "-" if fits is None else f"{fits:.1%}"
        )
    return table


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['deviation']:.{digits}f}"

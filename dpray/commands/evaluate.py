"""`dpray evaluate`: synthetic records measured against real ones. Not private."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from dpray.engines.base import Embedder
from dpray.evaluation.evaluate import NOT_FOR_RELEASE, Labelled, OnProgress
from dpray.evaluation.evaluate import evaluate as evaluate_records
from dpray.io.records import Where, list_files, read_rows
from dpray.types import InputError

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"

MEASURES = {
    "frechet_distance": "Fréchet distance (0 is best)",
    "precision": "precision (1)",
    "recall": "recall (1)",
    "f1": "F1 of the two (1)",
    "mauve": "MAUVE (1)",
    "kl": "KL on clusters (0)",
    "total_variation": "total variation on clusters (0)",
}


def evaluate(
    real: Annotated[
        str, typer.Option(help="Real records: the test records, where --train is given too.")
    ],
    synthetic: Annotated[str, typer.Option(help="Synthetic records.")],
    out: Annotated[
        Path,
        typer.Option(help="Folder for evaluation.json; RUN/private puts it into the run's report."),
    ],
    train: Annotated[
        str | None,
        typer.Option(help="Real records to train the ceiling on; without it --real is halved."),
    ] = None,
    floor: Annotated[
        str | None,
        typer.Option(help="Labelled texts that owe nothing to private data, to train the floor."),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="JSON Schema that records which are JSON should fit.")
    ] = None,
    text: Annotated[str, typer.Option(help="Name of the column with the text.")] = "text",
    label: Annotated[str, typer.Option(help="Name of the column with the label.")] = "label",
    embedder: Annotated[
        list[str] | None,
        typer.Option(
            help="Sentence embedding model: a name or a folder. Given several times, fidelity is "
            "their average, and the first serves the rest.",
            show_default=DEFAULT_EMBEDDER,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Repetitions behind each mean and deviation.")] = 5,
    networks: Annotated[
        bool,
        typer.Option(
            "--networks", help="Also train 3-layer networks, without and with Deep CORAL (slower)."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print evaluation.json itself, for programs.")
    ] = False,
) -> None:
    """Measure synthetic records against real ones. NOT private: keep the result to yourself."""
    files = {"real": real, "synthetic": synthetic, "train": train, "floor": floor}
    sets = {
        name: _read(path, f"--{name}", text, label)
        for name, path in files.items()
        if path is not None
    }
    schema_object = None if schema is None else _read_schema(schema)

    names = embedder or [DEFAULT_EMBEDDER]
    models = {name: _load_embedder(name) for name in names}
    with _progress() as on_progress:
        result = evaluate_records(
            sets["real"],
            sets["synthetic"],
            models,
            train=sets.get("train"),
            floor=sets.get("floor"),
            schema=schema_object,
            seeds=seeds,
            networks=networks,
            on_progress=on_progress,
        )
    result |= {"embedder": names[0], "files": files}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "evaluation.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False))
    else:
        _show(result, path)


def _load_embedder(name: str) -> Embedder:
    # Imported late: it loads torch, which a mistyped path should not have to wait for.
    from dpray.engines.base import EngineError
    from dpray.engines.embedder import SentenceTransformerEmbedder

    try:
        return SentenceTransformerEmbedder(name)
    except (EngineError, InputError):
        raise InputError(f"embedder: cannot load {name}, as a folder or from a hub") from None


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A line with a bar on stderr, where that is a terminal; it shows names of parts and counts."""
    console = Console(stderr=True)
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(part: str, done: int, total: int) -> None:
            bar.update(task, description=part, completed=done, total=total)

        yield show


def _read(path: str, key: str, text: str, label: str) -> list[Labelled]:
    records: list[Labelled] = []
    for file in list_files(path, key):
        for where, row in read_rows(file):
            record = _text(row, text, where), _label(row, label, where)
            if records and (record[1] is None) != (records[0][1] is None):
                raise InputError(f"{where}: some records have a label, some have none")
            records.append(record)
    if not records:
        raise InputError(f"{path}: no records")
    return records


def _text(row: dict[str, Any], column: str, where: Where) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise InputError(f"{where}: no text in column '{column}'")
    return value


def _label(row: dict[str, Any], column: str, where: Where) -> str | None:
    value = row.get(column)
    if value is not None and not isinstance(value, str | int):
        raise InputError(f"{where}: no label in column '{column}'")
    return None if value is None else str(value)


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"schema: cannot read {path}") from None
    except ValueError:
        raise InputError(f"schema: {path} is not JSON") from None
    if not isinstance(schema, dict):
        raise InputError(f"schema: {path} is not a JSON object")
    return schema


def _show(result: dict[str, Any], path: Path) -> None:
    console = Console()
    console.print(f"[bold]NOT PRIVATE[/bold]: {NOT_FOR_RELEASE}.")
    if result["downstream"] is not None:
        console.print(_downstream_table(result))
    console.print(_fidelity_table(result["fidelity"]))
    console.print(_copies_table(result["copies"]))
    console.print(_diversity_table(result["diversity"]))
    console.print(_lengths_table(result["lengths"]))
    real, synthetic = result["structure"]["real"], result["structure"]["synthetic"]
    if real["json_parse_share"] > 0 or real["schema_share"] is not None:
        console.print(_structure_table(real, synthetic))
    for warning in result["warnings"]:
        console.print(f"Note: {warning}.", markup=False, highlight=False, soft_wrap=True)
    # The topics' terms are words of private texts: they stay in the file and the report.
    console.print(
        f"Written to {path}, with {len(result['topics'])} topics and their shares",
        markup=False,
        soft_wrap=True,
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _downstream_table(result: dict[str, Any]) -> Table:
    downstream = result["downstream"]
    table = _table(
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
            table.add_row(f"[bold]{classifier['classifier']}[/bold]")
        for key, name in names.items():
            row = classifier[key]
            table.add_row(
                name,
                str(row["train_records"]),
                _spread(row["accuracy"], 3),
                _spread(row["macro_f1"], 3),
            )
    return table


def _fidelity_table(fidelity: dict[str, Any]) -> Table:
    sizes = f"{fidelity['records_a_side']} records a side"
    models = len(fidelity["embedders"])
    if models > 1:
        sizes += f", average of {models} embedding models"
    table = _table(f"Embeddings, {sizes}", "to real test records", "synthetic", "other real")
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
    table = _table(title, "", "synthetic", "held-out real")
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
    table = _table(
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
    table = _table("Lengths in words", *columns)
    distance = lengths["wasserstein"]
    for key, to_real in (("real", "real_to_real"), ("synthetic", "synthetic_to_real")):
        row = lengths[key]
        cells = [f"{row['quantiles'][q]:.0f}" for q in quantiles]
        table.add_row(key, f"{row['mean']:.1f}", *cells, _spread(distance[to_real], 2))
    return table


def _structure_table(real: dict[str, Any], synthetic: dict[str, Any]) -> Table:
    table = _table("Structure", "", "is JSON", "fits the schema")
    for name, shares in (("real", real), ("synthetic", synthetic)):
        fits = shares["schema_share"]
        table.add_row(
            name, f"{shares['json_parse_share']:.1%}", "-" if fits is None else f"{fits:.1%}"
        )
    return table


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['deviation']:.{digits}f}"

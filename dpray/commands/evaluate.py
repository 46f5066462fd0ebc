"""`dpray evaluate`: synthetic records measured against real ones. Not private."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dpray.evaluation.evaluate import NOT_FOR_RELEASE, Labelled
from dpray.evaluation.evaluate import evaluate as evaluate_records
from dpray.io.records import Where, list_files, read_rows
from dpray.types import InputError

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"


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
        str, typer.Option(help="Sentence embedding model: a name or a folder.")
    ] = DEFAULT_EMBEDDER,
    seeds: Annotated[int, typer.Option(help="Repetitions behind each mean and deviation.")] = 5,
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

    # Imported late: it loads torch, which a mistyped path should not have to wait for.
    from dpray.engines.embedder import SentenceTransformerEmbedder

    result = evaluate_records(
        sets["real"],
        sets["synthetic"],
        SentenceTransformerEmbedder(embedder),
        train=sets.get("train"),
        floor=sets.get("floor"),
        schema=schema_object,
        seeds=seeds,
    )
    result |= {"embedder": embedder, "files": files}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "evaluation.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False))
    else:
        _show(result, path)


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
    fidelity = result["fidelity"]
    console.print(
        f"{fidelity['measure']} to {fidelity['records_a_side']} real records: synthetic "
        f"{_spread(fidelity['synthetic_to_real'], 3)}, other real records "
        f"{_spread(fidelity['real_to_real'], 3)}",
        soft_wrap=True,
    )
    console.print(_lengths_table(result["lengths"]))
    real, synthetic = result["structure"]["real"], result["structure"]["synthetic"]
    if real["json_parse_share"] > 0 or real["schema_share"] is not None:
        console.print(_structure_table(real, synthetic))
    console.print(f"Written to {path}", markup=False, soft_wrap=True)


def _downstream_table(result: dict[str, Any]) -> Table:
    downstream, tested = result["downstream"], result["test_records"]
    table = Table(title=f"Classifier tested on {tested} real records", title_justify="left")
    for column in ("trained on", "records", "accuracy", "macro F1"):
        table.add_column(column, justify="left" if column == "trained on" else "right")
    names = {
        "synthetic": "synthetic records",
        "ceiling": "real records (ceiling)",
        "floor": f"{downstream['floor']['kind']} (floor)",
    }
    for key, name in names.items():
        row = downstream[key]
        table.add_row(
            name,
            str(row["train_records"]),
            _spread(row["accuracy"], 3),
            _spread(row["macro_f1"], 3),
        )
    return table


def _lengths_table(lengths: dict[str, Any]) -> Table:
    table = Table(title="Lengths in words", title_justify="left")
    quantiles = list(lengths["real"]["quantiles"])
    for column in ("", "mean", *(f"{float(q):.0%}" for q in quantiles), "distance to real"):
        table.add_column(column, justify="right" if column else "left")
    distance = lengths["wasserstein"]
    for key, to_real in (("real", "real_to_real"), ("synthetic", "synthetic_to_real")):
        row = lengths[key]
        cells = [f"{row['quantiles'][q]:.0f}" for q in quantiles]
        table.add_row(key, f"{row['mean']:.1f}", *cells, _spread(distance[to_real], 2))
    return table


def _structure_table(real: dict[str, Any], synthetic: dict[str, Any]) -> Table:
    table = Table(title="Structure", title_justify="left")
    for column in ("", "is JSON", "fits the schema"):
        table.add_column(column, justify="right" if column else "left")
    for name, shares in (("real", real), ("synthetic", synthetic)):
        fits = shares["schema_share"]
        table.add_row(
            name, f"{shares['json_parse_share']:.1%}", "-" if fits is None else f"{fits:.1%}"
        )
    return table


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['deviation']:.{digits}f}"

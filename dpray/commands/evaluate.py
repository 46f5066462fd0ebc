"""`dpray evaluate`: synthetic records measured against real ones. Not private."""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import typer

from dpray.commands.evaluation_tables import show_evaluation
from dpray.commands.progress import part_bar
from dpray.config.engine import EngineConfig
from dpray.engines.base import Embedder
from dpray.evaluation.bertopic_topics import load_bertopic
from dpray.evaluation.evaluate import Labelled
from dpray.evaluation.evaluate import evaluate as evaluate_records
from dpray.evaluation.slices import Spread
from dpray.evaluation.topics import k_means
from dpray.io.files import refuse_cloud, write_durably
from dpray.io.records import Where, list_files, read_rows, text_of
from dpray.types import InputError, valid_unicode

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"

TEXT, LABEL = "text", "label"
"""The columns of a release, whatever those of its data are named."""

FILM_SCHEMA = files("dpray.evaluation") / "film.schema.json"
"""The checks of Amin et al. (2024), Section 5.3, on the fields that they name."""


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
        str | None,
        typer.Option(
            help="JSON Schema that records which are JSON should fit: a file, or `film` for the "
            "film records of Amin et al. 2024."
        ),
    ] = None,
    text: Annotated[
        str,
        typer.Option(help="Name of the column with the text; a release may have its own, `text`."),
    ] = TEXT,
    label: Annotated[
        str | None,
        typer.Option(
            help="Name of the column with the label; a release may have its own, `label`.",
            show_default=LABEL,
        ),
    ] = None,
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
    encoder: Annotated[
        str | None,
        typer.Option(help="Encoder to fine-tune as a classifier too: a name or a folder (slow)."),
    ] = None,
    lm: Annotated[
        str | None,
        typer.Option(
            help="Small causal language model, a name or a folder, for in-context learning and "
            "next-word accuracy (slow)."
        ),
    ] = None,
    extraction: Annotated[
        bool,
        typer.Option(
            "--extraction",
            help="Labels are phrases of their texts: --lm looks for them, nothing classifies.",
        ),
    ] = False,
    topics: Annotated[
        Literal["kmeans", "bertopic"],
        typer.Option(help="What clusters the embeddings; bertopic is an extra, dpray\\[bertopic]."),
    ] = "kmeans",
    ray_address: Annotated[
        str,
        typer.Option(
            help="Embed and look for near-duplicates on Ray: a cluster's address, `auto`, or "
            "`local` for a Ray of its own; `none` is this process."
        ),
    ] = "none",
    actors: Annotated[int, typer.Option(min=1, help="The most actors on Ray, a CPU each.")] = 1,
    gpus_per_actor: Annotated[float, typer.Option(min=0, help="GPUs of each actor.")] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print evaluation.json itself, for programs.")
    ] = False,
) -> None:
    """Measure synthetic records against real ones. NOT private: keep the result to yourself."""
    if extraction and lm is None:
        raise InputError("extraction: needs --lm, a causal language model")
    if extraction and (networks or encoder is not None):
        raise InputError("extraction: phrases are no classes for --networks or --encoder")
    path = _output_file(out)
    paths = {"real": real, "synthetic": synthetic, "train": train, "floor": floor}
    sets = {
        name: _read(given, f"--{name}", text, label or LABEL)
        for name, given in paths.items()
        if given is not None
    }
    if sets["real"][0][1] is None:
        needing = {"--label": label, "--networks": networks, "--encoder": encoder,
                   "--extraction": extraction}  # fmt: skip
        if asked := [option for option, value in needing.items() if value]:
            raise InputError(f"{asked[0]}: no record of --real has a label in '{label or LABEL}'")
    schema_object = None if schema is None else _read_schema(schema)
    names = embedder or [DEFAULT_EMBEDDER]
    models, spread = _load_embedders(names, ray_address, actors, gpus_per_actor)
    cluster = load_bertopic() if topics == "bertopic" else k_means
    language = _load_language(encoder, lm, extraction)
    with part_bar() as on_progress:
        result = evaluate_records(
            sets["real"],
            sets["synthetic"],
            models,
            train=sets.get("train"),
            floor=sets.get("floor"),
            schema=schema_object,
            seeds=seeds,
            networks=networks,
            **language,
            cluster=cluster,
            spread=spread,
            on_progress=on_progress,
        )
    result |= {"embedder": names[0], "lm": lm, "clusters": topics, "files": paths}
    out.mkdir(parents=True, exist_ok=True)
    written = json.dumps(result, indent=2, ensure_ascii=False)
    write_durably(path, valid_unicode(written) + "\n", private=True)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show_evaluation(result, path)


def _load_embedders(
    names: list[str], ray_address: str, actors: int, gpus_per_actor: float
) -> tuple[dict[str, Embedder], Spread]:
    """The models, on Ray not loaded before an actor does it, and what shares out their work."""
    if ray_address == "none":
        if actors > 1 or gpus_per_actor:
            raise InputError("actors: without --ray-address there is this process only")
        return {name: load_embedder(name) for name in names}, map
    from dpray.runs.ray_map import LateEmbedder, RayMap

    spread = RayMap(ray_address, actors, gpus_per_actor)
    return {name: LateEmbedder(partial(load_embedder, name)) for name in names}, spread


def load_embedder(name: str, key: str = "embedder") -> Embedder:
    """Raises InputError that names `key` where there is no such model."""
    # Imported late: it loads torch, which a mistyped path should not have to wait for.
    from dpray.engines.base import EngineError
    from dpray.engines.embedder import SentenceTransformerEmbedder

    try:
        return SentenceTransformerEmbedder(name)
    except (EngineError, InputError):
        raise InputError(f"{key}: cannot load {name}, as a folder or from a hub") from None


def _load_language(encoder: str | None, lm: str | None, extraction: bool) -> dict[str, Any]:
    """The models that `evaluate_records` takes beside embedders; loaded before the work begins."""
    models: dict[str, Any] = {}
    if encoder is not None:
        from dpray.evaluation.fine_tuning import Encoder

        models["encoder"] = Encoder(encoder)
    if lm is not None:
        from dpray.evaluation.causal_lm import CausalLM

        models["lm"] = CausalLM(lm)
    if lm is not None and extraction:
        from dpray.engines.transformers import TransformersEngine

        models["extractor"] = TransformersEngine(EngineConfig(model=lm, dtype="float32"))
    return models


def check_output(path: Path) -> None:
    """Raises InputError where a file could not be written in the end; makes nothing."""
    refuse_cloud(path, "--out")
    try:
        made = next(place for place in (path.parent, *path.parent.parents) if place.exists())
        if path.is_dir():
            raise IsADirectoryError
        with TemporaryFile(dir=made):
            pass
    except (OSError, ValueError) as error:
        raise InputError(f"--out: cannot write {path} ({type(error).__name__})") from None


def _output_file(out: Path) -> Path:
    check_output(out / "evaluation.json")
    if (out / "run.json").exists():
        raise InputError(
            f"--out: {out}: what a run leaves there may be released, and this may not; give a "
            f"folder such as {out / 'private'}"
        )
    return out / "evaluation.json"


def _read(path: str, key: str, text: str, label: str) -> list[Labelled]:
    """The records of files, or of the release in a run's folder."""
    released = Path(path) / "synthetic.jsonl"
    if (Path(path) / "run.json").exists() and not released.exists():
        raise InputError(f"{key}: {path}: a run's folder without synthetic.jsonl, not finished")
    records: list[Labelled] = []
    for file in list_files(str(released) if released.exists() else path, key):
        for where, row in read_rows(file):
            if not records and key == "--synthetic":
                text, label = _own(row, text, TEXT), _own(row, label, LABEL)
            record = text_of(row, text, where), _label(row, label, where)
            if records and (record[1] is None) != (records[0][1] is None):
                raise InputError(f"{where}: some records have a label, some have none")
            records.append(record)
    if not records:
        raise InputError(f"{path}: no records")
    return records


def _own(row: dict[str, Any], column: str, own: str) -> str:
    """The column, or a release's own name of it, where a row has that one only."""
    return own if column not in row and own in row else column


def _label(row: dict[str, Any], column: str, where: Where) -> str | None:
    """As `run` reads it: numbers too, by their usual form."""
    value = row.get(column)
    if value is not None and not isinstance(value, str | int | float):
        raise InputError(f"{where}: no label in column '{column}'")
    return None if value is None else text_of({column: str(value)}, column, where)


def _read_schema(name: str) -> dict[str, Any]:
    path: Any = FILM_SCHEMA if name == "film" else Path(name)
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"schema: cannot read {name}") from None
    except (ValueError, RecursionError):
        raise InputError(f"schema: {name} is not JSON") from None
    if not isinstance(schema, dict):
        raise InputError(f"schema: {name} is not a JSON object")
    return schema

"""`evaluate_files` reads files of records, loads the embedder and evaluates the records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

from dpray.config.config import DataConfig
from dpray.engines.base import Embedder, EngineError
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.evaluation.columns import compare_columns
from dpray.evaluation.evaluate import Labelled, checked_sets, evaluate, split, verdict
from dpray.evaluation.personal_data import find_patterns
from dpray.evaluation.settings import EvaluationSettings
from dpray.extras import require
from dpray.io.after import after
from dpray.io.columns import (
    OTHER,
    Label,
    column_of,
    cut_share,
    is_empty,
    is_known,
    label_name,
    plain_value,
    text_of,
    value_name,
)
from dpray.io.file_list import list_files
from dpray.io.files import check_writable, read_json, write_durably
from dpray.io.formats import AS_RECOGNISED, FileFormat, FileRow, Where
from dpray.io.languages import embedder_advice, topic_words
from dpray.io.records import read_rows
from dpray.io.snapshot import take_snapshot, vanishing_folder
from dpray.io.table import object_text, turns_text
from dpray.io.table_schema import json_columns_of
from dpray.mechanisms.topics import words_of
from dpray.runs.folder import RECORDS, refuse_released
from dpray.runs.released import HIDDEN
from dpray.types import InputError, Json, OnProgress, ReadOnlyJson, no_progress, valid_unicode

EVALUATION = "evaluation.json"

RUN_FILE = "run.json"

TEXT, LABEL = "text", "label"
"""The columns of a release, whatever the columns of its data are named."""

TextOf = Callable[..., str]
"""Makes a record's text of its `row`, which is at `where`."""


@contextmanager
def files_of(data: DataConfig) -> Iterator[DataConfig]:
    """Yield the section with files to read: for a database, a copy of its rows that vanishes."""
    if data.query is None:
        yield data
        return
    with vanishing_folder("dpray-rows-") as folder:
        rows = take_snapshot(data.path, data.query, folder / "rows", data.column_keys)
        yield data.copied_to(rows)


def evaluate_files(
    settings: EvaluationSettings, on_progress: OnProgress = no_progress
) -> dict[str, object]:
    """Measure the synthetic records against the real ones; return the content of `evaluation.json`,
    and write that file if `settings.out` is given. The result is private: not for release.

        settings = EvaluationSettings(real="test.jsonl", synthetic="out/run")
        evaluate_files(settings)["fidelity"]["measures"]["mauve"]

    Raises InputError for files, columns or models that are not there, and for records that cannot
    be measured; it names a key or a row, never a text.
    """
    if settings.out is not None:
        check_writable(settings.out / EVALUATION, "--out")
        refuse_released(settings.out, "--out")
    paths = {"real": settings.real, "synthetic": settings.synthetic,
             "train": settings.train, "floor": settings.floor}  # fmt: skip
    signs = settings.delimiter, settings.quote, settings.escape
    own = FileFormat(*signs, settings.encoding, settings.skip_rows, "--", settings.records)
    forms = dict.fromkeys(paths, own) | {"synthetic": AS_RECOGNISED}
    schema = None
    if settings.json_schema is not None:
        schema = read_json(Path(settings.json_schema), "schema")
    config = _config_of_run(Path(settings.synthetic))
    run = config.get("data") or {}
    persons = "real" if settings.train is None else "train"
    settings = _with_columns_of(run, settings, own)
    text_of = text_reader(settings, schema or {})
    labels = _labels_of(run, settings)
    kept = row_rule(settings.after, labels, settings.label or LABEL)
    units: list[str] = []
    listed = run.get("attributes") or {}
    names = [*listed] if settings.attributes is None else listed_columns(settings.attributes)
    attributes: dict[str, list[FileRow]] = {name: [] for name in paths}

    def keep(name: str, row: FileRow, where: Where) -> None:
        if name == persons and (unit := settings.unit):
            units.append(label_name(plain_value(column_of(row, unit, where), unit, where)))
        if name != "floor":
            attributes[name].append({column: column_of(row, column, where) for column in names})

    sets = {
        name: read_labelled(
            path,
            f"--{name}",
            text_of,
            settings.label or LABEL,
            forms[name],
            kept if name in ("real", "train") else None,
            partial(keep, name),
        )
        for name, path in paths.items()
        if path is not None
    }
    if settings.label and sets["real"][0][1] is None:
        raise InputError(f"--label: no record of --real has a label in '{settings.label}'")
    language = settings.language or run.get("language")
    checked_sets(sets)  # before the embedder is loaded, which may take long
    result = evaluate(
        sets["real"],
        sets["synthetic"],
        load_embedder(settings.embedder),
        train=sets.get("train"),
        floor=sets.get("floor"),
        schema=schema,
        seeds=settings.seeds,
        units=units or None,
        words=words_of(*topic_words(language)),
        on_progress=on_progress,
    )
    if names:
        result["columns"] = compare_attributes(sets, _named(attributes, listed), settings.seeds)
    if labels is not None:
        result["warnings"].append(
            "real records with labels that are not in data.labels are left out, as in the run "
            "(data.other_labels: skip)"
        )
    result["warnings"] += embedder_advice(settings.embedder, language, "--embedder")
    result["personal_data"] = find_patterns((text for text, _ in sets["synthetic"]), language)
    synthetic = _files(settings.synthetic, "--synthetic")
    cut = cut_share(row for file in synthetic for _, row in read_rows(file))
    result["summary"] = verdict(result, cut, config.get("method") or {})
    result |= {"embedder": settings.embedder, "files": paths}
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        written = json.dumps(result, indent=2, ensure_ascii=False)
        write_durably(settings.out / EVALUATION, valid_unicode(written) + "\n", private=True)
    return result


def _config_of_run(folder: Path) -> Json:
    """Return the public configuration of a run by its folder or its records, {} for other files."""
    file = (folder.parent if folder.name == RECORDS else folder) / RUN_FILE
    return (read_json(file).get("config") or {}) if file.is_file() else {}


def _with_columns_of(
    run: ReadOnlyJson, settings: EvaluationSettings, form: FileFormat
) -> EvaluationSettings:
    """Return the settings with the columns that the run of --synthetic read its records from, where
    no option names one and the first of the real records does not have the usual one.

    Raises InputError if run.json does not tell the name of the text's column.
    """

    def has(column: str | None, path: str = settings.real, key: str = "--real") -> bool:
        rows = (each for file in _files(path, key) for each in read_rows(file, form))
        return column is not None and any(_has(row, column, at) for at, row in islice(rows, 1))

    found: dict[str, str] = {}
    if settings.text == TEXT and settings.turns is None and not has(TEXT):
        key = "turns" if run.get("turns") else "text"
        if named := run.get(key):
            found[key] = named if isinstance(named, str) else ",".join(named)
        if HIDDEN in found.get(key, "").split(","):
            raise InputError(
                f"--{key}: the real records have no column 'text', and run.json does not tell the "
                f"name in data.{key}, which looks like a value; give it"
            )
    if settings.label is None and not has(LABEL) and has(run.get("label")):
        found["label"] = run["label"]
    persons = (settings.real, "--real") if settings.train is None else (settings.train, "--train")
    if settings.unit is None and has(run.get("unit"), *persons):
        found["unit"] = run["unit"]
    return settings.model_copy(update=found)


def _labels_of(run: ReadOnlyJson, settings: EvaluationSettings) -> dict[str, Label] | None:
    """Return the labels to which a run with `data.other_labels: skip` kept, by their names; None
    without such a run, or if `--label` names another column than the run's."""
    if run.get("other_labels") != "skip" or not run.get("labels"):
        return None
    if settings.label not in (None, LABEL, run.get("label")) or HIDDEN in run["labels"]:
        return None
    return {label_name(label): label for label in run["labels"]}


def compare_attributes(
    sets: Mapping[str, Sequence[Labelled]], attributes: Mapping[str, Sequence[FileRow]], seeds: int
) -> dict[str, object] | None:
    """Compare labels and attributes as columns, with the halves of `evaluate` without `train`."""
    rows: dict[str, list[Labelled]] = {
        name: [
            (text, json.dumps(({} if label is None else {LABEL: label}) | own))
            for (text, label), own in zip(records, attributes[name], strict=True)
        ]
        for name, records in sets.items()
        if name != "floor"
    }
    other, tested = (rows["train"], rows["real"]) if "train" in rows else split(rows["real"])
    sides = [[str(own) for _, own in side] for side in (rows["synthetic"], other, tested)]
    return compare_columns(sides[0], sides[1], sides[2], seeds)


def _named(
    sets: Mapping[str, Sequence[FileRow]], listed: Mapping[str, Sequence[object]]
) -> dict[str, list[FileRow]]:
    """Return the records with the names of their values, as a run reads them: 5.0 may be 5, and a
    value that is not `listed`, or without a list not in the release, may be `OTHER`."""
    known = {
        column: {value_name(value) for value in listed.get(column, ())}
        or {value_name(row[column]) for row in sets["synthetic"]}
        for column in sets["synthetic"][0]
    }

    def name(column: str, value: object) -> str:
        found = value_name(value, known[column])
        return OTHER if found not in known[column] and OTHER in known[column] else found

    return {
        side: [{column: name(column, row[column]) for column in known} for row in rows]
        for side, rows in sets.items()
    }


def load_embedder(name: str) -> Embedder:
    """Load an embedding model. Raises InputError if there is none."""
    require("embedder", "sentence_transformers")
    try:
        return SentenceTransformerEmbedder(name)
    except (EngineError, InputError):
        raise InputError(f"embedder: cannot load {name}, as a folder or from a hub") from None


def text_reader(settings: EvaluationSettings, schema: Mapping[str, object]) -> TextOf:
    """Return the function that makes a record's text of its row, as a run does."""
    columns = listed_columns(settings.text, "--text")
    if settings.turns is not None:
        if settings.text != TEXT:
            raise InputError("--turns: give --text or --turns, not both")
        return partial(turns_text, column=settings.turns, roles=None)
    if len(columns) == 1:
        return partial(text_of, column=settings.text)
    json_columns = [name for name in json_columns_of(schema) if name in columns]
    return partial(object_text, columns=columns, json_columns=json_columns)


def listed_columns(names: str, key: str = "--attributes") -> list[str]:
    """Return names of columns that have commas between them."""
    columns = [name.strip() for name in names.split(",")]
    if len({*columns}) < len(columns):
        raise InputError(f"{key}: a column is given twice")
    return columns


def row_rule(
    rule: str | None, labels: Mapping[str, Label] | None, column: str
) -> Callable[[FileRow, Where], bool] | None:
    """Return whether a row is kept by a rule of the form of `data.after`, and has one of `labels`
    in `column`; None if all rows are."""
    if rule is None and labels is None:
        return None

    def keeps(row: FileRow, where: Where) -> bool:
        if rule is not None and not after(rule).keeps(row, where):
            return False
        return labels is None or is_known(_cell(row, column, where), labels)

    return keeps


def read_labelled(
    path: str,
    key: str,
    read_text: TextOf,
    label: str,
    form: FileFormat,
    keeps: Callable[[FileRow, Where], bool] | None = None,
    further: Callable[[FileRow, Where], None] = lambda row, where: None,
) -> list[Labelled]:
    """Read the records of files, or of the release in a run's folder; blank texts are left out, and
    rows for which `keeps` is false. `further` gets the row of each record."""
    released = Path(path) / RECORDS
    is_run = (Path(path) / RUN_FILE).exists()
    if is_run and not released.exists():
        raise InputError(f"{key}: {path}: a run's folder without {RECORDS}, not finished")
    if is_run and key == "--synthetic":
        # Columns of a table may be named like the release's own: `text` and `label`.
        read_text = partial(text_of, column=TEXT)
    records: list[Labelled] = []
    for file in _files(path, key):
        for where, row in read_rows(file, form):
            if keeps is not None and not keeps(row, where):
                continue
            if not records and key in ("--synthetic", "--floor"):
                read_text = _own_text(row, read_text, where)
                label = label if _has(row, label, where) or LABEL not in row else LABEL
            record = read_text(row, where=where), _label(row, label, where)
            if is_empty(record[0]):
                continue
            if records and (record[1] is None) != (records[0][1] is None):
                raise InputError(f"{where}: some records have a label, some have none")
            records.append(record)
            further(row, where)
    if not records:
        which = "" if keeps is None else " that --after and data.labels of the run keep"
        raise InputError(f"{path}: no records{which}")
    return records


def _files(path: str, key: str) -> Sequence[str]:
    released = Path(path) / RECORDS
    return list_files(str(released) if released.exists() else path, key)


def _own_text(row: dict[str, object], read_text: TextOf, where: Where) -> TextOf:
    """Return the reader of a text, or that of a release's own column if the row has only that."""
    try:
        read_text(row, where=where)
    except InputError:
        return partial(text_of, column=TEXT) if TEXT in row else read_text
    return read_text


def _has(row: dict[str, object], column: str, where: Where) -> bool:
    try:
        column_of(row, column, where)
    except InputError:
        return False
    return True


def _cell(row: dict[str, object], column: str, where: Where) -> object:
    return column_of(row, column, where) if _has(row, column, where) else None


def _label(row: dict[str, object], column: str, where: Where) -> str | None:
    """Return the name of a row's label, or None for a row without a label."""
    value = _cell(row, column, where)
    if isinstance(value, dict | list):
        raise InputError(f"{where}: no label in column '{column}'")
    return None if value is None else label_name(value)

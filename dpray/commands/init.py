"""`dpray init` writes a commented configuration from a file's header and a few answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dpray.commands.plan import AsJson
from dpray.io.columns import listed_names
from dpray.io.formats import FileFormat
from dpray.io.records import Header
from dpray.methods.config import load_config
from dpray.starter import (
    Answers,
    Method,
    check_columns,
    default_config_path,
    look,
    read_header,
    read_label,
    starter,
    stem,
    usual_delta,
    usual_model,
    usual_text,
)
from dpray.terminal import Terminal
from dpray.types import InputError

Ask = Callable[[str, str | None], str]
"""An `Ask` puts a question to a person, with the answer that an empty line stands for."""


def init(
    file: Annotated[str, typer.Argument(help="A data file, folder, glob or hf://name.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The configuration; NAME.yaml beside the file."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column of the text.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    labels: Annotated[
        str | None, typer.Option(help="The public label set: A,B,C.", metavar="A,B,...")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="The column of the privacy unit.")] = None,
    public_size: Annotated[
        int | None, typer.Option(min=1, help="Your public estimate of the number of records.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The most the run may cost.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Below 1 / public size by a factor of ten if not given.")
    ] = None,
    method: Annotated[Method | None, typer.Option(help="The method; auto compares all.")] = None,
    vocabulary: Annotated[str | None, typer.Option(help="For dp_kps: public terms.")] = None,
    dataset: Annotated[str | None, typer.Option(help="The ledger's name for the data.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a hub's name, or smollm2.")] = None,
    out: Annotated[str | None, typer.Option(help="The folder of the release.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="Of CSV, if the header misleads.")] = None,
    encoding: Annotated[str | None, typer.Option(help="Of text files, such as cp1252.")] = None,
    looks: Annotated[
        bool,
        typer.Option(
            "--look",
            help="Read the first rows too, for the names of the labels and the encoding. They are "
            "private: the names go into the file for you to check.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration. Reads the header of the file, and no row without --look;
    asks for what no option says, if a person is at the terminal."""
    target = output or default_config_path(file)
    if target.exists() and not force:
        raise InputError(f"--output: {target} is there already; --force replaces it")
    ask = _ask if sys.stdin.isatty() and not as_json else None
    form = FileFormat(delimiter=_sign(delimiter), encoding=encoding, keys="--")
    given = {
        "text": text, "label": label, "labels": labels, "unit": unit, "public_size": public_size,
        "epsilon": epsilon, "delta": delta, "method": method, "vocabulary": vocabulary,
        "dataset": dataset, "model": model, "out": out,
    }  # fmt: skip
    answers, header = answered(file, form, given, looks, ask)
    write_checked(target, starter(answers, header))
    if as_json:
        typer.echo(json.dumps({"config": str(target), "columns": header.columns}))
        return
    console = Terminal()
    console.print(f"{target}: read it, and correct what is wrong. Then:", soft_wrap=True)
    for command, words in {
        "check": "reads all rows, for your eyes alone; charges nothing",
        "plan": "what a run costs and makes; opens no data",
        "run": "charges the budget and makes the texts",
    }.items():
        console.print(f"  dpray {command} {target}  # {words}", highlight=False, soft_wrap=True)


def answered(
    path: str, form: FileFormat, given: dict[str, Any], looks: bool, ask: Ask | None
) -> tuple[Answers, Header]:
    """Return all answers: options, then a person's, then defaults. Raises InputError that names
    the options that are missing."""
    header, form = read_header(path, form)
    check_columns(header, text=given["text"], label=given["label"], unit=given["unit"])
    if ask is not None:
        given = given | _asked(header, given, ask)
        check_columns(header, text=given["text"], label=given["label"])
    known = given | {"text": given["text"] or usual_text(header.columns)}
    labels = [read_label(word.strip()) for word in (given["labels"] or "").split(",") if word]
    if looks:
        found, form = look(path, given["label"], form)
        labels = labels or found
    if ask is not None and given["label"] and not labels:
        answer = ask("The public label set, with commas", None)
        labels = [read_label(word.strip()) for word in answer.split(",")]
    wanted = ["text", "public_size", "epsilon"]
    wanted += ["vocabulary"] if given["method"] == "dp_kps" else []
    missing = [name for name in wanted if known[name] is None]
    if given["label"] and not labels:
        missing.append("labels")
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        there = listed_names(header.columns)
        raise InputError(f"init: needs {options} (columns: {there})")
    name, size = stem(path), int(known["public_size"])
    usual = {
        "delta": usual_delta(size), "method": "private_prediction", "dataset": name,
        "model": usual_model(), "out": f"out/{name}",
    }  # fmt: skip
    chosen: dict[str, Any] = usual | _given(known) | {"labels": labels}
    made = Answers(
        path=path, encoding=form.encoding,
        looked_at=looks and given["labels"] is None, **chosen,
    )  # fmt: skip
    return made, header


def _given(known: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in known.items() if value is not None}


def _asked(header: Header, given: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return a person's answers to what no option says."""
    found: dict[str, Any] = {}
    if given["text"] is None:
        there = listed_names(header.columns)
        found["text"] = ask(f"The column of the text ({there})", usual_text(header.columns))
    if given["label"] is None:
        found["label"] = ask("The column of the label, empty for none", "") or None
    if given["public_size"] is None:
        question = "Your public estimate of the number of records (nothing is counted)"
        found["public_size"] = _number(int, question, ask(question, None))
    if given["epsilon"] is None:
        found["epsilon"] = _number(float, "epsilon", ask("epsilon, the most a run may cost", "4"))
    if given["method"] is None:
        methods = "private_prediction, aug_pe, dp_sgd, auto"
        found["method"] = ask(f"The method ({methods})", "private_prediction")
        if found["method"] not in methods.split(", "):
            raise InputError(f"--method: one of {methods}")
    return found


def _number(kind: Callable[[str], Any], question: str, answer: str) -> Any:
    try:
        return kind(answer)
    except ValueError:
        raise InputError(f"{question}: not a number") from None


def _ask(question: str, default: str | None) -> str:
    answer: str = typer.prompt(question, default=default, err=True)
    return answer


def _sign(delimiter: str | None) -> str | None:
    return "\t" if delimiter == "\\t" else delimiter


def write_checked(target: Path, text: str) -> None:
    """Write the configuration, which `load_config` reads. Raises InputError for an answer that it
    refuses, and then leaves the old file, if there is one."""
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        load_config(draft)
        draft.replace(target)
    except OSError as error:
        raise InputError(f"--output: {target} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)

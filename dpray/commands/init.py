"""`dpray init` writes a commented configuration from a file's header and a few answers."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dpray.commands.plan import AsJson, prepare_to_plan
from dpray.commands.starter import (
    default_config_path,
    likely_units,
    starter,
    starter_values,
    write_checked,
)
from dpray.io.columns import listed_names
from dpray.io.formats import AS_RECOGNISED, FileFormat, known_encoding, one_sign, quote_sign
from dpray.io.yaml_text import parse_yaml
from dpray.methods.config import parse_config
from dpray.methods.registry import make_plan
from dpray.runs.forecast import Forecast, rates_here
from dpray.terminal import Terminal
from dpray.types import InputError

Method = Literal["private_prediction", "aug_pe", "dp_kps", "dp_sgd", "auto"]

LOOK = (
    "Also read the first rows, for the labels, the encoding and titles above a header. Rows are "
    "private: check the labels in the written file. If the encoding is in doubt, words of the rows "
    "are shown to you."
)

HOURS, TRAINING_HOURS = 1 / 6, 1.0
"""A first run takes no longer on a CPU, and a first training."""

PASSES = (10, 3, 1, 0.3, 0.1, 0.03, 0.01, 0.001)
"""The passes of a first training over the data, of which the most that end in time are taken."""

_FEWER_CALLS = {"iterations": 3, "variations": 4, "max_tokens": 128, "min_words": 10}

SIZES: dict[str, list[Mapping[str, float]]] = {
    "private_prediction": [{}, {"max_records": 10}, {"max_records": 5}],
    "aug_pe": [{}, *({"records": n} | _FEWER_CALLS for n in (200, 100, 50, 20))],
    "dp_kps": [{}, *({"records": n, "max_tokens": 128} for n in (400, 200, 100, 50, 20))],
    "dp_sgd": [{}, *({"epochs": n, "max_length": 128, "records": 50} for n in PASSES)],
}
"""The sizes of each method, from what `init` writes on a GPU (no other key) to the smallest: the
first that ends in time is taken."""


def init(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="A data file, folder, glob or hf://name.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The configuration; by default NAME.yaml next to FILE."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The column of the text; A,B,C: those of a table's record.")
    ] = None,
    turns: Annotated[
        str | None, typer.Option(help="The column of conversations, in place of --text.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    labels: Annotated[
        str | None,
        typer.Option(help='The public label set: A,B,"C, with a comma".', metavar="A,B,..."),
    ] = None,
    about: Annotated[
        str | None,
        typer.Option(help="PUBLIC: what the texts are, as in `Here are ...`; for the prompts."),
    ] = None,
    label_about: Annotated[
        str | None,
        typer.Option(help="PUBLIC: what labels mean, for the prompts.", metavar="1: WORDS, 2: ..."),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="PUBLIC: the texts' language, as German.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="The column of the person, if one may have several rows.")
    ] = None,
    no_unit: Annotated[bool, typer.Option("--no-unit", help="Each row is another person.")] = False,
    public_size: Annotated[
        int | None, typer.Option(min=1, help="Your public estimate of the number of records.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The most the run may cost.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="By default below 1 / public size by a factor of ten.")
    ] = None,
    method: Annotated[Method | None, typer.Option(help="The method; auto compares all.")] = None,
    vocabulary: Annotated[
        str | None, typer.Option(help="For dp_kps and auto: public terms.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="The ledger's name for the data.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a hub's name, or smollm2.")] = None,
    out: Annotated[str | None, typer.Option(help="The folder of the release.")] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            parser=one_sign, metavar="TEXT", help="Delimiter of CSV, if the header misleads."
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            parser=known_encoding, metavar="TEXT", help="Encoding of text files, such as cp1252."
        ),
    ] = None,
    quote: Annotated[
        str,
        typer.Option(
            parser=quote_sign, metavar="TEXT", help='Sign around a cell of CSV; "": none.'
        ),
    ] = AS_RECOGNISED.quote,
    escape: Annotated[
        str | None,
        typer.Option(parser=one_sign, metavar="TEXT", help="Sign before a quote in a cell of CSV."),
    ] = None,
    records: Annotated[
        str | None, typer.Option(help="The key of the list of rows, if a JSON file is an object.")
    ] = None,
    skip_rows: Annotated[
        int,
        typer.Option(
            min=0, max=1000, help="Rows of CSV or .xlsx above the header, such as titles."
        ),
    ] = 0,
    looks: Annotated[bool, typer.Option("--look", help=LOOK)] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration. Reads the header of the file, and no row without --look. On
    a terminal, asks for values that no option gives."""
    given = {
        "text": text, "turns": turns, "label": label, "labels": labels, "unit": unit,
        "about": about, "label_about": label_about, "language": language,
        "public_size": public_size, "epsilon": epsilon, "delta": delta, "method": method,
        "vocabulary": vocabulary, "dataset": dataset, "model": model, "out": out,
    }  # fmt: skip
    if no_unit:
        if unit:
            raise InputError("--no-unit: give --unit or --no-unit, not both")
        given["unit"] = ""
    target = output or default_config_path(file)
    if target.exists() and not force:
        raise InputError(f"--output: {target} is there already; --force replaces it")
    ask = _ask if sys.stdin.isatty() and not as_json else None
    form = FileFormat(delimiter, quote, escape, encoding, skip_rows, "--", records)
    values = starter_values(file, form, given, looks, ask)
    prepare_to_plan(context)
    sizes, time = first_sizes(starter(values))
    write_checked(target, starter(values | {"sizes": sizes, "time": time}))
    units = likely_units(values)
    if as_json:
        said = {"config": str(target), "columns": values["columns"]}
        typer.echo(json.dumps(said | ({"likely_units": units} if units else {})))
    else:
        _show_next(target, values["method"], units)


def first_sizes(text: str) -> tuple[Mapping[str, float], str]:
    """Return the keys of `method` that make the run of a configuration as `init` writes it short
    enough for this machine's CPU, and the time that it then takes in words. Nothing where the time
    is not known: with a GPU, an endpoint or a model that is not here."""
    tree: Any = parse_yaml(text)
    found: tuple[Mapping[str, float], str] = {}, ""
    with suppress(InputError):  # a plan says later what is wrong
        for sizes in SIZES.get(tree["method"]["name"], []):
            config = parse_config(tree | {"method": tree["method"] | sizes})
            if config.method.can_run_without_noise:  # the noise moves no size, and takes seconds
                privacy = config.privacy.model_copy(update={"epsilon": math.inf})
                config = config.model_copy(update={"privacy": privacy})
            if (rates := rates_here(config)) is None:
                return found
            forecast = Forecast.of(make_plan(config).work, rates, config)
            found = sizes, forecast.duration
            if forecast.hours <= (TRAINING_HOURS if config.method.name == "dp_sgd" else HOURS):
                break
    return found


def _show_next(target: Path, method: str, units: Sequence[str]) -> None:
    console = Terminal()
    if units:
        console.plain(
            "no --unit: each row is protected by itself. The header has what looks like a person "
            f"({listed_names(units)}): --unit COLUMN protects all rows of one together, --no-unit "
            "says that each row is another person; --force writes the file again"
        )
    console.say(f"{target}: read it, and correct what is wrong. Then:")
    file, steps = shlex.quote(str(target)), []
    if method == "auto":
        chosen = shlex.quote(str(target.with_stem(f"{target.stem}-chosen")))
        steps.append((f"plan {file} --write {chosen}", "compares the methods; writes the best"))
        file = chosen
    steps += [
        (f"check {file}", "reads all rows and finds bad ones; do not share its output"),
        (f"plan {file}", "what a run will cost and make; opens no data"),
        (f"preview {file}", "what the model writes without your data; opens no data"),
        (f"run {file}", "is charged to the budget, and makes the texts; the others charge nothing"),
    ]
    for command, words in steps:
        console.plain(f"  dpray {command}  # {words}")


def _ask(question: str, default: str | None) -> str:
    answer: str = typer.prompt(question, default=default, err=True)
    return answer

"""`dpray check` reads all rows before a run, for their owner only."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

import dpray
from dpray.commands.plan import UNSAID, AsJson, ConfigFile, Overrides
from dpray.evaluation.label_check import difference_in_words
from dpray.io.near_labels import spelled
from dpray.terminal import Terminal, progress_bar, titled_table
from dpray.types import InputError, Json

FEW_OF_ASSUMED = 0.25
"""A label with a smaller part of its assumed rows is worth a word."""

DECODE = "decode them in the file first, in Python by base64.b64decode(text).decode()"


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Also write OUTPUT/private/check.json, for the owner only."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Read all rows as a run will: errors by row, types, lengths, labels, texts that will be cut.

    The counts are exact, so they are for the owner only. Nothing is charged. Exit code 2 if a row
    would end a run.
    """
    loaded = dpray.load(config, *overrides or [])
    with progress_bar("planning") as on_progress:
        found = dpray.check(loaded, on_progress, write=write)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show_check(found, Terminal())
    return InputError.exit_code if found["refused"] else 0


def show_check(found: Json, console: Terminal) -> None:
    console.note("dpray check", "bold", found["notice"])
    skipped = (
        f", {found['skipped']:,} left out (empty, of another label, or not after data.after)"
        if found["skipped"]
        else ""
    )
    console.say(
        f"{found['rows']:,} rows, {found['records']:,} records{skipped}; data.public_size is "
        f"{found['public_size']:,}{' persons' if found['units'] else ''}, a public number: leave "
        "it, unless you know better without this count"
    )
    console.say(f"Public in prompts: {found['about'] or UNSAID}")
    for line in found["advice"]:
        console.note("change", "yellow", line)
    if found["misfits"]:
        words = "records do not fit method.schema; a run shows them to the model as they are"
        keys = [f"{e['key']} {e['problem']} ({e['records']:,})" for e in found["misfit_keys"]]
        console.note("schema", "yellow", f"{found['misfits']:,} {words}: {'; '.join(keys)}")
    for column, count in found["base64"].items():
        words = f"texts of column '{column}' are base64, and a run would take the codes for words"
        console.note("base64", "yellow", f"{count:,} {words}; {DECODE}")
    _show_people(found, console)
    for error in found["errors"]:
        more = error["count"] - len(error["first"])
        places = "; ".join(error["first"]) + (f" and {more:,} more" if more else "")
        where = f" ({places})" if error["first"] else ""
        console.note("error", "red", f"{error['count']:,} x {error['reason']}{where}")
    _show_tables(found, console)
    _show_labels(found, console)
    if found["tokens_not_counted"]:
        console.note("tokens are not counted", "yellow", found["tokens_not_counted"])
    if found["cut_characters"]:
        console.say(
            f"{found['cut_characters']:,} texts have data.max_characters or more; what follows is "
            "not read"
        )
    for limit in found["limits"]:
        words = f"will be cut to {limit['most']:,} tokens ({limit['set_by']})"
        console.say(f"{limit['cut']:,} texts {words}")
    for each in found["proposals"]:
        # What depends on private rows, and the configuration is released.
        key = each["key"]
        depends = not key.startswith("data.") or key in ("data.labels", "data.roles")
        note = "; it depends on private rows, and is released" if depends else ""
        setting = f"{key}={each['value']}"
        # The colon after an unquoted setting would look like a part of its value.
        setting = f"'{setting}'" if setting.endswith(":") else shlex.quote(setting)
        console.note("proposal", "yellow", f"{setting}: {each['why']}{note}")
    if found["refused"]:
        console.note("refused", "red", "these errors would end a run; nothing was charged")
    else:
        console.note("ok", "green", "a run can read every row")


def _show_people(found: Json, console: Terminal) -> None:
    if found["equal_texts"]:
        words = "records share their text with another"
        console.say(f"{found['equal_texts']:,} of {found['records']:,} {words}")
    if (units := found["units"]) is not None:
        console.say(
            f"{units['units']:,} units, at most {units['most_records']:,} records of one; "
            f"data.max_records_per_unit leaves {units['left_out']:,} records out"
        )
        if units["alike"]:
            words = (
                "names of units differ only in case, blanks, leading zeros, thousands separators "
                "or Unicode form"
            )
            console.note("units", "yellow", f"{units['alike']:,} {words}: is each a person?")
        if units["units"] == 1 < found["records"]:
            words = (
                "all records are of one unit, and a run reads no more of them than of one person"
            )
            console.note("units", "yellow", f"{words}: does data.unit name the person?")
    for each in found["persons"]:
        console.say(
            f"column '{each['column']}' looks like a person: {each['values']:,} values in "
            f"{each['records']:,} records, up to {each['most']:,} with the same one"
        )


def _show_tables(found: Json, console: Terminal) -> None:
    types = [
        (name, ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()))
        for name, kinds in found["types"].items()
    ]
    shares, total = found["label_shares"], max(1, found["records"])
    labels = [
        (name, f"{count:,}", f"{count / total:.1%}", f"{shares.get(name, 0):.1%}")
        for name, count in found["labels"].items()
    ]
    others = _others(found["other_labels"], found["hidden_labels"], "data.labels")
    labels += [(*each, "", "") for each in others]
    roles = [(name, f"{count:,}") for name, count in found["roles"].items()]
    roles += _others(found["other_roles"], found["hidden_roles"], "data.roles")
    lengths = {"characters": found["characters"]}
    lengths |= {f"tokens for {each['key']}": each["tokens"] for each in found["limits"]}
    sizes = [
        (f"{each['tokens']:,}", f"{each['longer']:,}", f"{each['texts']:,}")
        for each in found["max_tokens"]
    ]
    shares = [(name, *(f"{n:,}" for n in each.values())) for name, each in lengths.items()]
    for title, columns, rows in (
        ("Types", ("column", "rows"), types),
        ("Labels", ("label", "rows", "share", "assumed"), labels),
        ("Roles", ("role", "messages"), roles),
        ("Lengths of the texts", ("", *found["characters"]), shares if found["records"] else []),
        ("Longest text to write", ("method.max_tokens", "longer records", "texts made"), sizes),
    ):
        if rows:
            console.print(titled_table(title, columns, rows))


def _show_labels(found: Json, console: Terminal) -> None:
    for difference in found["label_differences"]:
        console.note("label", "yellow", difference_in_words(difference))
    for words in _of_shares(found):
        console.note("label", "yellow", words)
    if found["codes"]:
        words = f"prompts will say it as it is: data.label_about.{found['codes'][0]}=WORDS tells"
        console.note("label", "yellow", f"{found['codes'][0]} is a code, and {words} its meaning")


def _of_shares(found: Json) -> list[str]:
    """Return a sentence about the labels that have far fewer rows than the plan assumes: their
    batches would be small, and their texts more noise than rows."""
    total, few = found["records"], dict[str, list[str]]()
    for name, count in found["labels"].items():
        share = found["label_shares"].get(name, 0)
        if share > 0 and count < FEW_OF_ASSUMED * share * total:
            few.setdefault(f"{share:.1%}", []).append(f"{spelled(name)} has {count:,} rows")
    return [
        f"{', '.join(names)}, and the plan assumes {share} of all"
        f"{' for each' if len(names) > 1 else ''}: merge rare labels with others, leave them out "
        "(data.other_labels: skip), or say the shares that anybody may know by "
        "data.label_proportions"
        for share, names in few.items()
    ]


def _others(values: dict[str, int] | None, hidden: int, key: str) -> list[tuple[str, str]]:
    """Return table rows of the values that a key does not list."""
    rows = [(f"{spelled(name)} (not in {key})", f"{n:,}") for name, n in (values or {}).items()]
    if hidden:
        many = f"{hidden:,} values, not shown; they may be texts: is it the right column?"
        rows.append((f"not in {key}", many))
    return rows

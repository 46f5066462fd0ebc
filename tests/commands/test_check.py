"""`dpray check` tells the owner what a run would find in the rows, and no text."""

from __future__ import annotations

import json
import re
import shlex
import stat
import subprocess
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpray
from dpray.cli import run_command
from dpray.commands.check import show_check
from dpray.evaluation.row_check import check_rows, quantiles
from dpray.terminal import Terminal

Job = Callable[..., list[str]]

NOTE = "Marlowe was here"


def note(text: Any = NOTE, label: Any = "a") -> dict[str, Any]:
    return {"text": text, "label": label}


@pytest.fixture
def job(tmp_path: Path, model_folder: str) -> Job:
    """Write rows and a configuration; return the arguments of `dpray check`."""

    def write(rows: list[Any], *more: str, method: str = "aug_pe") -> list[str]:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / "notes.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / "job.yaml").write_text(
            f"""
data: {{path: {tmp_path}/notes.jsonl, label: label, labels: [a, b], public_size: 500}}
privacy: {{epsilon: 8, delta: 1e-4, ledger: "sqlite:///{tmp_path}/ledger.db", dataset: notes}}
method: {{name: {method}}}
engine: {{kind: transformers, model: {model_folder}}}
output: {{path: {tmp_path}/run}}
"""
        )
        return [str(tmp_path / "job.yaml"), *more]

    return write


def test_rows_that_are_fine(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [note(), note("longer: " + NOTE, "b"), note("", "b")]
    assert run_command(["check", *job(rows, "data.empty=skip"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["records"], found["skipped"]) == (3, 2, 1)
    assert found["labels"] == {"a": 1, "b": 1} and found["other_labels"] == {}
    assert found["characters"]["shortest"] == 16 and found["characters"]["longest"] == 24
    assert found["types"] == {"text": {"text": 3}, "label": {"text": 3}}
    assert found["errors"] == [] and "not for release" in found["notice"]
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "notes.jsonl"}, (
        "nothing is charged or written"
    )


def test_long_texts_are_counted(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ("x" * length for length in (39, 40, 41))
    arguments = job([*map(note, texts)], "data.max_characters=40")
    assert run_command(["check", *arguments]) == 0
    assert "2 texts have data.max_characters or more" in capsys.readouterr().out


def test_every_bad_row_is_named_and_no_text_shown(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [
        note(), f'{{"text": "{NOTE}"', note(7), note("", "b"), note(label="c"), note(label=None),
        {"text": NOTE}, note(label="c"), note(label="b"),
    ]  # fmt: skip
    arguments = job(rows)
    assert run_command(["check", *arguments, "--json"]) == 2
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["refused"] and (found["rows"], found["records"]) == (9, 2)
    by_rows = {
        tuple(place.rpartition(" ")[2] for place in error["first"]): error["reason"]
        for error in found["errors"]
    }
    assert set(by_rows) == {("2",), ("3",), ("4",), ("5", "8"), ("6",), ("7",)}
    assert "not valid JSON" in by_rows[("2",)] and "no column" in by_rows[("7",)]
    assert found["other_labels"] == {"c": 2}
    assert {"key": "data.empty", "value": "skip", "why": "1 texts are empty"} in found["proposals"]
    assert run_command(["check", *arguments]) == 2
    shown_too = capsys.readouterr()
    for text in (*shown, *shown_too):
        assert "Marlowe" not in text
    assert "row 5" in shown_too.out and "nothing was charged" in shown_too.out


def test_a_label_column_that_holds_texts_is_not_listed(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [note(label=f"{NOTE}, and on the day after he was there again")]
    assert run_command(["check", *job(rows)]) == 2
    assert "Marlowe" not in "".join(capsys.readouterr())
    assert run_command(["check", *job([note()], "data.label=text")]) == 2
    assert "Marlowe" not in "".join(capsys.readouterr())


def checked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Return what a check finds, and what it shows on a terminal of wide lines."""
    found = dpray.check(dpray.load(*arguments))
    show_check(found, Terminal())
    return found, " ".join(capsys.readouterr().out.split())


def test_a_language_brings_advice(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    found, shown = checked(job([note()], "data.language=de"), capsys)
    [line] = found["advice"]
    assert line.startswith("embedder.model: ") and "for German set" in line
    assert f"change: {line}" in shown and "Public in prompts: German" in shown
    assert checked(job([note()], "data.language=en"), capsys)[0]["advice"] == []


def test_all_labels_that_the_configuration_lacks_are_named(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    chapters = [
        f"Chapter {n}: diseases of the system with number {n} in the list" for n in range(31)
    ]
    known = json.dumps(chapters[:8])
    rows = [note(label=label) for label in chapters for _ in range(3)] + [note(label=NOTE * 9)]
    found, shown = checked(job(rows, f"data.labels={known}"), capsys)
    assert found["other_labels"] == dict.fromkeys(chapters[8:], 3) and found["hidden_labels"] == 1
    assert all(f'"Chapter {n}:' in shown for n in range(8, 31))
    assert "Marlowe" not in shown
    wards = {f"ward {n}": 1 for n in range(40)}
    assert checked(job([note(label=ward) for ward in wards]), capsys)[0]["other_labels"] == wards
    found, shown = checked(job([note(label=f"{NOTE} {n}") for n in range(80)]), capsys)
    assert (found["other_labels"], found["hidden_labels"]) == (None, 80)
    assert "80 values, not shown" in shown and "Marlowe" not in shown


@pytest.mark.parametrize(
    ("keys", "rows", "said", "proposed"),
    [
        ("[a, Fenêtre]", ["Fene\u0302tre"], '"Fene\\u0302tre" (1 rows) is "Fenêtre" in '
         "data.labels: they differ in Unicode form", '["a", "Fene\\u0302tre"]'),
        ("[a, b]", ["a", "A ", "b"], '"A " (1 rows) is "a" in data.labels: they differ in blanks '
         "and case", None),
        ("[Heart, lungs]", ["Heart, lungs"], '"Heart, lungs" (1 rows) is several labels in '
         "data.labels; write it in quotes: 'data.labels=[\"Heart, lungs\", ...]'", None),
        ("[Skin]", ["Heart's, lungs"], shlex.quote('data.labels=["Heart\'s, lungs", ...]'), None),
        ('["1", "2"]', [1, 1], '1 (2 rows) is "1" in data.labels: they differ in type', None),
        ("[1, 2]", ["1.0"], '"1.0" (1 rows) is 1 in data.labels: they differ in the form of a '
         "number or date", '["1.0", 2]'),
        ("[2024-01-01]", ["2024-02-01"], '"2024-02-01" (not in data.labels)', None),
    ],
)  # fmt: skip
def test_the_nearest_label_is_named_with_the_difference(
    job: Job,
    capsys: pytest.CaptureFixture[str],
    keys: str,
    rows: list[Any],
    said: str,
    proposed: str | None,
) -> None:
    found, shown = checked(job([note(label=row) for row in rows], f"data.labels={keys}"), capsys)
    assert said in shown.replace("│", " ").replace("  ", " ") and "Marlowe" not in shown
    value = next((p["value"] for p in found["proposals"] if p["key"] == "data.labels"), None)
    assert value == proposed
    if proposed is not None:
        corrected = job([note(label=row) for row in rows], f"data.labels={proposed}")
        assert not dpray.check(dpray.load(*corrected))["refused"]
        assert shlex.quote(f"data.labels={proposed}") in shown


def test_the_roles_of_conversations_are_counted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"from": "human", "value": NOTE}, {"from": "gpt", "value": NOTE}]
    rows = [
        {"chat": said, "label": "a"},
        {"chat": [*said, {"role": "Tool", "content": None}], "label": "a"},
        {"chat": NOTE, "label": "a"},
    ]
    found, shown = checked(job(rows, "data.turns=chat"), capsys)
    assert found["roles"] == {"user": 2, "assistant": 2} and found["other_roles"] == {"Tool": 1}
    assert '"Tool" (not in data.roles) │ 1' in shown and "Marlowe" not in shown
    [proposal] = found["proposals"]
    value = '["system", "user", "assistant", "Tool"]'
    assert (proposal["key"], proposal["value"]) == ("data.roles", value)
    assert run_command(["check", *job(rows[:2], "data.turns=chat", f"data.roles={value}")]) == 0


def test_texts_in_base64_are_noticed(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    encoded = b64encode(NOTE.encode()).decode()
    texts = (encoded, f"data:text/plain;base64,{encoded}", NOTE)
    rows = [{"text": [{"data": text}], "label": "a"} for text in texts]
    found, shown = checked(job(rows, "data.text=text.0.data"), capsys)
    assert found["base64"] == {"text.0.data": 2} and not found["refused"]
    assert "2 texts of column 'text.0.data' are base64" in shown and "b64decode" in shown
    assert "Marlowe" not in shown and encoded not in shown
    assert checked(job([note()]), capsys)[0]["base64"] == {}


def test_keys_of_the_schema_that_records_miss_are_named(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {
        "type": "object",
        "required": ["title", "year", "by"],
        "properties": {
            "title": {"type": "string"},
            "year": {"type": "integer"},
            "by": {"type": "object", "properties": {"age": {"maximum": 99}}, "required": ["age"]},
        },
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    whole = {"title": NOTE, "year": 1994, "by": {"age": 3}}
    records = [
        whole, {"title": NOTE}, whole | {"year": NOTE}, whole | {NOTE: 1},
        whole | {"by": {"age": 200}}, whole | {"by": {}}, [NOTE],
    ]  # fmt: skip
    rows = [note(json.dumps(record)) for record in records] + [note()]
    keys = (f"method.schema={tmp_path}/schema.json", "method.batch_size=20")
    found, shown = checked(job(rows, *keys, method="dp_sgd"), capsys)
    named = {(each["key"], each["problem"]): each["records"] for each in found["misfit_keys"]}
    assert found["misfits"] == 7 and named == {
        ("year", "is missing"): 1, ("by", "is missing"): 1, ("year", "is not of type integer"): 1,
        ("the record", "does not fit `additionalProperties`"): 1, ("by.age", "is missing"): 1,
        ("by.age", "does not fit `maximum`"): 1, ("the record", "is not of type object"): 1,
        ("the record", "is not JSON"): 1,
    }  # fmt: skip
    assert "year is missing (1)" in shown and "Marlowe" not in shown


def test_more_errors_than_can_be_listed(job: Job) -> None:
    rows = [{"text": NOTE, f"column-{number}": 1} for number in range(200)] + [7] * 50
    found = dpray.check(dpray.load(*job(rows)))
    assert len(found["errors"]) <= 41
    assert sum(error["count"] for error in found["errors"]) == 250
    assert max(len(error["first"]) for error in found["errors"]) <= 10


def test_a_missing_column_is_one_error(job: Job) -> None:
    found = dpray.check(dpray.load(*job([{"txet": NOTE, "label": "a"}] * 3)))
    [error] = found["errors"]
    assert error["count"] == 3 and "did you mean 'txet'?" in error["reason"]


def test_write_keeps_it_for_the_owner_and_out_of_the_way_of_a_run(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["check", *job([note()]), "--write"]) == 0
    written = tmp_path / "run" / "private" / "check.json"
    assert json.loads(written.read_text())["rows"] == 1
    assert not written.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    assert not written.parent.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["private"]


def test_texts_that_dp_sgd_will_cut(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("method.batch_size=20", "method.max_length=40")
    arguments = job([note("ab"), note("word " * 30), note("word " * 30)], *keys, method="dp_sgd")
    assert run_command(["check", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [limit] = found["limits"]
    assert (limit["key"], limit["most"], limit["cut"]) == ("method.max_length", 40, 2)
    [proposal] = found["proposals"]
    assert proposal["key"] == "method.max_length" and proposal["value"] % 64 == 0
    assert limit["tokens"]["longest"] <= proposal["value"] < limit["tokens"]["longest"] + 64
    # The plan says that long texts are cut, and not how many: it opens no data.
    assert run_command(["plan", *arguments]) == 0
    planned = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "a private text is cut if it and its control code have more than 40" in planned


def test_texts_that_private_prediction_will_cut(job: Job) -> None:
    rows = [note("ab"), note("word " * 300)]
    keys = ("method.max_prompt_tokens=40", "method.max_tokens=8", "method.batch_size=20")
    found = dpray.check(dpray.load(*job(rows, *keys, method="private_prediction")))
    [limit] = found["limits"]
    assert (limit["key"], limit["most"], limit["cut"]) == ("method.max_prompt_tokens", 40, 1)
    assert [each["key"] for each in found["proposals"]] == ["method.max_prompt_tokens"]


def test_sections_are_proposed_for_long_texts(job: Job) -> None:
    """As many as a text has prompts of the longest kind; with them fewer are cut."""
    demo = Path(dpray.__file__).parent / "demo" / "model"
    rows = [note("ab"), *(note("The patient fell. " * 300) for _ in range(9))]
    keys = ("method.batch_size=20", f"engine.model={demo}", "method.max_tokens=64")
    limits = ("method.max_prompt_tokens=300", "method.clip_bound=1")
    config = dpray.load(*job(rows, *keys, *limits, method="private_prediction"))
    found = dpray.check(config)
    [proposal] = found["proposals"]
    longest = found["limits"][0]["tokens"]["longest"]
    assert proposal["key"] == "method.sections" and found["limits"][0]["cut"] == 9
    assert proposal["value"] * 300 >= longest > (proposal["value"] - 2) * 300
    more = (*keys, *limits, f"method.sections={proposal['value']}")
    again = dpray.check(dpray.load(*job(rows, *more, method="private_prediction")))
    assert again["limits"][0]["cut"] == 0
    assert again["limits"][0]["tokens"]["longest"] < 300


def test_the_longest_text_to_write_is_proposed_with_what_it_costs(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens of longer texts are paid for by fewer texts: both are named, for several sizes."""
    rows = [note("ab"), *(note("word " * 30) for _ in range(9))]
    keys = ("method.batch_size=20", "data.public_size=4000", "method.clip_bound=1")

    def found(*more: str) -> dict[str, Any]:
        return dpray.check(dpray.load(*job(rows, *keys, *more, method="private_prediction")))

    short = found("method.max_tokens=8", "method.max_records=2")
    sizes = {each["tokens"]: each for each in short["max_tokens"]}
    assert sizes[8]["longer"] == 9 and sizes[8]["texts"] == 2
    [best] = short["proposals"]
    assert best["key"] == "method.max_tokens" and sizes[best["value"]]["longer"] == 0
    assert best["why"] == "0% of the records are longer; it makes 2 texts, and 8 makes 2"
    # As many as are asked for come first.
    most = found("method.max_tokens=8")["max_tokens"][0]["texts"]
    assert found("method.max_tokens=8", f"method.max_records={most}")["proposals"] == []
    arguments = job(rows, *keys, "method.max_tokens=8", method="private_prediction")
    assert run_command(["check", *arguments]) == 0
    assert "texts made" in capsys.readouterr().out


def test_records_that_go_on_after_a_stop_string_are_told(job: Job) -> None:
    """A blank line at the end of a text, or in one record of many, is no reason."""

    def keys(*texts: str) -> list[str]:
        arguments = job([*map(note, texts)], r'method.stop=["\n\n"]', method="private_prediction")
        return [each["key"] for each in dpray.check(dpray.load(*arguments))["proposals"]]

    assert "method.stop" in keys("Dear Sir,\r\n\r\nthe card is lost.", "Thanks.\n")
    assert "method.stop" not in keys("The card\nis lost.\n\n", *["Thanks."] * 2)
    assert "method.stop" not in keys("Dear Sir,\n\nthe card is lost.", *["Thanks."] * 30)


def test_rows_of_labels_that_are_left_out_are_no_error(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*(note(label="a") for _ in range(20)), note(label="b"), note(label="c")]
    arguments = job(rows)
    refused = dpray.check(dpray.load(*arguments))
    proposals = {each["key"]: each["value"] for each in refused["proposals"]}
    assert refused["refused"] and proposals["data.other_labels"] == "skip"
    found = dpray.check(dpray.load(*arguments, "data.other_labels=skip"))
    assert not found["refused"] and (found["records"], found["skipped"]) == (21, 1)
    assert "data.other_labels" not in {each["key"] for each in found["proposals"]}
    # The rows of a label are shown next to the share that the plan assumes.
    assert run_command(["check", *arguments, "data.other_labels=skip"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert '"b" has 1 rows, and the plan assumes 50.0% of all: merge rare labels' in shown
    assert '"a" has' not in shown
    # Several such labels are one message.
    assert run_command(["check", *arguments, "data.labels=[a, b, c]"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert '"b" has 1 rows, "c" has 1 rows, and the plan assumes 33.3% of all for each' in shown
    assert shown.count("data.label_proportions") == 1


def test_labels_that_are_codes_are_told_to_have_no_meaning(job: Job) -> None:
    arguments = job([note(label=1), note(label=2)], "data.labels=[1, 2]")
    assert dpray.check(dpray.load(*arguments))["codes"] == ["1", "2"]
    words = "data.label_about={1: skin, 2: heart}"
    assert dpray.check(dpray.load(*arguments, words))["codes"] == []


FEW = ("method.max_tokens=8", "method.batch_size=20")


@pytest.mark.parametrize(
    ("method", "words", "keys"),
    [
        ("dp_sgd", 300, ("method.max_length=40", "engine.max_model_len=100")),
        ("private_prediction", 300, ("method.max_prompt_tokens=999",)),
        ("private_prediction", 30, ("method.max_prompt_tokens=40", "engine.max_model_len=128")),
        ("private_prediction", 300, ("engine.max_model_len=128",)),
    ],
)
def test_what_is_proposed_fits_the_context_and_gets_the_whole_of_it(
    job: Job, method: str, words: int, keys: tuple[str, ...]
) -> None:
    """The model has a context of 256 tokens; a row has its prompt, a text, and 8 tokens drawn."""
    rows = [note("ab"), note("word " * words), note("word " * words)]
    more = FEW if method == "private_prediction" else ("method.batch_size=20",)
    arguments = job(rows, *keys, *more, method=method)
    found = dpray.check(dpray.load(*arguments))
    better = [f"{each['key']}={each['value']}" for each in found["proposals"]]
    planned = dpray.plan(dpray.load(*arguments, *better)).lines()
    again = dpray.check(dpray.load(*arguments, *better))
    before, after = found["limits"][0], again["limits"][0]
    assert after["most"] >= before["most"] and after["cut"] <= before["cut"]
    # There is no better one of what is read.
    assert {each["key"] for each in again["proposals"]} <= {"method.max_tokens"}
    if words == 30:
        assert after["cut"] == 0
    else:
        assert after["most"] >= 256 - 64 - 64
    if method == "private_prediction":
        assert planned["texts read"].startswith(f"up to {after['most']} tokens of each")
        assert ("engine.max_model_len" in planned["texts read"]) == (
            "engine.max_model_len" in after["set_by"]
        )


def test_without_a_tokenizer_the_rest_is_found(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(model: str, length: int | None) -> Any:
        raise dpray.InputError("engine.model: owner/name is not on this machine")

    keys = ("method.batch_size=20",)
    config = dpray.load(*job([note()], *keys, method="dp_sgd"))
    monkeypatch.setattr("dpray.evaluation.row_check.TextCodec", none)
    found = check_rows(config)
    assert found["limits"] == [] and "not on this machine" in found["tokens_not_counted"]
    assert found["records"] == 1


def test_a_unit_that_all_records_share_is_doubted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [note() | {"consent": True, "person": number} for number in range(3)]
    doubt = "all records are of one unit, and a run reads no more of them than of one person"
    found, shown = checked(job(rows, "data.unit=consent"), capsys)
    assert found["units"]["units"] == 1 and doubt in shown
    assert doubt not in checked(job(rows, "data.unit=person"), capsys)[1]


def test_keys_that_differ_from_row_to_row_are_not_shown(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        note() | {"seen_by": {"Marlowe": 2}, "meta": {"ward": 1, "age": None}},
        note() | {"seen_by": {"Vargas": 1, "Moreau": 3}, "meta": {"ward": 2, "age": 40}},
    ]
    for key in ("data.text=ward", "data.text=seen_by", "data.text=meta"):
        found, shown = checked(job(rows, key), capsys)
        assert found["refused"] and "Marlowe" not in shown + json.dumps(found)
        assert ("meta.ward" in shown) == (key != "data.text=seen_by")


def test_encoding_and_delimiter_are_proposed(job: Job, tmp_path: Path) -> None:
    arguments = job([])
    (tmp_path / "notes.csv").write_bytes("text,label\nGröße,a\nMarlowe,b\n".encode("cp1252"))
    found = dpray.check(dpray.load(*arguments, f"data.path={tmp_path}/notes.csv"))
    assert [(p["key"], p["value"]) for p in found["proposals"]] == [("data.encoding", "cp1252")]
    (tmp_path / "notes.csv").write_text("text^label\nMarlowe^b\n")
    found = dpray.check(dpray.load(*arguments, f"data.path={tmp_path}/notes.csv"))
    assert [(p["key"], p["value"]) for p in found["proposals"]] == [("data.delimiter", "^")]
    found = dpray.check(
        dpray.load(*arguments, f"data.path={tmp_path}/notes.csv", "data.delimiter=^")
    )
    assert not found["refused"] and found["proposals"] == []


def proposals(*arguments: str) -> list[tuple[str, Any, str]]:
    found = dpray.check(dpray.load(*arguments))
    return [(each["key"], each["value"], each["why"]) for each in found["proposals"]]


def test_an_encoding_is_proposed_with_its_meaning_and_no_text(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.csv").write_bytes("text,label\nКлиент Marlowe,Вход\n".encode("cp1251"))
    arguments = job([], f"data.path={tmp_path}/notes.csv")
    found = proposals(*arguments)
    assert found[0] == ("data.encoding", "cp1251", "Cyrillic") and len(found) > 1
    assert {key for key, _, _ in found} == {"data.encoding"}
    # Labels that are configured are found with one of them.
    labels = "data.labels=[Вход, Счёт]"
    assert proposals(*arguments, labels) == [("data.encoding", "cp1251", "Cyrillic")]
    # An encoding that is configured, and makes nonsense of the words, is doubted.
    assert proposals(*arguments, labels, "data.encoding=cp1252")[0][1] == "cp1251"
    assert proposals(*arguments, labels, "data.encoding=cp1251") == []
    (tmp_path / "notes.csv").write_bytes("Текст,label\nMarlowe Клиент,a\n".encode("cp1251"))
    assert proposals(*arguments)[0] == ("data.encoding", "cp1251", "Cyrillic: Текст")
    assert run_command(["check", *arguments]) == 2
    said = "".join(capsys.readouterr())
    assert "proposal: data.encoding=cp1251: Cyrillic: Текст" in said
    assert "Клиент" not in said and "Marlowe" not in said


@pytest.mark.parametrize("sign", ["~", "&", ":"])
def test_a_proposal_can_be_pasted(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], sign: str
) -> None:
    (tmp_path / "notes.csv").write_text(f"text{sign}label\nMarlowe{sign}a\n")
    arguments = job([], f"data.path={tmp_path}/notes.csv")
    assert run_command(["check", *arguments]) == 2
    said = "".join(capsys.readouterr())
    [pasted] = [line for line in said.splitlines() if line.startswith("proposal: ")]
    assert pasted.startswith("proposal: '")
    [setting, *_] = shlex.split(pasted.removeprefix("proposal: ").replace(": the", " the"))
    echoed = subprocess.run(["bash", "-c", f"echo {pasted.split(': ')[1]}"], capture_output=True)
    assert echoed.stdout.decode().strip() == setting == f"data.delimiter={sign}"
    assert run_command(["check", *arguments, setting]) == 0


def test_a_delimiter_that_no_key_takes_is_not_proposed(job: Job, tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("text\x01label\nMarlowe\x01a\n")
    assert proposals(*job([], f"data.path={tmp_path}/notes.csv")) == []


@pytest.mark.parametrize("text", ["text", "body"])
def test_a_header_with_columns_that_are_used_is_no_title(
    job: Job, tmp_path: Path, text: str
) -> None:
    (tmp_path / "notes.csv").write_text("text,label\n" + "'Marlowe, she said',a\n" * 3)
    arguments = job([], f"data.path={tmp_path}/notes.csv", f"data.text={text}")
    assert dpray.check(dpray.load(*arguments))["refused"]
    assert proposals(*arguments) == []


def test_the_list_in_one_object_is_proposed_with_its_reason(job: Job, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text(json.dumps({"tickets": [note()]}))
    arguments = job([], f"data.path={tmp_path}/notes.json")
    assert proposals(*arguments) == [("data.records", "tickets", "the file is one object")]
    assert not dpray.check(dpray.load(*arguments, "data.records=tickets"))["refused"]


def test_titles_above_a_header_are_proposed(job: Job, tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("All notes\n\ntext,label\n" + "Marlowe,a\n" * 3)
    arguments = job([], f"data.path={tmp_path}/notes.csv")
    why = "lines above the header seem to be titles"
    assert proposals(*arguments) == [("data.skip_rows", 2, why)]
    assert not dpray.check(dpray.load(*arguments, "data.skip_rows=2"))["refused"]


def test_files_without_rows(job: Job, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "part-0.jsonl").write_text("")
    arguments = job([], f"data.path={tmp_path}/d")
    [error] = dpray.check(dpray.load(*arguments))["errors"]
    assert error["reason"].endswith("holds no rows")
    (tmp_path / "d" / "part-1.jsonl").write_text(json.dumps(note()))
    assert not dpray.check(dpray.load(*arguments))["refused"]


def test_quantiles() -> None:
    assert quantiles(Counter()) == {}
    assert quantiles(Counter({5: 1})) == dict.fromkeys(
        ("shortest", "half", "90%", "99%", "longest"), 5
    )
    assert list(quantiles(Counter(range(1, 101))).values()) == [1, 50, 90, 99, 100]


def test_people_are_counted_and_proposed(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [note(f"{NOTE} {n % 4}") | {"patient": n % 3} for n in range(9)]
    assert run_command(["check", *job(rows)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "9 of 9 records share their text with another" in shown
    assert "column 'patient' looks like a person: 3 values in 9 records, up to 3 with" in shown
    assert "proposal: data.unit=patient: if it names a person, one has up to 3 records" in shown
    rows += [note("more") | {"patient": "0"}, note("yet more") | {"patient": "00"}]
    assert run_command(["check", *job(rows, "data.unit=patient")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 units, at most 4 records of one; data.max_records_per_unit leaves 7 records" in shown
    assert "2 names of units differ only in case, blanks, leading zeros, thousands" in shown
    assert "proposal" not in shown and NOTE not in shown


def test_a_row_without_a_unit_is_found(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [note(f"{n}") | {"patient": who} for n, who in enumerate([7, "NULL", 8, "NULL"])]
    assert run_command(["check", *job(rows, "data.unit=patient")]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"error: 2 x column 'patient' .* \(notes\.jsonl, row 2; notes\.jsonl, row 4\)", shown
    ), shown

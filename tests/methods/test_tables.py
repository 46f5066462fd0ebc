"""A record may be several columns, or a conversation; the release then has them again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest

import dpray
from dpray.io.formats import Where
from dpray.io.table_schema import turns_schema
from dpray.methods.config import parse_config
from dpray.types import InputError

Settings = Callable[..., dict[str, Any]]

FILM = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
    },
    "required": ["title", "year"],
    "additionalProperties": False,
}
ROLES = ["patient", "nurse"]


def data(settings: Settings, file: Path, lines: list[str], **keys: Any) -> dict[str, Any]:
    file.write_text("".join(f"{line}\n" for line in lines))
    tree: dict[str, Any] = settings()["data"]
    return tree | {"path": str(file)} | keys


def table(settings: Settings, folder: Path, **keys: Any) -> dict[str, Any]:
    films = [f"film {number},{1950 + number},{'ab'[number % 2]}" for number in range(60)]
    lines = ["title,year,label", *films]
    return data(settings, folder / "films.csv", lines, **{"text": ["title", "year"]} | keys)


def conversations(settings: Settings, folder: Path, **keys: Any) -> dict[str, Any]:
    said = [
        [{"role": "patient", "content": f"It hurts {number}"}, {"role": "nurse", "content": "Ok"}]
        for number in range(60)
    ]
    lines = [json.dumps({"chat": turns, "label": "a"}) for turns in said]
    given = {"turns": "chat", "roles": ROLES} | keys
    return data(settings, folder / "chats.jsonl", lines, **given)


METHODS = {
    "private_prediction": {"batch_size": 5, "clip": "dclip", "clip_bound": 0.2, "max_tokens": 96,
                           "max_records": 6},
    "aug_pe": {"iterations": 1, "records": 6, "max_tokens": 96},
}  # fmt: skip


def rows_of(released: Any) -> list[Any]:
    # Of bytes: a text may hold other ends of lines.
    lines = (released.folder / "table.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def run(settings: Settings, data: dict[str, Any], name: str, **keys: Any) -> Any:
    tree = settings(data=data, method={"name": name} | METHODS[name] | keys)
    return dpray.run(parse_config(tree))


@pytest.mark.parametrize("name", METHODS)
def test_a_release_has_the_columns_with_their_types(
    settings: Settings, tmp_path: Path, name: str
) -> None:
    released = run(settings, table(settings, tmp_path), name, schema=FILM)
    rows = rows_of(released)
    assert len(rows) == len(released.records) == 6
    for row, record in zip(rows, released.records, strict=True):
        assert row.pop("label") == record["label"]
        assert row == json.loads(record["text"])
        jsonschema.validate(row, FILM)
    written = pq.read_table(released.folder / "table.parquet")
    assert written.column_names == ["label", "title", "year"]
    report = json.loads((released.folder / "privacy_report.json").read_text())
    assert report["table"] == {"rows": 6, "left_out": 0}


def test_conversations_have_a_schema_of_their_own(settings: Settings, tmp_path: Path) -> None:
    released = run(settings, conversations(settings, tmp_path), "private_prediction")
    rows = rows_of(released)
    assert len(rows) == 6
    for row in rows:
        assert row["chat"] and row["label"] in ("a", "b")
        jsonschema.validate(row["chat"], turns_schema(ROLES))
        assert {message["role"] for message in row["chat"]} <= {*ROLES}
    shown = json.loads((released.folder / "run.json").read_text())["config"]
    assert shown["method"]["schema"] == turns_schema(ROLES)


def test_what_is_no_record_of_a_table_is_counted(settings: Settings, tmp_path: Path) -> None:
    """Without a schema the demo's model writes words."""
    released = run(settings, table(settings, tmp_path), "private_prediction", max_tokens=4)
    texts = len(released.records)  # a batch whose four tokens show nothing has none
    assert 1 <= texts <= 6 and rows_of(released) == []
    report = json.loads((released.folder / "privacy_report.json").read_text())
    assert report["table"] == {"rows": 0, "left_out": texts}


def test_a_cell_of_csv_has_the_type_that_the_schema_says(
    settings: Settings, tmp_path: Path
) -> None:
    method = settings()["method"] | {"schema": FILM, "max_tokens": 96}
    row, where = {"title": "1994", "year": "1994"}, Where("a.csv", 1, typed=False)

    def text(**keys: Any) -> str:
        tree = settings(data=table(settings, tmp_path, **keys), method=method)
        return parse_config(tree).data.text_of(row, where)

    assert text() == '{"title": "1994", "year": 1994}'
    assert text(json_columns=["title"]) == '{"title": 1994, "year": "1994"}'
    assert text(json_columns=[]) == '{"title": "1994", "year": "1994"}'


def test_a_chain_has_the_schema_in_its_last_method(settings: Settings, tmp_path: Path) -> None:
    tree = settings(data=conversations(settings, tmp_path))
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("hurts\n")
    first = {"name": "dp_kps", "vocabulary": str(vocabulary)}
    del tree["method"]
    config = parse_config(tree | {"methods": [first, {"name": "private_prediction"}]})
    kps, prediction = config.method.model_dump()["methods"]
    assert (kps["schema"], prediction["schema"]) == (None, turns_schema(ROLES))


def test_a_schema_of_its_own_stays(settings: Settings, tmp_path: Path) -> None:
    shorter = turns_schema(ROLES) | {"maxItems": 2}
    method = {"name": "private_prediction", "schema": shorter}
    config = parse_config(settings(data=conversations(settings, tmp_path), method=method))
    assert config.method.model_dump()["schema"] == shorter


@pytest.mark.parametrize(
    ("keys", "schema", "why"),
    [
        ({"turns": "chat"}, None, r"data\.turns: give data\.text or data\.turns"),
        ({"text": ["title", "title"]}, None, "data.text: a column is given twice"),
        ({"json_columns": ["name"]}, None, r"data\.json_columns: have to be some of several"),
        ({"text": "title", "json_columns": ["title"]}, None, r"data\.json_columns: have to be"),
        ({"text": ["year", "title"]}, FILM, r"method\.schema: .*properties year, title.*in its or"),
        ({}, FILM | {"type": "array"}, r"method\.schema: has to be of an object"),
        ({}, FILM | {"required": ["year"]}, r"method\.schema: `required` .* lacks title"),
        ({}, {"regex": "a*"}, r"method\.schema: the records of a table take a JSON Schema"),
        ({"label": "year", "labels": [1990]}, None, r"data\.label: is a column of data\.text, too"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    settings: Settings, tmp_path: Path, keys: dict[str, Any], schema: Any, why: str
) -> None:
    method = settings()["method"] | {"schema": schema}
    with pytest.raises(InputError, match=f"^{why}"):
        parse_config(settings(data=table(settings, tmp_path, **keys), method=method))


def test_the_owner_sees_how_many_records_do_not_fit(settings: Settings, tmp_path: Path) -> None:
    """The films are of 1950 to 2009."""
    late = {"year": {"type": "integer", "minimum": 2000}}
    schema = FILM | {"properties": FILM["properties"] | late}
    method = {"name": "private_prediction"} | METHODS["private_prediction"] | {"schema": schema}
    config = parse_config(settings(data=table(settings, tmp_path), method=method))
    assert dpray.check(config)["misfits"] == 50
    chats = settings(data=conversations(settings, tmp_path), method__max_tokens=96)
    assert dpray.check(parse_config(chats))["misfits"] == 0
    assert dpray.check(parse_config(settings()))["misfits"] is None


def test_a_bad_cell_is_refused_with_its_row_and_not_its_text(
    settings: Settings, tmp_path: Path
) -> None:
    file = table(settings, tmp_path)
    Path(file["path"]).write_text("title,year,label\nfilm,1990,a\nfilm,about Anna,a\n")
    with pytest.raises(InputError) as error:
        run(settings, file, "private_prediction", schema=FILM)
    assert str(error.value).startswith("films.csv, row 2: column 'year' is not JSON; ")

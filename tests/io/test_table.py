"""Records of several columns and conversations as JSON texts, and back."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.formats import Where
from dpray.io.table import cells_of, object_text, role_of, turns_of, turns_text
from dpray.io.table_schema import check_properties, json_columns_of, turns_schema
from dpray.types import InputError

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "seen": {"type": ["boolean", "null"]},
        "genres": {"type": "array", "items": {"type": "string"}},
        "stars": {"enum": [1, 2, 3]},
        "size": {"enum": ["small", 3]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
COLUMNS = [*SCHEMA["properties"]]
TYPED, CSV = Where("a.jsonl", 3), Where("a.csv", 3, typed=False)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=5,
)


@given(st.fixed_dictionaries({"a": values, "b": values}))
def test_a_row_comes_back(row: dict[str, Any]) -> None:
    if text := object_text(row, ["b", "a"], [], TYPED):
        assert cells_of(text, ["b", "a"]) == row and [*json.loads(text)] == ["b", "a"]
    else:
        assert all(value is None or not value.strip() for value in row.values())


def test_cells_of_csv_have_the_types_of_the_schema() -> None:
    json_columns = json_columns_of(SCHEMA)
    assert json_columns == ["year", "seen", "genres", "stars"]
    row = dict(zip(COLUMNS, ["007", "1994", "", '["Drama"]', "3", "3", ""], strict=True))
    text = object_text(row, COLUMNS, json_columns, CSV)
    assert [*json.loads(text).values()] == ["007", 1994, None, ["Drama"], 3, "3", ""]
    # The cells of other files have types.
    assert json.loads(object_text(row, COLUMNS, json_columns, TYPED))["year"] == "1994"


@pytest.mark.parametrize(
    ("of", "may_be_text"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, False),  # pydantic's `int | None`
        ({"oneOf": [{"enum": [1]}, {"type": "string"}]}, True),
        ({"allOf": [{"$ref": "#/$defs/year"}]}, False),
        ({"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]}, True),
        ({"$ref": "#/$defs/year"}, False),
        ({"$ref": "#/$defs/loop"}, True),
        ({"$ref": "#/nowhere"}, True),
        (True, True),
    ],
)
def test_alternatives_and_references_say_whether_a_cell_is_json(of: Any, may_be_text: bool) -> None:
    defs = {
        "year": {"type": "integer"},
        "name": {"type": "string"},
        "loop": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/loop"}]},
    }
    schema = {"type": "object", "properties": {"a": of}, "$defs": defs}
    assert json_columns_of(schema) == ([] if may_be_text else ["a"])


def test_numbers_that_json_does_not_have_are_null() -> None:
    row = {"a": float("nan"), "b": float("inf"), "c": 1.5}
    assert object_text(row, ["a", "b", "c"], [], TYPED) == '{"a": null, "b": null, "c": 1.5}'
    assert object_text(row, ["a", "b"], [], TYPED) == ""


def test_a_value_has_the_same_text_in_every_process() -> None:
    """A record is named by its content."""
    row = {"day": date(2024, 3, 7), "sum": Decimal("1.50"), "image": object()}
    expected = '{"day": "2024-03-07", "sum": "1.50"}'
    assert object_text(row, ["day", "sum"], [], TYPED) == expected
    with pytest.raises(InputError, match="row 3: columns day, image do not fit into JSON"):
        object_text(row, ["day", "image"], [], TYPED)


@pytest.mark.parametrize("cell", ["about 1994", "NaN", "1e999", "01", '{"a":' * 100_000])
def test_a_cell_that_is_no_json_is_an_error_that_does_not_show_it(cell: str) -> None:
    with pytest.raises(InputError) as error:
        object_text({"year": cell}, ["year"], ["year"], CSV)
    assert str(error.value) == "a.csv, row 3: column 'year' is not JSON"


def test_a_row_is_empty_if_all_its_columns_are() -> None:
    assert object_text({"a": " ", "b": None}, ["a", "b"], ["b"], CSV) == ""
    assert object_text({"a": " ", "b": "0"}, ["a", "b"], ["b"], CSV) == '{"a": " ", "b": 0}'


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (SCHEMA | {"type": "array"}, "title"),
        ({"type": "object"}, "none"),
        ({"type": "object", "properties": {1: {}}}, "1"),  # a key of YAML that is no text
        ({"type": "object", "properties": {"b": {}, "a": {}}}, "b, a"),
    ],
)
def test_a_schema_has_the_columns_in_their_order(schema: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=rf"^method\.schema: .*properties a, b.* it has {found}"):
        check_properties(schema, ["a", "b"])
    fitting = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b", "a"]}
    check_properties(fitting, ["a", "b"])
    with pytest.raises(ValueError, match="`required` has to name every column; it lacks b,"):
        check_properties(fitting | {"required": ["a"]}, ["a", "b"])


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[1]", '{"c": 1}', '{"a": NaN}', '{"a": 1e999}', "{" * 10**5]
)
def test_a_text_of_another_form_is_no_row(text: str) -> None:
    assert cells_of(text, ["a", "b"]) is None


def test_a_column_that_a_schema_leaves_out_is_null() -> None:
    assert cells_of('{"a": 1, "c": 2}', ["a", "b"]) == {"a": 1, "b": None}


ROLES = ("user", "assistant")

NO_MESSAGE = (
    "a message in column 'messages' has no role (role or from), or its content (content, value, "
    "text, parts) is not a text"
)


def turns(value: Any, where: Where = TYPED) -> str:
    return turns_text({"messages": value}, "messages", ROLES, where)


def test_a_conversation_comes_back_without_other_keys() -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, Ümit"}]
    text = turns([message | {"id": 1} for message in said])
    assert turns_of(text) == said and "Ümit" in text
    assert turns(json.dumps(said), CSV) == text
    calls = [*said, {"role": "assistant", "content": None, "tool_calls": []}]
    assert turns_of(turns(calls)) == [*said, {"role": "assistant", "content": ""}]


def spellings(text: str) -> st.SearchStrategy[str]:
    cases = st.sampled_from([str.lower, str.upper, str.title])
    return cases.map(lambda case: case(text)) | st.just(f" {text}")


def contents(text: str) -> st.SearchStrategy[Any]:
    """Draw the ways in which files write a text of two lines."""
    first, second = text.split("\n")
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    return st.sampled_from(
        [
            text,
            [text],
            [first, second],
            [{"type": "text", "text": first}, picture, {"type": "output_text", "text": second}],
            [{"text": first}, {"inline_data": {"data": "x"}}, second],
        ]
    )


@given(st.data())
def test_messages_of_other_programs_are_read_alike(data: st.DataObject) -> None:
    names = {"user": ["user", "human"], "assistant": ["assistant", "gpt", "model"]}
    written, read = [], []
    for role in data.draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=4)):
        text = data.draw(st.sampled_from(["Hi\nthere", "Ümit\n7"]))
        role_key = data.draw(st.sampled_from(["role", "from"]))
        content_key = data.draw(st.sampled_from(["content", "value", "text", "parts"]))
        name = data.draw(st.sampled_from(names[role]).flatmap(spellings))
        others = data.draw(st.sampled_from([{}, {"weight": 1}, {"tool_calls": [], "value": None}]))
        written.append({**others, role_key: name, content_key: data.draw(contents(text))})
        read.append({"role": role, "content": text})
    assert turns_of(turns(written)) == read
    assert turns_of(turns(json.dumps(written), CSV)) == read
    if len({frozenset(message) for message in written}) == 1:
        by_key = {key: [message[key] for message in written] for key in written[0]}
        assert turns_of(turns(by_key)) == read


def test_a_tool_call_is_a_message_without_a_text() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": 1}]}
    for call in (calls, calls | {"content": None}, calls | {"content": []}):
        said = [{"role": "user", "content": "Hi"}, call]
        assert turns_of(turns(said)) == [said[0], {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("role", "roles", "found"),
    [
        ("human", ("human", "gpt"), "human"),
        ("GPT", ("human", "gpt"), "gpt"),
        ("user", ("User", "user"), "user"),
        ("USER", ("User",), "User"),
        ("gpt", ("user",), None),
        ("observation", ROLES, None),
        ("Human", None, "user"),
        ("Tool", None, "tool"),
    ],
)
def test_a_role_goes_by_its_name_in_the_configuration(
    role: str, roles: tuple[str, ...] | None, found: str | None
) -> None:
    assert role_of(role, roles) == found


@pytest.mark.parametrize("value", [None, [], "", " ", [{"role": "user", "content": " "}]])
def test_a_conversation_in_which_nothing_is_said_is_empty(value: Any) -> None:
    assert turns(value) == ""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"role": "user", "content": "Anna"}, "column 'messages' is not a list of messages"),
        (3, "column 'messages' is not a list of messages"),
        ("Anna", "column 'messages' is not JSON"),
        (["Anna"], NO_MESSAGE),
        ([{"content": "Anna"}], NO_MESSAGE),
        ([{"role": 1, "content": "Anna"}], NO_MESSAGE),
        ([{"role": "user", "content": 7}], NO_MESSAGE),
        ([{"role": "user", "content": {"text": "Anna"}}], NO_MESSAGE),
        ([{"role": "user", "content": [["Anna"]]}], NO_MESSAGE),
        ([{"role": "user", "content": [{"words": "Anna"}]}], NO_MESSAGE),
        ([{"role": "user", "content": [{"type": "text", "text": {"value": "Anna"}}]}], NO_MESSAGE),
        (
            [{"role": "Anna", "content": "x"}],
            "a role in column 'messages' is not one of data.roles",
        ),
    ],
)
def test_no_conversation_is_an_error_that_does_not_show_it(value: Any, why: str) -> None:
    with pytest.raises(InputError) as error:
        turns(value)
    assert str(error.value) == f"a.jsonl, row 3: {why}"


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '["a"]', '[{"role": "user"}, 3]'])
def test_a_text_of_another_form_is_no_conversation(text: str) -> None:
    assert turns_of(text) is None


def test_the_schema_of_conversations_takes_what_is_read() -> None:
    import jsonschema

    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    jsonschema.validate(json.loads(turns(said)), turns_schema(ROLES))
    jsonschema.validate(said[:1], turns_schema(ROLES[:1]))
    for other in ([{"role": "system", "content": "Hi"}] * 2, said[:1], []):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(other, turns_schema(ROLES))

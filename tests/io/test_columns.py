"""Values within lists and objects of a row, and what errors show of a row's keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.columns import column_of, dotted_names, plain_value, text_of
from dpray.io.formats import Where
from dpray.types import InputError

FIRST, LATER = Where("a.jsonl", 1), Where("a.jsonl", 2)

NAMES = st.text("abc", min_size=1, max_size=3)

ROWS = st.dictionaries(
    NAMES,
    st.recursive(
        st.text(max_size=3),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.dictionaries(NAMES, inner, min_size=1, max_size=2)
        ),
        max_leaves=6,
    ),
    min_size=1,
    max_size=3,
)


def leaves(value: Any, before: str = "") -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(before.rstrip("."), value)]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, each in inner for leaf in leaves(each, f"{before}{key}.")]


@given(ROWS)
def test_every_text_in_a_row_has_a_dotted_name(row: dict[str, Any]) -> None:
    for name, text in leaves(row):
        assert text_of(row, name, LATER) == text
    for name in dotted_names(row):
        column_of(row, name, LATER)


def test_an_entry_beyond_the_end_of_a_list_is_null() -> None:
    row = {"content": [{"data": "x"}], "pairs": [("k", "v")], "0": "named", "a.0": "dotted"}
    assert column_of(row, "content.1.data", FIRST) is None
    assert text_of(row, "content.7", FIRST) == ""
    assert column_of(row, "pairs.0.1", FIRST) == "v"  # as Arrow writes a map
    assert (column_of(row, "0", FIRST), column_of(row, "a.0", FIRST)) == ("named", "dotted")


@pytest.mark.parametrize("name", ["content.-1.data", "content.0.date", "content.data", "text.0"])
def test_a_name_that_leads_nowhere_is_an_error(name: str) -> None:
    row = {"content": [{"data": "Marlowe"}], "text": "Marlowe"}
    with pytest.raises(InputError) as wrong:
        column_of(row, name, FIRST)
    listed = "there are: content, content.0.data, text"
    assert f"no column '{name}'; {listed}" in str(wrong.value)
    assert "Marlowe" not in str(wrong.value)


def test_a_list_is_named_with_the_way_into_it() -> None:
    row = {"content": [{"attachment": {"data": "Marlowe"}}], "tags": ["Marlowe"], "note": {"b": 1}}
    for where, names in ((FIRST, "; there are: content.0.attachment.data"), (LATER, "")):
        with pytest.raises(InputError) as wrong:
            text_of(row, "content", where)
        way_in = f"is not a text but a list, whose first entry is content.0{names}"
        assert str(wrong.value) == f"{where}: column 'content' {way_in}"
        with pytest.raises(InputError, match=r"no number but a list, whose first entry is tags\.0"):
            plain_value(row["tags"], "tags", where)
    for role in ("role", "from"):
        with pytest.raises(InputError, match="not a text but a list of messages, which `turns`"):
            text_of({"chat": [{role: "user", "content": "Marlowe"}]}, "chat", LATER)
    with pytest.raises(InputError, match=r"is not a text but an object; there are: note\.b"):
        text_of(row, "note", FIRST)
    with pytest.raises(InputError, match=r"did you mean 'content\.0\.attachment\.data'\?"):
        text_of(row, "content.attachment.data", FIRST)


@pytest.mark.parametrize(
    "row",
    [
        {"Ann Ray": {"note": "x"}, "Bob Lee": {"note": "y", "age": 3}},
        {"Ann Ray": [{"note": "x"}], "Bob Lee": [{"note": "y"}, {"note": "z"}]},
        {"by_name": {"Ann Ray": {"note": "x"}, "Bob Lee": {"note": "y"}}, "id": 3},
        {"page": {"people": {"Ann Ray": {"note": "x"}, "Bob Lee": {"note": "y"}}}},
        {"ages": {f"{name} Ray": 3 for name in range(60)}},
        {"entries": [{"Ann Ray": {"note": "x"}, "Bob Lee": {"note": "y"}}]},
    ],
)
@pytest.mark.parametrize("name", ["note", "Ann Ra.note", "by_name", "ages", "page.people", "page"])
def test_keys_that_may_be_names_of_people_are_in_no_error(row: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as wrong:
        text_of(row, name, FIRST)
    shown = str(wrong.value).replace(f"'{name}'", "")
    assert "Ray" not in shown and "Bob" not in shown


def test_bytes_are_no_text_and_no_label() -> None:
    where = Where("a.parquet", 2)
    for read in (text_of, lambda row, name, place: plain_value(row[name], name, place)):
        with pytest.raises(InputError, match=r"^a.parquet, row 2: .* but bytes; write the column"):
            read({"label": b"private"}, "label", where)

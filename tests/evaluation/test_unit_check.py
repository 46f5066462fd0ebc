"""`dpray check` counts people: equal texts, units, and columns that look like a person."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.config.data import DataConfig
from dpray.evaluation.unit_check import People, looks_like_person
from dpray.io.formats import Where
from dpray.io.units import alike, unit_name
from dpray.types import InputError
from dpray.workers.rows import to_row

NAMES = st.sampled_from(["101", 101, 101.0, "101.0", "0101", " 101", "ann", "Ann", "bob", "７"])
ROWS = st.lists(st.tuples(st.sampled_from("abc"), NAMES), max_size=30)


def counted(rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    data = DataConfig(path="x", public_size=9, **settings)
    people = People(data)
    for number, row in enumerate(rows, start=1):
        where = Where("x.jsonl", number)
        record = to_row(where, row, data)
        assert record is not None
        people.add(where, row, record)
    return people.summary()


@given(ROWS, st.integers(1, 3))
def test_units_are_counted_as_a_run_takes_them(rows: list[tuple[str, Any]], most: int) -> None:
    made = [{"text": text, "who": who} for text, who in rows]
    found = counted(made, unit="who", max_records_per_unit=most)
    units = Counter(unit_name(who) for _, who in rows)
    forms = Counter(map(alike, units))
    assert found["units"] == {
        "units": len(units),
        "most_records": max(units.values(), default=0),
        "left_out": sum(max(count - most, 0) for count in units.values()),
        "alike": sum(count for count in forms.values() if count > 1),
    }
    texts = Counter(text for text, _ in rows)
    assert found["equal_texts"] == sum(count for count in texts.values() if count > 1)
    assert found["persons"] == []


@given(ROWS)
def test_a_column_of_a_person_is_found_if_a_value_is_repeated(rows: list[tuple[str, Any]]) -> None:
    made = [{"text": text, "patient_id": who, "n": 1} for text, who in rows]
    units = Counter(unit_name(who) for _, who in rows)
    found = counted(made)["persons"]
    if len(units) < 2 or max(units.values()) < 2:
        assert found == []
    else:
        [each] = found
        assert each["column"] == "patient_id" and each["values"] == len(units)
        assert (each["records"], each["most"]) == (len(rows), max(units.values()))


def test_a_cell_without_a_value_is_nobody() -> None:
    made = [{"text": "a", "user": None}, {"text": "b", "user": "NaN"}, {"text": "c"}]
    assert counted(made)["persons"] == []


@pytest.mark.parametrize(
    "name",
    [
        "user", "user_id", "userId", "UserID", "userid", "patient", "Patient No.", "patientId",
        "customer-number", "author", "email", "E-Mail", "from.email", "client_ref", "mrn",
        "subject_id", "student", "member_no", "Kunde", "Kundennummer", "account_id", "user.id",
        "reviewerID", "reviewer_name", "username", "sender", "phone", "reporter", "employee 2",
        "name",
    ],
)  # fmt: skip
def test_columns_of_a_person(name: str) -> None:
    assert looks_like_person(name)


@pytest.mark.parametrize(
    "name",
    [
        "text", "label", "id", "subject", "user_type", "customer_segment", "patient_age", "title",
        "email_body", "client_country", "date", "user_timezone", "user location", "file_name",
        "author_since", "note", "userReview", "", "—",
    ],
)  # fmt: skip
def test_other_columns(name: str) -> None:
    assert not looks_like_person(name)


def test_a_refused_row_has_no_unit() -> None:
    with pytest.raises(InputError, match=r"row 3: column 'who' has a cell without a value"):
        counted([{"text": "a", "who": who} for who in ("1", "2", "null")], unit="who")


@pytest.mark.parametrize(
    ("one", "other"),
    [("1,234", "1234"), ("1.234.567", "1,234,567"), ("1'234", " 1234"), ("A7", "a 7")],
)
def test_names_that_differ_in_form_only(one: str, other: str) -> None:
    assert unit_name(one) != unit_name(other) and alike(one) == alike(other)


@pytest.mark.parametrize(("one", "other"), [("1,23", "123"), ("1,234,5", "12345"), ("12", "1,2")])
def test_other_numbers_are_not_alike(one: str, other: str) -> None:
    assert alike(one) != alike(other)

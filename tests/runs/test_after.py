"""`data.after`: a run on the rows of a new quarter has its own charge, from the same budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.config.data import DataConfig
from dpray.evaluation.files import read_labelled, row_rule
from dpray.io.after import after
from dpray.io.columns import text_of
from dpray.io.formats import AS_RECOGNISED, Where
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.runs.released import _rule_shown
from dpray.types import Budget, BudgetRefused, InputError
from dpray.workers.rows import data_files, record_rows
from tests.workers.outcomes import lines


@pytest.mark.parametrize(
    ("rule", "cell", "kept"),
    [
        ("opened > 2026-09-30", "2026-10-01", True), ("opened>2026-09-30", "2026-09-30", False),
        ("opened > 2026-09-30", "2026-09-30T23:59:00Z", False),
        ("opened > 2026-09-30", datetime(2026, 10, 1, tzinfo=UTC), True),
        ("opened > 2026-09-30", date(2026, 9, 30), False), ("opened > 7", 8, True),
        ("opened > 7.5", " 7.5 ", False), ("opened > -1", "-0.5", True),
        # A point is a decimal point, however many digits follow.
        ("n > 12.5", "12.500", False), ("n > 12.499", "12.500", True), ("n > 7", "1.234", False),
        ("n > 12.5", "12.501", True), ("n > 12", "12.500", True), ("n > 12.500", 12.5, False),
        ("t > 0.1", 0.1, False), ("t > 0.1", 0.11, True),
        # Beyond 2^53 floating-point numbers skip whole ones.
        ("id > 9007199254740992", "9007199254740993", True),
        ("id > 9007199254740992", 9007199254740993, True),
        ("id > 1790000000000000100", 1790000000000000100, False),
    ],
)  # fmt: skip
def test_a_row_is_kept_by_its_own_cell(rule: str, cell: object, kept: bool) -> None:
    column = rule.split(">")[0].strip()
    assert after(rule).keeps({column: cell}, Where("a.csv", 2)) is kept


@pytest.mark.parametrize(
    ("rule", "cell"),
    [
        ("n > 2026-09-30", "01.10.2026"), ("n > 2026-09-30", ""), ("n > 2026-09-30", None),
        ("n > 2026-09-30", 20261001), ("n > 7", "seven"), ("n > 7", True), ("n > 7", None),
        ("n > 7", "1.234.567"), ("n > 7", "1,234"),
        ("n > 2026-09-30", "2026-13-01"), ("n > 2026-09-30", "2026-10-01junk"),
        ("n > 7", "9" * 10**6), ("n > 7", float("nan")), ("n > 7", ["8"]),
    ],
)  # fmt: skip
def test_another_cell_is_an_error_that_names_the_row_alone(rule: str, cell: object) -> None:
    with pytest.raises(InputError, match=r"row 2: column 'n'") as raised:
        after(rule).keeps({"n": cell}, Where("a.csv", 2))
    assert "seven" not in str(raised.value) and "999" not in str(raised.value)


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "n",
        "n > ",
        "> 3",
        "n > seven",
        "n < 3",
        "n > 30.9.2026",
        "n > 2026-00-00",
        "n > 2026-09-30T12:00:00",
    ],
)
def test_a_rule_has_a_column_and_a_number_or_a_day(rule: str) -> None:
    with pytest.raises(ValueError, match="COLUMN > VALUE"):
        DataConfig(path="a.jsonl", public_size=9, after=rule)


ROWS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=12)


@given(rows=ROWS, at=st.integers(0, 12), new=st.tuples(st.integers(0, 9), st.sampled_from("xyz")))
def test_a_row_more_moves_no_other(
    rows: list[tuple[int, str]],
    at: int,
    new: tuple[int, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Neighbouring files give neighbouring records: the same, and the new one if it is kept."""
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    data = DataConfig(path=str(path), public_size=9, after="n > 4")

    def records(some: list[tuple[int, str]]) -> list[tuple[str, str, int]]:
        path.write_text("".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in some))
        found = record_rows(data_files(data)[0], data) if some else iter(())
        return [(row["text"], row["unit"], row["rank"]) for row in found]

    without, more = records(rows), records([*rows[:at], new, *rows[at:]])
    assert [text for text, _, _ in without] == [text for n, text in rows if n > 4]
    assert [row for row in more if row[0] != new[1]] == without
    assert len(more) == len(without) + (new[0] > 4)


def test_two_quarters_are_two_charges_of_one_budget(
    settings: Callable[..., dict[str, Any]], sequences: dict[str, Any], tmp_path: Path
) -> None:
    words, file = tmp_path / "words.txt", tmp_path / "tickets.jsonl"
    words.write_text("spring\nsummer\nautumn\nwinter\n")

    def add(day: str, text: str) -> None:
        with file.open("a") as opened:
            for number in range(100):
                opened.write(json.dumps({"text": f"{text} {number}", "day": day}) + "\n")

    def quarter(name: str, rule: str | None) -> Any:
        tree = settings(**sequences)
        tree["data"] = {"path": str(file), "public_size": 100, "after": rule}
        tree["method"] |= {
            "vocabulary": str(words), "phrases_per_record": 1, "vocabulary_size": 1,
            "sequence_length": 1, "records": 5, "epsilon_vocabulary": None, "epsilon_kde": None,
        }  # fmt: skip
        tree["privacy"] |= {"epsilon": 40.0}
        tree["output"] = {"path": str(tmp_path / name)}
        return parse_config(tree)

    url = settings()["privacy"]["ledger"]
    with closing(Ledger.create_or_open(url)) as ledger:
        ledger.create_dataset("notes", Budget(80.5, 1e-3), "record", "add_or_remove_one")
    for _ in range(2):
        add("2026-06-01", "summer")
    first = methods.run(quarter("first", None))
    add("2026-09-01", "autumn")
    second = methods.run(quarter("second", "day > 2026-06-30"))
    assert second["public_inputs"]["after"] == "day > 2026-06-30"
    assert "after" not in first["public_inputs"]
    assert {row["text"] for row in lines(quarter("first", None))} == {"summer"}
    assert {row["text"] for row in lines(quarter("second", "day > 2026-06-30"))} == {"autumn"}
    with pytest.raises(BudgetRefused):
        methods.run(quarter("third", "day > 2026-09-30"))
    with closing(Ledger.open(url)) as ledger:
        account = ledger.account("notes")
    assert account is not None and len(account.charges) == 2
    assert account.spent.epsilon == pytest.approx(first["epsilon"] + second["epsilon"])


def test_an_evaluation_reads_the_rows_of_the_rule_only(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "a", "id": n} for n in range(6)]
    file = tmp_path / "real.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = partial(text_of, column="text")
    read = read_labelled(
        str(file), "--real", reader, "label", AS_RECOGNISED, row_rule("id > 3", None, "label")
    )
    assert [text for text, _ in read] == ["text 4", "text 5"]


def test_a_release_shows_no_column_that_looks_like_a_value() -> None:
    assert _rule_shown("opened > 2026-09-30") == "opened > 2026-09-30"
    assert _rule_shown("Mrs Miller, 12 Main Street, called > 5") == "(a column) > 5"
    assert _rule_shown(None) is None

"""Columns of tables are compared by total variation distances."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dpray.evaluation.columns import CATEGORIES, compare_columns, other_types
from dpray.report.tables import evaluation_tables


def texts(**columns: Any) -> list[str]:
    rows = zip(*columns.values(), strict=True)
    return [json.dumps(dict(zip(columns, map(plain, row), strict=True))) for row in rows]


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def films(seed: int, size: int = 2000, shift: float = 0.0, apart: bool = False) -> list[str]:
    """Old films are dramas, unless a film's year and genre have nothing to do with each other."""
    rng = np.random.default_rng(seed)
    year = 1900 + rng.integers(0, 100, size) + shift
    of = rng.permutation(year) if apart else year
    genre = np.where(of < 1950, "drama", "comedy")
    title = [f"title {number} {seed}" for number in range(size)]
    return texts(title=title, year=year, genre=genre)


def distances(made: list[str], other: list[str], tested: list[str]) -> Any:
    found = compare_columns(made, other, tested, seeds=3)
    assert found is not None
    return found


def test_records_of_the_same_kind_are_as_near_as_real_ones() -> None:
    found = distances(films(0), films(1), films(2))
    assert found["free_text"] == ["title"] and [*found["one_way"]] == ["year", "genre"]
    for column in (*found["one_way"].values(), *found["pairs"]):
        made, other = (column[f"{side}_to_real"]["mean"] for side in ("synthetic", "real"))
        assert 0 <= made < 0.12 and abs(made - other) < 0.04


def test_a_column_that_is_shifted_and_a_pair_that_is_torn_apart_are_seen() -> None:
    shifted = distances(films(0, shift=50), films(1), films(2))["one_way"]
    assert shifted["year"]["synthetic_to_real"]["mean"] == pytest.approx(0.5, abs=0.05)
    assert shifted["genre"]["synthetic_to_real"]["mean"] == pytest.approx(0.5, abs=0.05)
    torn = distances(films(0, apart=True), films(1), films(2))
    assert torn["one_way"]["genre"]["synthetic_to_real"]["mean"] < 0.08
    [pair] = torn["pairs"]
    assert pair["columns"] == ["year", "genre"]
    assert pair["synthetic_to_real"]["mean"] == pytest.approx(0.5, abs=0.08)
    assert pair["real_to_real"]["mean"] < 0.12


def test_what_is_no_object_has_no_column() -> None:
    real = texts(kind=["a", "b"] * 50)
    found = distances(["no JSON", "[1]"] * 50, real, real)
    assert found["one_way"]["kind"]["synthetic_to_real"]["mean"] == 1.0


def test_values_keep_their_types_and_rare_ones_go_together() -> None:
    real = texts(kind=[1, "1", True, None] * 25)
    one = distances(texts(kind=["1"] * 100), real, real)["one_way"]["kind"]
    assert one["synthetic_to_real"]["mean"] == pytest.approx(0.75, abs=0.1)
    many = [f"{number}" for number in [*range(CATEGORIES - 1)] * 9 + [*range(100, 120)]]
    real = texts(kind=many)
    rare = distances(texts(kind=["never seen"] * len(many)), real, real)["one_way"]["kind"]
    assert 0.8 < rare["synthetic_to_real"]["mean"] < 1.0


def test_a_column_of_other_types_is_named() -> None:
    made, real = (
        texts(year=[1990, 1991], kind=["a", "b"]),
        texts(year=["1990", "1"], kind=["a", "b"]),
    )
    assert other_types(made, real) == ["year"]
    assert other_types(real, made) == ["year"] and other_types(made, made) == []
    assert other_types(["no JSON"], ["nor this"]) == []


def test_texts_that_are_no_table_have_no_columns() -> None:
    plain_texts = ["a dog", "a cat"] * 9
    assert compare_columns(plain_texts, plain_texts, plain_texts, seeds=1) is None
    only_text = texts(note=[f"note {number}" for number in range(90)])
    found = distances(only_text, only_text, only_text)
    assert found["one_way"] == {} and found["pairs"] == []
    assert evaluation_tables({"columns": found}) == {}


def test_the_table_for_people_has_each_column_and_the_farthest_pair() -> None:
    found = distances(films(0, apart=True), films(1), films(2))
    table = evaluation_tables({"columns": found})["columns"]
    assert [row[0] for row in table.rows] == [
        "year", "genre", "mean of 1 pairs", "farthest pair: year and genre",
    ]  # fmt: skip


@pytest.mark.parametrize("large", [10**400, float("1e999")])
def test_a_number_that_is_no_finite_float_is_a_value(large: float) -> None:
    some = texts(a=[*range(30), large])
    assert [*distances(some, some, some)["one_way"]] == ["a"]

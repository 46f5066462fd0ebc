"""Attributes are measured once, charged with the training, and come with every text."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpray.config.config import Config
from dpray.config.data import RELEASED
from dpray.evaluation.row_check import check_rows
from dpray.io.formats import Where
from dpray.mechanisms.attributes import draw_values
from dpray.methods import registry as methods
from dpray.report.card import FIELDS
from dpray.types import InputError
from dpray.workers.rows import to_row
from tests.workers.outcomes import lines

pytestmark = pytest.mark.usefixtures("one_thread")

ATTRIBUTES = {
    "data__label_proportions": "measured",
    "data__attributes": {"stars": [1, 5], "city": ["x", "other"]},
    "privacy__epsilon_attributes": 12.0,
    "method__max_length": 60,
}
SMALL = {"method__epochs": 0.2, "method__records": 40}


@pytest.fixture(autouse=True)
def _attributed(records_file: Path) -> None:
    """Label a has 5 stars, b has 1; every third record is of city x, others of cities of their
    own."""
    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    rows = [
        row | {"stars": 5 if row["label"] == "a" else 1, "city": f"c{n}" if n % 3 else "x"}
        for n, row in enumerate(rows)
    ]
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_texts_are_written_for_measured_combinations(config: Callable[..., Config]) -> None:
    run = config(**ATTRIBUTES, **SMALL)
    report = methods.run(run)
    assert report["epsilon"] <= run.privacy.epsilon
    [histograms] = [m for m in report["mechanisms"] if m["name"] == "discrete_gaussian"]
    assert histograms["count"] == 3
    assert histograms["cost"]["epsilon_alone"] < report["epsilon"]
    records = lines(run)
    found = Counter((record["label"], record["stars"], record["city"]) for record in records)
    # Of sixty records, the counts have noise of standard deviation 1.
    usual = found["a", 5, "other"] + found["a", 5, "x"] + found["b", 1, "other"]
    assert usual + found["b", 1, "x"] > 0.8 * len(records) > 0
    assert "control" not in records[0]
    shares = report["sampling"]["control_values"]
    assert shares["city"]["other"] > shares["city"]["x"]
    assert shares["label"] == report["sampling"]["label_mix"]
    assert report["public_inputs"]["attributes"] == ATTRIBUTES["data__attributes"]
    assert "attributes: exact discrete" in report["noise_source"]


def test_a_value_that_is_not_listed_is_refused_or_other(
    config: Callable[..., Config],
) -> None:
    assert "is not one of" not in json.dumps(check_rows(config(**ATTRIBUTES)))
    run = config(**ATTRIBUTES | {"data__attributes": {"stars": [1, 5], "city": ["x", "y"]}})
    found = check_rows(run)
    assert "the value of column 'city' is not one of its public ones" in json.dumps(found)
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    row, where = {"text": "a", "label": "a", "stars": 5, "city": deep}, Where("a.jsonl", 2)
    data = config(**ATTRIBUTES).data
    found_row = to_row(where, row, data, data.public_values)
    assert found_row is not None and found_row["columns"]["city"] == "other"
    with pytest.raises(InputError, match="'city' is not one of its public ones"):
        to_row(where, row, run.data, run.data.public_values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__label_proportions": None}, "data.label_proportions: are measured together"),
        ({"data__attributes": {"stars": [1]}}, "a list of two or more values"),
        ({"data__attributes": {"stars": [1, 1.0]}}, "two are the same number"),
        ({"data__attributes": {"text": ["a", "b"]}}, "'text' is another column"),
        ({"data__attributes": {"tokens": [1, 2]}}, "'tokens' is another column"),
        ({"data__attributes": {c: list(range(60)) for c in "xyz"}}, "432,000 combinations"),
        ({"privacy__epsilon_attributes": 60.0}, "leaves nothing of privacy.epsilon"),
        ({"privacy__epsilon_attributes": 1e-9}, "greater than or equal to 0.001"),
        ({"privacy__delta": 0.0}, "takes a delta above 0"),
        ({"method__control_columns": {"stars": "Stars"}}, "has to name data.label"),
        ({"method__control_values": {"stars": {1: 0.5, 5: 0.5}}}, "whose shares are measured"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    config: Callable[..., Config], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as wrong:
        methods.make_plan(config(**ATTRIBUTES | changes))
    assert message in str(wrong.value)


def test_no_attribute_takes_a_field_of_the_release() -> None:
    assert {*FIELDS, "not_private"} == {*RELEASED}


def test_many_combinations_are_drawn_by_their_shares() -> None:
    """Each of 5,000 has less than one text, and no label loses its share."""
    joint = {
        (("label", str(n % 2)), ("x", str(n))): (1.5 if n % 2 else 0.5) / 5000
        for n in sorted(range(5000), key=lambda n: n % 2)
    }
    drawn = draw_values([joint], 400, np.random.default_rng(0))
    assert Counter(values["label"] for values in drawn) == {"0": 100, "1": 300}
    assert len({values["x"] for values in drawn}) == 400
    assert math.isclose(sum(joint.values()), 1)

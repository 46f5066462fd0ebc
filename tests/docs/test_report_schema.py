"""docs/privacy_report.schema.json is the schema of the model, and reports fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dpray.runs.privacy_report import PrivacyReport
from tests.report.reports import a_report

SCHEMA = Path(__file__).parents[2] / "docs" / "privacy_report.schema.json"


def test_the_published_schema_is_that_of_the_model() -> None:
    """`python -m tests.docs.test_report_schema` writes it."""
    assert json.loads(SCHEMA.read_text()) == PrivacyReport.model_json_schema()


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"of_later_versions": 1}, True),
        ({"epsilon": "4"}, False),
        ({"records": None}, False),
    ],
)
def test_a_report_fits_the_schema(changes: dict[str, Any], fits: bool) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert validator.is_valid(a_report(**changes)) is fits


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(PrivacyReport.model_json_schema(), indent=2) + "\n")

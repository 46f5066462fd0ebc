"""Damaged configurations, templates, schemas and ledger URLs: a value, or one plain line with exit
code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.settings_file import read_tree
from dpray.io.table_schema import read_schema_file
from dpray.io.template_file import packaged, read_template
from dpray.ledger.store import parse_url
from dpray.methods.config import load_config
from dpray.methods.private_prediction.prompts import PACKAGE, TEXTS
from dpray.types import InputError
from tests.fuzz.test_readers import DAMAGE, damaged

Settings = Callable[..., dict[str, Any]]


def plain(error: Exception, secret: str = "") -> None:
    said = str(error)
    assert "\n" not in said and len(said) < 2000 and not (secret and secret in said), said


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.yaml"


def test_a_damaged_configuration(file: Path, settings: Settings) -> None:
    whole = yaml.safe_dump(settings()).encode()

    @given(DAMAGE)
    def damage(changes: list[Any]) -> None:
        file.write_bytes(damaged(whole, changes))
        for read in (lambda: read_tree(file, []), lambda: load_config(file, [])):
            try:
                read()
            except InputError as error:
                plain(error)

    damage()


@pytest.mark.parametrize("name", packaged(PACKAGE))
def test_a_damaged_template(file: Path, name: str) -> None:
    whole = packaged(PACKAGE)[name].read_bytes()

    @given(DAMAGE)
    def damage(changes: list[Any]) -> None:
        file.write_bytes(damaged(whole, changes))
        try:
            read_template(str(file), PACKAGE, TEXTS, "user")
        except InputError as error:
            plain(error)

    damage()


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,9}$"}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_a_damaged_schema(tmp_path: Path) -> None:
    file, whole = tmp_path / "a.json", json.dumps(SCHEMA).encode()

    @given(DAMAGE)
    def damage(changes: list[Any]) -> None:
        file.write_bytes(damaged(whole, changes))
        try:
            assert isinstance(read_schema_file(str(file)), dict)
        except ValueError as error:  # pydantic makes it an error of method.schema
            plain(error)

    damage()


@given(DAMAGE, st.sampled_from(["sqlite:///home/me/ledger.db", "postgresql://me:Marlowe@h:5432/x"]))
def test_a_damaged_url_of_a_ledger(changes: list[Any], url: str) -> None:
    try:
        parse_url(damaged(url.encode(), changes).decode("latin-1"))
    except InputError as error:
        plain(error, "Marlowe")

"""The file of a schema is read once, into the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.io.table_schema import LONGEST_SCHEMA, read_schema_file
from dpray.methods.config import parse_config
from dpray.types import InputError

SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}


def test_a_file_is_its_content(tmp_path: Path, settings: Callable[..., Any]) -> None:
    file = tmp_path / "film.json"
    file.write_text("\ufeff" + json.dumps(SCHEMA), encoding="utf-8")
    assert read_schema_file(str(file)) == SCHEMA
    method = settings()["method"] | {"schema": str(file)}
    config = parse_config(settings(method=method))
    assert config.method.model_dump()["schema"] == SCHEMA
    file.unlink()
    assert parse_config(config.model_dump(mode="json")) == config, "nobody needs the file again"
    (tmp_path / "tree.lark").write_text('start: "(" start ")" | "x"')
    assert read_schema_file(str(tmp_path / "tree.lark")) == {"lark": 'start: "(" start ")" | "x"'}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("film.txt", b"{}", r"ends in \.json"),
        ("missing.json", None, "No such file"),
        ("list.json", b"[1]", "not a JSON object"),
        ("broken.json", b'{\n"a": }', "line 2: not valid JSON"),
        ("latin.json", b'{"a": "\xe9"}', "not valid UTF-8"),
        ("deep.json", b'{"a":' * 100_000, "nested too deeply|not valid JSON"),
        ("long.json", b" " * (4 * LONGEST_SCHEMA + 1), "more than"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_with_the_key(
    tmp_path: Path, settings: Callable[..., Any], name: str, content: bytes | None, why: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_schema_file(str(file))
    with pytest.raises(InputError, match=rf"^method\.schema: the file .*({why})"):
        parse_config(settings(method=settings()["method"] | {"schema": str(file)}))

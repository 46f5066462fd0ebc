"""YAML 1.2 with plain numbers: what a value without quotes is, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpray.io.yaml_text import YamlRefused, dump_yaml, parse_yaml

TEXTS = [
    "1:30", "0x10", "0o10", "012", "1_000", "0b11", "1,000", "inf", "nan", "yes", "no", "on", "off",
    "y", "n", "2020-01-01", "=", "<<", "1.2.3", "1e400", "-1e400",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_a_text(text: str):
    assert parse_yaml(f"key: {text}") == {"key": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4), ("-4", -4), ("0", 0), ("0.5", 0.5), (".5", 0.5), ("1.", 1.0), ("1e-6", 1e-6),
        ("1.0e-6", 1e-6), ("1E5", 1e5), (".inf", math.inf), ("-.INF", -math.inf), ("true", True),
        ("False", False), ("null", None), ("~", None), ("", None), ("'4'", "4"), ('"true"', "true"),
    ],
)  # fmt: skip
def test_numbers_truth_and_nothing(text: str, value: Any):
    [read] = parse_yaml(f"key: {text}").values()
    assert read == value and type(read) is type(value)


def test_what_is_not_a_number_is_left_to_the_keys():
    assert math.isnan(parse_yaml("key: .nan")["key"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "9" * 5000, "digits"),
        ("a: 1\nb: {key: secret, key: 2}", r'^line 2: found duplicate key "key"$'),
        ("a: 1\na: 2", r'^line 2: found duplicate key "a"$'),
        ("a: 1\n  b: 2", r"^line 2: "),
        ("a: &b [1]\nc: *b", r"^line 2: write the value itself in place of the alias"),
        ("[" * 20_000, r"^nested too deeply$"),
        ("a: 1\n---\nb: 2", r"another document"),
    ],
)
def test_what_is_refused(text: str, reason: str):
    with pytest.raises(YamlRefused, match=reason) as refused:
        parse_yaml(text)
    assert "secret" not in str(refused.value) and "\n" not in str(refused.value)


TREE: dict[str, Any] = {
    "texts": [*TEXTS, "1e-6", "4", "true", "~", "", "a: b", "é\n\tb", "x" * 300],
    "numbers": {"b": 1e-6, "a": 4, "half": 0.5, "none": None, "most": math.inf, "is": True},
}


def test_what_is_dumped_reads_the_same_in_both_versions_of_yaml():
    text = dump_yaml(TREE)
    assert parse_yaml(text) == TREE and list(parse_yaml(text)["numbers"]) == list(TREE["numbers"])
    assert yaml.safe_load(text) == TREE


ROOT = Path(__file__).parents[2]


OF_RAYS_LAUNCHER = {ROOT / "cluster" / name for name in ("aws.yaml", "gcp.yaml")}
"""Ray reads them, by YAML 1.1; they have merge keys, which 1.2 has not."""


@pytest.mark.parametrize("folder", ["dpray", "jobs", "cluster"])
def test_our_own_files_mean_the_same_in_both_versions(folder: str):
    for path in (ROOT / folder).rglob("*.yaml"):
        if path in OF_RAYS_LAUNCHER:
            continue
        for document in path.read_text().split("\n---\n"):
            assert parse_yaml(document) == yaml.safe_load(document), path

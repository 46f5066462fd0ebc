"""The label that a value was probably meant to be."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.commands.starter import read_labels
from dpray.io.near_labels import WAYS, nearest, spelled, spelled_list
from dpray.io.yaml_text import parse_yaml

LABELS = ("Physician", "Nursing/other", "Fenêtre", "Heart, lungs", "1", "true", "2024-01-01", "Ⅳ")

OTHERS = {
    "blanks": [
        lambda name: f"{name} ",
        lambda name: f"\t{name}",
        lambda name: name[:1] + "\u200b" + name[1:],
        lambda name: f"{name}\xa0",
        lambda name: name.replace(", ", ","),
    ],
    "case": [str.upper, str.lower, str.swapcase],
    "Unicode form": [
        lambda name: unicodedata.normalize("NFD", name),
        lambda name: unicodedata.normalize("NFKC", name),
    ],
    "the form of a number or date": [
        lambda name: {"1": "1.0", "2024-01-01": "2024-01-01 00:00:00"}.get(name, name)
    ],
}


@given(
    label=st.sampled_from(LABELS),
    way=st.sampled_from([*OTHERS]),
    number=st.integers(0, 4),
    second=st.sampled_from([*OTHERS]),
)
def test_a_label_is_found_with_its_difference(
    label: str, way: str, number: int, second: str
) -> None:
    changed = OTHERS[way][number % len(OTHERS[way])](label)
    if changed not in LABELS:
        assert nearest(changed, LABELS) == (label, way)
    twice = OTHERS[second][0](changed)
    if twice not in LABELS:
        found = nearest(twice, LABELS)
        assert found is not None and found[0] == label and found[1]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Physican", ("Physician", "spelling")),
        ("Nursing-other", ("Nursing/other", "spelling")),
        ("1, true", ("1", "comma")),
        ("fenetre ", None),
        ("2024-02-01", None),
        ("01", ("1", "the form of a number or date")),
        ("TRUE", ("true", "case")),
        ("PHYSICIAN ", ("Physician", "blanks and case")),
        ("Skin", None),
        ("", None),
        ("nan", None),
        ("9" * 400, None),
        ("1e999", None),
    ],
)
def test_the_nearest_label(name: str, near: tuple[str, str] | None) -> None:
    assert nearest(name, LABELS) == near


@given(st.text(max_size=8), st.text(max_size=8))
def test_any_two_names_can_be_compared(name: str, label: str) -> None:
    found = nearest(name, [label])
    assert found is None or found[0] == label
    for way in WAYS.values():
        assert way(way(name)) == way(way(way(name)))


@given(st.lists(st.text(st.characters(codec="utf-8")) | st.integers() | st.booleans(), min_size=1))
def test_a_spelled_label_is_read_again(labels: list[str | int | bool]) -> None:
    written = spelled_list(labels)
    assert parse_yaml(written) == read_labels(written) == labels
    assert all(json.loads(spelled(label)) == label for label in labels)
    assert all(c.isprintable() and not unicodedata.combining(c) for c in written if ord(c) < 65536)

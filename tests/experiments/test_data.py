"""The packaged data: reproducible, of the promised size and shape, and special."""

import json
from collections import Counter
from pathlib import Path

import pytest
from clinic_notes import LABELS
from make_demo import PRIVATE_RECORDS, PUBLIC_RECORDS, TEST_RECORDS, make_data

import dpray.demo

DATA = Path(dpray.demo.__file__).parent / "data"
SIZES = {
    "private.jsonl": PRIVATE_RECORDS,
    "test.jsonl": TEST_RECORDS,
    "public.jsonl": PUBLIC_RECORDS,
}


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def share(notes: list[dict[str, str]], words: str, label: str) -> float:
    return sum(words in note["text"] for note in notes if note["label"] == label) / sum(
        note["label"] == label for note in notes
    )


def test_the_script_makes_the_packaged_bytes(tmp_path: Path) -> None:
    make_data(tmp_path)
    for name in SIZES:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name


@pytest.mark.parametrize("name", SIZES)
def test_sizes_labels_and_fields(name: str) -> None:
    notes = rows(name)
    assert len(notes) == SIZES[name]
    assert all(set(note) == {"text", "label"} for note in notes)
    counts = Counter(note["label"] for note in notes)
    assert set(counts) == set(LABELS)
    assert min(counts.values()) > 0.45 * len(notes)


def test_no_text_is_in_two_places() -> None:
    texts = [note["text"] for name in SIZES for note in rows(name)]
    assert len(set(texts)) == len(texts)


def test_the_private_clinic_is_special() -> None:
    private, public = rows("private.jsonl"), rows("public.jsonl")
    for words, label in [
        ("riverside care home", "Urgent"),
        ("skin problem", "Urgent"),
        ("tightness on the stairs", "Routine"),
        ("Group class", "Routine"),
    ]:
        assert share(private, words, label) > share(public, words, label) + 0.25
        other = LABELS[1 - LABELS.index(label)]
        assert share(private, words, other) < 0.15

"""The track of new facts: reproducible data that alone tells the facts, and an honest count."""

import json
from pathlib import Path

import pytest
from facts import (
    SCHEMA,
    Question,
    found_names,
    make_data,
    stated,
    words_of,
)

ENTITIES, RECORDS = 6, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("facts")
    make_data(out, ENTITIES, RECORDS, public_records=180)
    return out


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(folder: Path) -> list[Question]:
    return [Question(**row) for row in rows(folder / "questions.jsonl")]


def test_the_files_are_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    make_data(tmp_path, ENTITIES, RECORDS, public_records=180)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_every_fact_has_its_records_and_no_text_comes_twice(folder: Path) -> None:
    private, asked = rows(folder / "private.jsonl"), questions(folder)
    assert len(asked) == ENTITIES * len(SCHEMA)
    assert len({row["text"] for row in private}) == len(private) == len(asked) * RECORDS
    for question in asked:
        holding = [
            row["label"]
            for row in private
            if {question.entity.casefold(), question.answer.casefold()} <= words_of(row["text"])
        ]
        assert holding == [question.attribute] * RECORDS


def test_public_records_name_no_private_company(folder: Path) -> None:
    private = {question.entity.casefold() for question in questions(folder)}
    public = rows(folder / "public.jsonl")
    assert not any(private & words_of(row["text"]) for row in public)
    assert found_names((row["text"] for row in public), ENTITIES)


def test_real_records_state_all_facts_and_public_ones_none(folder: Path) -> None:
    asked = questions(folder)
    assert all(stated(rows(folder / "private.jsonl"), asked))
    assert not any(stated(rows(folder / "public.jsonl"), asked))


def test_a_fact_is_stated_by_more_records_than_any_other_answer() -> None:
    question = Question("Bolunex", "seat", "Where?", "Lyon", ["Lyon", "Oslo"], ["Oslo", "Turin"])
    right, wrong, other = (
        {"label": "seat", "text": text}
        for text in ("bolunex lyon", "Bolunex: Oslo.", "Bolunex, Turin")
    )
    labelled = {"label": "seat of Bolunex", "text": "is in Lyon"}
    assert stated([right], [question]) == stated([labelled], [question]) == [True]
    assert stated([right, right, wrong, other], [question]) == [True]
    assert stated([right, wrong], [question]) == [False]
    assert stated([], [question]) == [False]
    apart = [{"label": "seat", "text": text} for text in ("lyon", "bolunex", "Bolunexes in Lyon")]
    assert stated(apart, [question]) == [False]

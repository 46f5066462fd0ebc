"""The track of new facts: reproducible data that alone tells the facts, and an honest count."""

import json
from pathlib import Path

import pytest
from drugs import (
    SCHEMA,
    Fact,
    World,
    by_fact,
    fact_label,
    found_names,
    make_data,
    questions,
    sentences,
    statements,
)
from drugs_score import share_stated

DRUGS, NOTES = 6, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drugs")


@pytest.fixture(scope="module")
def made(folder: Path) -> World:
    return make_data(folder, DRUGS, NOTES)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stated(notes: list[dict[str, str]]) -> list[Fact]:
    return [fact for note in notes for _, fact in statements(note["text"])]


def test_the_files_are_the_same_every_time(folder: Path, made: World, tmp_path: Path) -> None:
    assert make_data(tmp_path, DRUGS, NOTES) == made
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_every_note_states_one_fact_and_no_text_comes_twice(folder: Path, made: World) -> None:
    private = rows(folder / "private.jsonl")
    assert len(made.private) == DRUGS * len(SCHEMA)
    assert len({row["text"] for row in private}) == len(private) == len(made.private) * NOTES
    assert sorted(stated(private)) == sorted(made.private * NOTES)
    assert [fact.attribute for fact in stated(private)] == [row["label"] for row in private]


def test_public_notes_name_no_private_drug(folder: Path, made: World) -> None:
    public = rows(folder / "public.jsonl")
    assert {*stated(public)} == {*made.public}
    assert not {fact.drug for fact in made.public} & {*made.drugs}
    assert share_stated(stated(public), {*made.private}) == 0


def test_names_are_found_and_notes_labelled_by_fact(folder: Path, made: World) -> None:
    private = rows(folder / "private.jsonl")
    assert sorted(found_names((row["text"] for row in private), DRUGS)) == made.drugs
    known = made.drugs[:2]
    labelled = list(by_fact(private, known))
    assert {row["label"] for row in labelled} == {fact_label(d, a) for d in known for a in SCHEMA}
    assert len(labelled) == 2 * len(SCHEMA) * NOTES


def test_a_fact_is_stated_more_often_than_any_other_value() -> None:
    right, wrong = Fact("Dabamab", "effect", "rash"), Fact("Dabamab", "effect", "hives")
    assert share_stated([right, right, wrong], {right}) == 1
    assert share_stated([right, wrong], {right}) == share_stated([], {right}) == 0
    assert share_stated([right], {right, Fact("Dabamab", "code", "B100")}) == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "Dabamab.  Caused rash.",  # not in one sentence
        "Dabamab caused rash and hives.",  # two values
        "Dabamab and Debamab caused rash.",  # two drugs
        "Dabamabs caused rash.",
    ],
)
def test_a_sentence_without_one_drug_and_one_value_states_nothing(text: str) -> None:
    assert list(statements(text)) == []


def test_the_public_forms_make_every_sentence(folder: Path, made: World) -> None:
    known = [fact.value for fact in made.private]
    every = set(sentences(made.drugs, known))
    for row in rows(folder / "private.jsonl"):
        [(sentence, _)] = statements(row["text"])
        assert sentence in every


def test_a_question_has_its_answer_among_its_choices(made: World) -> None:
    for fact, asked in zip(made.private, questions(made.private), strict=True):
        assert asked.answer == fact.value and asked.choices.count(fact.value) == 1
        assert len(set(asked.choices)) == 4 and fact.drug in asked.question

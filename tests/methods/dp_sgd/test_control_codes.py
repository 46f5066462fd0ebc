"""Records become units of texts with control codes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpray.config.config import Config
from dpray.engines.base import PlainPrompt
from dpray.engines.text import TextCodec
from dpray.mechanisms.attributes import draw_values
from dpray.methods import registry as methods
from dpray.methods.dp_sgd.control_codes import (
    ControlCodes,
    control_codes,
    text_encoder,
    unit_texts,
)  # fmt: skip
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.dp_sgd.training.step import TrainingText
from dpray.types import InputError
from dpray.workers.rows import data_files, record_rows
from tests.workers.outcomes import lines

pytestmark = pytest.mark.usefixtures("one_thread")


def texts_of(
    config: Config, terms: dict[str, list[list[str]]] | None = None
) -> list[tuple[str, TrainingText]]:
    assert isinstance(config.method, DpSgdSettings)
    encoder = text_encoder(config.engine, config.method)
    codes = control_codes(config.data, config.method).with_sequences(terms or {}, "label")
    [part] = data_files(config.data)
    rows = record_rows(part, config.data, codes.values, by_place=True)
    texts = unit_texts(rows, encoder, codes)
    return [(unit, text) for unit, _, text in texts]


STARS = {
    "method__control_columns": {"label": "Kind", "stars": "Review Stars"},
    "method__control_values": {"stars": {5.0: 0.25, 1.0: 0.75}},
}


def test_control_codes_are_the_papers() -> None:
    codes = ControlCodes({"type": "Business Type", "stars": "Review Stars"}, {})
    code = codes.code({"stars": "5.0", "type": "Restaurants"})
    assert code == "Business Type: Restaurants | Review Stars: 5.0\n"
    assert ControlCodes({}, {}).code({}) == ""


TERMED = ControlCodes({"label": "Kind"}, {}).with_sequences(
    {"a": [["rash", "sore throat"], ["fever"]], "b": [["itch"]]}, "label"
)


def test_a_code_names_the_released_terms_that_its_text_has() -> None:
    """They follow from the text and from what was released: other texts change nothing."""
    terms_in = TERMED.term_finder()
    assert terms_in("An ITCH, a sore  throat; then a rash") == ["itch", "sore throat"]
    assert terms_in("nothing of it") == []
    assert ControlCodes({}, {}).term_finder()("an itch") == []
    assert TERMED.code({"label": "a"}, ["itch", "rash"]) == "Kind: a | Terms: itch, rash\n"


def test_terms_that_leave_a_text_no_room_are_left_out() -> None:
    values, terms = {"label": "a"}, ["one", "two", "three"]
    whole = TERMED.code(values, terms)
    enough = 2 * (len(whole) + 1)  # a token for each letter, and one for the start
    assert TERMED.fitting(values, terms, list, enough) == whole
    assert TERMED.fitting(values, terms, list, enough - 2) == TERMED.code(values, terms[:2])
    assert TERMED.fitting(values, terms, list, 2) == TERMED.code(values)


def test_texts_are_written_with_the_sequences_of_their_label_in_turn() -> None:
    first, other, second, again, none = TERMED.draw_terms(
        ["a", "b", "a", "a", "c"], np.random.default_rng(0)
    )
    assert {first, second} == {("rash", "sore throat"), ("fever",)} and again == first
    assert other == ("itch",) and none == ()


def test_texts_without_a_label_have_the_sequences_of_all_labels() -> None:
    many = {label: [[f"{label}{number}"] for number in range(50)] for label in "abcd"}
    codes = ControlCodes({}, {}).with_sequences(many, "label")
    labels = Counter(terms[0][0] for terms in codes.draw_terms([""] * 40, np.random.default_rng(0)))
    assert set(labels) == set("abcd")


def test_a_sequence_names_a_term_once_as_a_training_code_does() -> None:
    codes = TERMED.with_sequences({"a": [["rash", "fever", "rash"]]}, "label")
    assert codes.draw_terms(["a"], np.random.default_rng(0)) == [("rash", "fever")]
    assert codes.term_finder()("rash, fever, itch") == ["rash", "fever"]


def test_the_longest_code_is_found_as_a_whole() -> None:
    codes = ControlCodes({"kind": "Kind"}, {"kind": {"aa": 0.5, "b": 0.5}})
    # In its code the value of fewer letters has more tokens, as where a tokenizer splits it.
    assert codes.longest(lambda code: 9 if "b" in code else 1) == "Kind: b\n"
    assert codes.longest(len, ["x"]) == "Kind: aa | Terms: x\n"


def test_training_texts_begin_with_the_terms_that_they_have(
    config: Callable[..., Config], records_file: Path
) -> None:
    row = json.loads(records_file.read_text().splitlines()[0]) | {"text": "a cough and a fever"}
    records_file.write_text(json.dumps(row) + "\n")
    terms = {"a": [["fever", "cough"]], "b": [["itch"]]}
    decode = TextCodec(config().engine.model, None).tokenizer.decode

    def code(max_length: int) -> str:
        [(_, text)] = texts_of(config(method__max_length=max_length), terms=terms)
        assert text.given < max_length
        return decode(text.ids[1 : text.given])

    whole, kind = code(200), f"label: {row['label']}"
    assert whole == f"{kind} | Terms: cough, fever\n"
    shorter = {code(length) for length in range(24, 72, 4)}
    assert shorter == {f"{kind}\n", f"{kind} | Terms: cough\n", whole}


def test_control_columns_stand_in_every_code(
    config: Callable[..., Config], records_file: Path
) -> None:
    rows = [json.loads(line) | {"stars": 5.0} for line in records_file.read_text().splitlines()]
    rows[7]["stars"] = 1.0
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = config(**STARS, method__epochs=0.2, method__records=8, method__max_length=40)
    codec = TextCodec(run.engine.model, None)
    texts = texts_of(run)
    assert len(texts) == 60
    code = "Kind: b | Review Stars: 1.0\n"
    text = texts[7][1]
    assert text.ids[: text.given] == codec.encode(PlainPrompt(code))
    assert codec.tokenizer.decode(text.ids[1:]).startswith(code)
    methods.run(run)
    records = lines(run)
    stars = [record["control"]["stars"] for record in records]
    assert len(records) == 8 and (stars.count("5.0"), stars.count("1.0")) == (2, 6)

    rows[3]["stars"] = 4.0
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"row 4: the value of column 'stars'"):
        texts_of(run)


def test_a_code_begins_as_in_training_where_there_is_no_bos(config: Callable[..., Config]) -> None:
    run = config()
    codec = TextCodec(run.engine.model, None)
    assert codec.encode(PlainPrompt("label: a\n"))[0] == codec.tokenizer.bos_token_id == 1
    codec.tokenizer.bos_token = None
    assert codec.encode(PlainPrompt("label: a\n"))[0] == codec.tokenizer.eos_token_id == 2


def test_a_unit_brings_its_records_together(
    config: Callable[..., Config], records_file: Path
) -> None:
    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    rows = [row | {"user": f"u{i % 7}"} for i, row in enumerate(rows)]
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows + rows[:1]))
    run = config(data__unit="user", data__max_records_per_unit=4)
    texts = texts_of(run)
    assert len(texts) == 61 and {unit for unit, _ in texts} == {f"u{i}" for i in range(7)}
    # Without units, a record that is there twice is two.
    assert len({unit for unit, _ in texts_of(config())}) == 61


def test_columns_and_combinations_are_drawn_as_their_shares_say(
    config: Callable[..., Config],
) -> None:
    combinations = [
        {"share": 0.75, "values": {"label": "a", "stars": 5}},
        {"share": 0.25, "values": {"stars": 1, "label": "b"}},
    ]
    columns = {"label": "Kind", "stars": "Stars", "city": "City"}
    plan: Any = methods.make_plan(
        config(
            method__control_columns=columns,
            method__control_values={"city": {"x": 0.2, "y": 0.8}},
            method__control_combinations=combinations,
            method__max_length=60,
        )
    )
    assert plan.shares == {
        "label": {"a": 0.75, "b": 0.25}, "stars": {"5": 0.75, "1": 0.25},
        "city": {"x": 0.2, "y": 0.8},
    }  # fmt: skip
    drawn = draw_values(plan.groups, 100, np.random.default_rng(0))
    found = Counter((values["label"], values["stars"], values["city"]) for values in drawn)
    assert {key[:2] for key in found} == {("a", "5"), ("b", "1")}
    assert found["a", "5", "x"] + found["a", "5", "y"] == 75
    assert found["a", "5", "x"] + found["b", "1", "x"] == 20
    assert 3 <= found["a", "5", "x"] <= 18


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"share": 1.0, "values": {"label": "c"}}], "c is not one of data.labels"),
        ([{"share": 1.0, "values": {"label": "a"}}], "no combination has the label b"),
        ([{"share": 0.5, "values": {"label": "a"}}], "their shares sum to 1"),
        ([{"share": -1, "values": {"label": "a"}}], "Input should be greater than or equal to 0"),
        ([{"share": 1.0, "values": {}}], "Dictionary should have at least 1 item"),
        ([{"share": 0.5, "values": {"label": "a"}}] * 2, "a combination is there twice"),
        ([{"share": 0.5, "values": {"label": "a"}}, {"share": 0.5, "values": {"x": "a"}}],
         "name the same columns in all of them"),
        ([{"share": 1.0, "values": {"stars": 1}}], "stars is in control_values, too"),
        ([{"share": 1.0, "values": {"other": 1}}], "other is not in method.control_columns"),
    ],
)  # fmt: skip
def test_wrong_combinations_name_the_key(
    config: Callable[..., Config], changes: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=r"^method\.control_") as wrong:
        methods.make_plan(config(**STARS, method__control_combinations=changes))
    assert message in str(wrong.value)


def test_the_shares_of_labels_are_in_one_place(config: Callable[..., Config]) -> None:
    both = {
        "method__control_combinations": [{"share": 1.0, "values": {"label": "a"}}],
        "data__label_proportions": {"a": 0.5, "b": 0.5},
    }
    with pytest.raises(InputError, match=r"whose shares data\.label_proportions has too"):
        methods.make_plan(config(**both))
    # The label is in no code.
    both |= {"data__label_proportions": None, "method__control_columns": {"stars": "Stars"}}
    both |= {"method__control_values": {"stars": {1: 1.0}}}
    with pytest.raises(InputError, match=r"label is data\.label; its shares"):
        methods.make_plan(config(**both))

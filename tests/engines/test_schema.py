"""Schemas: what they allow, how a text ends in time, and what is refused before a run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import dpray
from dpray.engines.schema.forms import forced_tokens, most_free_tokens, vocabulary
from dpray.engines.schema.pattern_text import MOST_PATTERNS, pattern_texts
from dpray.engines.schema.schema import Form, Schema, read_schema
from dpray.engines.schema.token_mask import TokenMask, Vocabulary, first_mask, fitted
from dpray.types import InputError
from tests.engines.schemas import FILM, VISIT

DEMO = str(Path(dpray.__file__).parent / "demo" / "model")
V = json.loads(Path(DEMO, "config.json").read_text())["vocab_size"]

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["of"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


CONTACT = {
    "type": "object",
    "properties": {
        "mail": {"type": "string", "pattern": "\\S@\\S+\\.(com|org)$"},
        "codes": {
            "type": "array",
            "items": {"type": "string", "pattern": "[A-Z]{2}7"},
            "minItems": 2,
        },
        "said": {"type": "string", "pattern": 'a"b'},
    },
    "required": ["mail", "codes", "said"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Vocabulary:
    return vocabulary(DEMO, V)


def drawn(mask: TokenMask, demo: Vocabulary, rng: np.random.Generator) -> tuple[str, int]:
    """Draw a text at random among what the mask allows; return it and the number of its tokens."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != demo.eos:
        token = mask.forced()
        if token is None:
            token = int(rng.choice(np.flatnonzero(mask.allowed)))
        tokens.append(mask.take(token))
    return demo.tokenizer.decode_bytes(tokens[:-1]).decode(), len(tokens)


@pytest.mark.parametrize(
    "schema", [FILM, VISIT, TREE, CONTACT], ids=["film", "visit", "tree", "contact"]
)
@pytest.mark.parametrize("room", [0, 1, 5, 60])
def test_every_text_is_valid_however_few_tokens_it_has(
    demo: Vocabulary, schema: dict[str, Any], room: int
) -> None:
    read, rng = read_schema(schema), np.random.default_rng(room)
    shortest = len(TokenMask(read, demo, 300).ending)
    for _ in range(3):
        text, count = drawn(TokenMask(read, demo, shortest + room), demo, rng)
        jsonschema.validate(json.loads(text), schema)
        assert count <= shortest + room


@pytest.mark.parametrize(
    "pattern", ["foo", "foo$", "^a.*foo", "z{70}", r"\d{3}[^\d]", "(bar|o)+!", r"^.+@.+\.\w{2,}$"]
)
def test_the_shortest_ending_gets_out_of_a_loop_that_takes_any_byte(
    demo: Vocabulary, pattern: str
) -> None:
    mask = TokenMask(read_schema({"type": "string", "pattern": pattern}), demo, 200)
    text = json.loads(demo.tokenizer.decode_bytes(mask.ending[:-1]))
    assert re.search(pattern, text) and len(text) <= 70
    for token in demo.tokenizer.tokenize_str('"a word before f'):
        mask.take(token)
    assert not mask.was_closed


@pytest.mark.parametrize(
    "pattern", ["(", "(?=a)b", "a{9999}{9999}", "[^\\x00-\\U0010ffff]", r"\pL", "[[a]]", "(" * 5000]
)
def test_a_pattern_that_python_does_not_read_gives_no_text(pattern: str) -> None:
    for kind, text in (("regex", pattern), ("json", json.dumps({"pattern": pattern}))):
        pattern_texts(Schema(kind, text))


def test_as_many_patterns_as_are_looked_at() -> None:
    schema = {"enum": ["x"], "of": [{"pattern": f"{number}-"} for number in range(10**4)]}
    assert pattern_texts(Schema("json", json.dumps(schema)))[-1] == f"{MOST_PATTERNS - 1}-"


def test_a_pattern_beside_a_date_keeps_to_its_years(demo: Vocabulary) -> None:
    schema = {"type": "string", "format": "date", "pattern": "^(19|20)"}
    for seed in range(8):
        mask, rng = TokenMask(read_schema(schema), demo, 20), np.random.default_rng(seed)
        assert 1900 <= int(json.loads(drawn(mask, demo, rng)[0])[:4]) < 2100


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"choices": ["urgent", "soon"]}, {"urgent", "soon"}),
        ({"regex": "(yes|no)!"}, {"yes!", "no!"}),
        ({"lark": 'start: "(" start ")" | "x"'}, {"x", "(x)", "((x))"}),
    ],
)
def test_what_is_no_json(demo: Vocabulary, schema: dict[str, Any], texts: set[str]) -> None:
    rng = np.random.default_rng(0)
    found = {drawn(TokenMask(read_schema(schema), demo, 6), demo, rng)[0] for _ in range(30)}
    assert found and found <= texts


def test_a_beginning_of_the_prompt_is_part_of_the_text(demo: Vocabulary) -> None:
    mask = TokenMask(read_schema(FILM), demo, 200, before="{")
    text, _ = drawn(mask, demo, np.random.default_rng(0))
    jsonschema.validate(json.loads("{" + text), FILM)
    with pytest.raises(InputError, match="no text of method"):
        TokenMask(read_schema(FILM), demo, 200, before="[")


def test_a_schema_is_compiled_once_and_its_masks_go_on_by_themselves(demo: Vocabulary) -> None:
    one, other = (first_mask(read_schema(FILM), demo, 200, "{") for _ in range(2))
    fresh = TokenMask(read_schema(FILM), demo, 200, "{")
    for token in list(one.ending):
        assert (one.allowed == fresh.allowed).all() and one.ending == fresh.ending
        assert one.take(token) == fresh.take(token) == token
    assert not one.ending
    untouched = TokenMask(read_schema(FILM), demo, 200, "{")
    assert (other.allowed == untouched.allowed).all() and other.ending == untouched.ending


def test_json_is_written_as_python_writes_it(demo: Vocabulary) -> None:
    ending = TokenMask(read_schema(VISIT), demo, 200).ending[:-1]
    text = demo.tokenizer.decode_bytes(ending).decode()
    assert text == json.dumps(json.loads(text))


def test_the_tokens_of_keys_are_forced() -> None:
    form = Form(read_schema(FILM), DEMO)
    shortest = len(TokenMask(form.schema, vocabulary(DEMO, V), 200).ending)
    assert shortest / 2 < forced_tokens(form, 200) < shortest
    assert forced_tokens(Form(Schema("regex", "[a-z]+"), DEMO), 200) == 0
    assert forced_tokens(Form(Schema("regex", "x"), DEMO), 200) == 2  # the end token too


def all_choices(mask: TokenMask, demo: Vocabulary) -> Iterator[int]:
    """Yield the number of tokens that were chosen, for every way to draw a text."""
    token = mask.forced()
    for each in np.flatnonzero(mask.allowed).tolist() if token is None else [token]:
        after = mask.copy()
        after.take(each)
        further = all_choices(after, demo) if after.ending else [0]
        yield from (rest + (token is None) for rest in further)


@pytest.mark.parametrize(
    "schema",
    [
        {"choices": ["urgent", "soon", "so"]},
        {"choices": ["a", "b", "ca"]},
        {"regex": "(yes|no){1,2}!?"},
        {"enum": ["red", "green"]},
        {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
         "additionalProperties": False},
    ],
)  # fmt: skip
def test_free_tokens_of_a_finite_form_are_those_of_the_text_with_most(
    demo: Vocabulary, schema: dict[str, Any]
) -> None:
    read = read_schema(schema)
    most = max(all_choices(TokenMask(read, demo, 30), demo))
    assert most_free_tokens(Form(read, DEMO), 30) == most < 30 - forced_tokens(Form(read, DEMO), 30)


def test_an_infinite_form_has_the_free_tokens_that_its_shortest_text_leaves() -> None:
    for form in (Form(read_schema(FILM), DEMO), Form(Schema("regex", "a*"), DEMO)):
        began = time.process_time()
        assert most_free_tokens(form, 200) == 200 - forced_tokens(form, 200)
        assert time.process_time() - began < 10


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


HOSTILE: dict[str, Any] = {
    "100,000 values": {"enum": [f"value number {i}" for i in range(100_000)]},
    "3,000 keys": {"type": "object", "properties": {f"k{i}": {} for i in range(3000)}},
    "a record that never ends": {
        "$ref": "#/$defs/t",
        "$defs": {
            "t": {
                "type": "object",
                "properties": {"c": {"$ref": "#/$defs/t"}},
                "required": ["c"],
                "additionalProperties": False,
            }
        },
    },
    "a reference to itself": {"$ref": "#"},
    "a reference to a server": {"$ref": "http://localhost/schema.json"},
    "900 levels": json.loads(nested(900)),
    "a million items": {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000},
    "a million characters": {"type": "string", "minLength": 1_000_000},
    "no text": {"type": "string", "minLength": 5, "maxLength": 2},
    "look-around": {"regex": "(?=a)b"},
    "a reference in a regex": {"regex": r"(a)\1"},
    "no regex": {"regex": "(a"},
    "no grammar": {"lark": "no grammar !!"},
    "an import": {"lark": "start: X\n%import secrets (X)"},
    "an unknown keyword": {"type": "array", "uniqueItems": True},
    "an unknown format": {"type": "string", "format": "zzz"},
    "an unknown type": {"type": "zzz"},
    "a date, which YAML has": {"const": date(2020, 1, 1)},
    "no choices": {"choices": []},
    "choices that are numbers": {"choices": [1, 2]},
    "an empty regex": {"regex": ""},
    "products": {
        "anyOf": [
            {"allOf": [{"anyOf": [{"properties": {f"a{i * j}": {}}} for i in range(30)]}]}
            for j in range(6)
        ]
        * 40
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_in_time(demo: Vocabulary, name: str) -> None:
    schema = HOSTILE[name]
    began = time.process_time()
    with pytest.raises(InputError, match=r"^method\."):
        TokenMask(read_schema(schema), demo, 200)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "regex",
    ["(a+)+b", "(a|aa)*b", "(x+x+)+y", "(.*a){20}", "(.{0,300}x){0,300}", "(a{1,99}){1,99}"],
)
def test_regexes_that_are_slow_elsewhere_are_not_here(demo: Vocabulary, regex: str) -> None:
    began = time.process_time()
    _, count = drawn(
        TokenMask(read_schema({"regex": regex}), demo, 60), demo, np.random.default_rng(0)
    )
    assert count <= 60 and time.process_time() - began < 5


def test_a_grammar_with_too_many_readings_is_ended(demo: Vocabulary) -> None:
    began = time.process_time()
    text, count = drawn(
        TokenMask(read_schema({"lark": 'start: start start | "a"'}), demo, 300),
        demo,
        np.random.default_rng(0),
    )
    assert set(text) == {"a"} and count <= 300 and time.process_time() - began < 20


def test_an_end_token_in_the_midst_of_a_text_is_replaced(demo: Vocabulary) -> None:
    mask = TokenMask(read_schema(FILM), demo, 300)
    text = demo.tokenizer.decode_bytes(fitted(mask, [demo.eos] * 3)[:-1]).decode()
    jsonschema.validate(json.loads(text), FILM)

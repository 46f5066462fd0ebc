"""Topics' terms and structure of texts."""

import numpy as np
import pytest

from dpray.evaluation.texts import compare_topics, parsed_record, structure
from dpray.types import InputError

SCHEMA = {
    "type": "object",
    "required": ["title", "year"],
    "properties": {"title": {"type": "string"}, "year": {"type": "integer"}},
}


def test_topics_of_few_or_identical_texts():
    alike = compare_topics([["x y"] * 9] * 3, [np.ones((9, 4))] * 3)
    assert alike == [{"terms": [], "synthetic": 1.0, "other_real": 1.0, "real": 1.0}]


def test_words_of_fewer_than_three_records_are_shown_by_no_topic():
    sides = [["heart"] * 5 + ["skin"] * 5, ["heart"] * 5 + ["skin"] * 5, ["skin marlowe"] * 10]
    vectors = [np.array([{"h": [1.0, 0.0], "s": [0.0, 1.0]}[t[0]] for t in side]) for side in sides]
    found = compare_topics(sides, vectors)
    assert found == [
        {"terms": ["skin", "marlowe"], "synthetic": 0.5, "other_real": 0.5, "real": 1.0},
        {"terms": ["heart"], "synthetic": 0.5, "other_real": 0.5, "real": 0.0},
    ]
    # Held by two records of thirty.
    sides[2] = ["skin marlowe"] * 2 + ["skin"] * 8
    assert [topic["terms"] for topic in compare_topics(sides, vectors)] == [["skin"], ["heart"]]


def test_shares_count_all_texts():
    texts = ['{"title": "A", "year": 1931}', '{"title": "A"}', "[1]", '{"title": "A", "ye', "no"]

    shares = structure(texts, SCHEMA)

    assert shares == {"json_parse_share": 3 / 5, "schema_share": 1 / 5}
    assert structure(texts, None)["schema_share"] is None


@pytest.mark.parametrize(
    "text",
    [
        "12",
        '"a"',
        "null",
        '{"a": NaN}',
        "{'a': 1}",
        '{"a": 1e999}',
        '{"a": 1} {"b": 2}',
        "[" * 100_000,
        "",
    ],
)
def test_what_is_not_one_strict_json_record(text):
    assert parsed_record(text) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"properties": {"a": {"$ref": "https://example.com/other.json"}}},
        {"properties": {"a": {"$ref": "#/$defs/missing"}}},
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema):
    with pytest.raises(InputError, match=r"^schema: "):
        structure(['{"a": 1}'], schema)


def test_a_schema_never_reaches_the_network(monkeypatch):
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *request: asked.append(request))

    with pytest.raises(InputError, match="cannot resolve"):
        structure(["{}"], {"$ref": "https://example.com/other.json"})
    assert asked == []

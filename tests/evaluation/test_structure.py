import pytest

from dpray.evaluation.structure import parse_json, structure
from dpray.types import InputError

SCHEMA = {
    "type": "object",
    "required": ["title", "year"],
    "properties": {"title": {"type": "string"}, "year": {"type": "integer"}},
}


def test_shares_count_all_texts():
    texts = ['{"title": "A", "year": 1931}', '{"title": "A"}', "[1]", '{"title": "A", "ye', "no"]

    shares = structure(texts, SCHEMA)

    assert shares == {"json_parse_share": 3 / 5, "schema_share": 1 / 5}
    assert structure(texts, None)["schema_share"] is None


@pytest.mark.parametrize(
    "text", ["12", '"a"', "null", '{"a": NaN}', "{'a': 1}", '{"a": 1} {"b": 2}', "[" * 100_000, ""]
)
def test_what_is_not_one_strict_json_record(text):
    assert parse_json(text) is None


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

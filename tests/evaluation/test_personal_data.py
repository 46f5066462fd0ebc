"""Planted values of every kind are found, ordinary news have few, and no text makes it slow."""

from __future__ import annotations

import time

import pytest

from dpray.evaluation.personal_data import IDENTIFIERS, PHONES, find_patterns, matches_in_words

PLANTED = {
    "e-mail addresses": [
        "anna.meier+x@klinik-nord.example.org", "jürgen@müller.de", "<a_b@c.io>", "mailto:x@y.fr.",
    ],
    "URLs": ["https://example.com/a?b=c", "www.foo.org/x", 'HREF="http://x.y/z"'],
    "IBANs": [
        "DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "NO93 8601 1117 947",
        "ES91 2100 0418 4502 0005 1332 HELP", "NL91 ABNA 0417 1643 00 AB",
    ],
    "card numbers": [
        "4111 1111 1111 1111 03/27", "5500-0000-0000-0004", "378282246310005",
        "3782 822463 10005", "3056 930902 5904", "6011000990139424",
    ],
    "US social security numbers": ["078-05-1120", "219 09 9999"],
    "IP addresses": ["10.0.0.1", "192.168.1.254.", "fe80::1", "2001:db8::8a2e:370:7334"],
    "phone numbers": [
        "+41 44 668 18 00", "(212) 736-5000", "212-736-5000", "+442083661177",
        "011 44 20 8366 1177",
    ],
}  # fmt: skip

OF_LANGUAGES = [
    ("German", "German tax numbers", "36 574 261 809"),
    ("de", "German tax numbers", "36574261809"),
    ("de", "phone numbers", "030 901820"),
    ("de", "phone numbers", "044 668 18 00"),
    ("Spanish", "Spanish identity numbers", "12345678Z"),
    ("Spanish", "Spanish identity numbers", "X1234567L"),
    ("Spanish", "phone numbers", "91 123 45 67"),
    ("French", "French social security numbers", "2 95 07 26 004 217 41"),
    ("French", "phone numbers", "06.12.34.56.78"),
    ("Chinese", "Chinese identity numbers", "11010519491231002X"),
    ("Chinese", "phone numbers", "13800138000"),
    ("Arabic", "phone numbers", "0100 123 4567"),
    ("Arabic", "phone numbers", "٠١٠٠١٢٣٤٥٦٧"),
    ("English", "phone numbers", "020 7946 0018"),
]
OTHERS = {
    "de": "36 574 261 808", "es": "12345678A", "fr": "2 95 07 26 004 217 42",
    "zh": "110105194912310021", "ar": "12 000 000",
}  # fmt: skip

NONE = [
    "DE88 3704 0044 0532 0130 00", "4111 1111 1111 1112", "000-12-3456", "666-12-3456",
    "123-00-1234", "300.1.1.1", "12:30:45", "1.2.3", "std::vector",
    "on 2004-08-20 at 08:15:30", "$1,234,567.89",
    "pp. 1234-5678 of vol. 12", "a@b", "@someone", "12345678901234567890", "1984-2004",
    "٣٤٥-٦٧-٨٩٠١",
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, values in PLANTED.items() for value in values]
)
def test_a_planted_value_is_found_once_and_as_its_kind(kind: str, value: str) -> None:
    for text in (value, f"Seen today, {value}, and told to rest.", f'{{"note": "{value}"}}'):
        found = find_patterns([text])
        assert {name: n for name, n in found["matches"].items() if n} == {kind: 1}, text


@pytest.mark.parametrize("text", NONE)
def test_other_numbers_are_not_taken_for_personal_data(text: str) -> None:
    assert find_patterns([f"x {text} y"])["texts_with_matches"] == 0


@pytest.mark.parametrize(("language", "kind", "value"), OF_LANGUAGES)
def test_a_number_of_a_country_is_found_in_its_language(
    language: str, kind: str, value: str
) -> None:
    for text in (f"x {value}, y", f"电话{value}。", f"رقم {value}"):
        matches = find_patterns([text], language)["matches"]
        assert {name: n for name, n in matches.items() if n} == {kind: 1}, text
        assert value not in str(matches)
    assert find_patterns([f"x {value}, y"])["texts_with_matches"] == 0


@pytest.mark.parametrize("code", OTHERS)
def test_other_numbers_are_none_of_the_countries(code: str) -> None:
    # That one is the number of a Spanish mobile phone.
    others = [text for text in NONE if text != "666-12-3456"]
    texts = [f"x {text} y" for text in (*others, OTHERS[code])]
    assert find_patterns(texts, code)["texts_with_matches"] == 0


def test_the_counts_and_their_words() -> None:
    texts = ["a@b.org and c@d.org, 10.0.0.1", "nothing", "", "call +41 44 668 18 00"]
    found = find_patterns(texts)
    assert [*found["matches"]] == [*(kind.name for kind in IDENTIFIERS), PHONES]
    assert (found["texts"], found["texts_with_matches"]) == (4, 2)
    words = "e-mail addresses: 2, IP addresses: 1, phone numbers: 1"
    assert matches_in_words(found) == (words, "2 of 4")
    assert matches_in_words(find_patterns(["nothing", "12"])) == ("none", "0 of 2")


HOSTILE = (
    "a", "1", "1-", "1 ", "a@", "a.", "www.", "http://", "AA11", "AA11 ", "1.", "a:", "+", "(1",
    "+1(2)3-", "2004-08-20 08:00 ", "212-555-0000 ", "1234567 ", " x1", "1/2/3/", "4111 ",
    "1(2)3-4/5 x6.", "１２３-４５６ ", "+١٢٣٤٥٦٧٨٩", "\x00", "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("part", HOSTILE, ids=ascii)
def test_no_text_of_10_kilobytes_takes_long(part: str) -> None:
    text = part * (10_000 // len(part))
    before = time.process_time()
    find_patterns([text, f"x@{text}", f"{text}@"])
    # The slowest, 1/2/3/, takes 0.1 seconds a text.
    assert time.process_time() - before < 2


def test_five_hundred_texts_take_seconds() -> None:
    text = f"Seen on 2004-08-20, 12 of 345 points, at 08:15. {'word ' * 60}"
    texts = [f"{text} {n}" for n in range(500)]
    before = time.process_time()
    assert find_patterns(texts)["texts_with_matches"] == 0
    assert time.process_time() - before < 3

"""An encoding is proposed only if the whole sample is in it; none is taken that may be another."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.encodings import ENCODINGS, Fit, decoded, fits, is_western, likely_encodings
from dpray.io.formats import AS_RECOGNISED, FileFormat
from dpray.io.text_files import unmarked_utf_16

WORDS = {
    "cp1250": ["Płatność", "Logowanie", "Účet", "Přihlášení", "Számla", "Hűtő", "Račun", "Greška"],
    "cp1251": ["Счёт", "Вход", "Да", "Нет", "Рахунок", "Сметка", "Ошибка"],
    "koi8_r": ["Счёт", "Вход", "Да", "Нет"],
    "cp866": ["Счёт", "Вход", "Ошибка"],
    "cp1253": ["Λογαριασμός", "Σύνδεση", "Ναι", "Όχι"],
    "cp1254": ["Giriş", "Ödeme", "Şifre yanlış", "Müşteri"],
    "cp1255": ["חשבון", "כניסה", "כן"],
    "cp1256": ["فاتورة", "دخول", "نعم"],
    "cp1257": ["Sąskaita", "Žinutė", "Rēķins"],
    "cp874": ["บิล", "เข้าสู่ระบบ"],
    "gb18030": ["账单", "登录", "客户无法登录", "是"],
    "cp950": ["帳單", "登入", "客戶無法登入"],
    "cp932": ["請求", "ログイン", "はい"],
    "euc_jp": ["請求", "ログイン", "はい"],
    "cp949": ["청구", "로그인", "예"],
    "mac_roman": ["Größe", "Überweisung", "Straße"],
    "cp850": ["Größe", "Überweisung", "Straße"],
}
COMMON = ["Größe", "Überweisung", "Straße", "“bill” – it’s €5", "Atención", "Café"]
WESTERN = [
    "Não consigo; página",
    "Søvn og på",
    "Fête à Nîmes déjà",
    "niño, página",
    "Città, perché",
]

ANYTHING = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


def shown(found: list[Fit]) -> list[str]:
    return [fit.encoding for fit in found]


@given(st.data())
def test_words_in_another_encoding_are_not_read_as_cp1252(data: st.DataObject) -> None:
    """Whatever words a file has, they are among the proposals as they are, and nothing is taken."""
    encoding = data.draw(st.sampled_from([*WORDS]))
    words = data.draw(st.lists(st.sampled_from(WORDS[encoding]), min_size=1, max_size=6))
    text = "text,label\r\n" + "".join(f"{word} ok,{word}\r\n" for word in words)
    sample = text.encode(encoding)
    found = fits(sample)
    assert text in [fit.text for fit in found]
    assert all(sample.decode(fit.encoding) == fit.text for fit in found)
    assert not is_western(sample)


@pytest.mark.parametrize("encoding", WORDS)
def test_the_right_encoding_is_among_the_first(encoding: str) -> None:
    text = "text,label\n" + "".join(f"{word},x\n" for word in WORDS[encoding])
    assert text in [fit.text for fit in fits(text.encode(encoding))[:6]]


@given(st.lists(st.sampled_from(COMMON), min_size=1), st.sampled_from(["", *WESTERN]))
def test_western_words_are_read_at_once_if_no_other_language_fits(
    words: list[str], more: str
) -> None:
    text = " ; ".join(words)
    for each in (text, more):
        sample = each.encode("cp1252")
        assert is_western(sample) and fits(sample)[0].text == each


@pytest.mark.parametrize("word", ["Problème", "Raèun", "støechy", "Giriþ", "Søvn"])
def test_words_of_two_languages_are_a_question(word: str) -> None:
    assert not is_western(f"a,b\nx,{word}\n".encode("cp1252"))


@given(ANYTHING, st.sampled_from([*ENCODINGS]))
def test_every_proposal_decodes_the_whole_sample(text: str, encoding: str) -> None:
    sample = text.encode(encoding, "ignore")
    for fit in fits(sample):
        assert decoded(sample, fit.encoding) == fit.text
        assert fit.text.encode(fit.encoding) == sample or fit.encoding in (
            "cp932",
            "euc_jp",
            "cp949",
            "cp950",
            "gb18030",
            "cp1258",
        )
        assert "\n" not in fit.meaning(sample)


def test_words_that_a_person_gave_decide() -> None:
    sample = "text,label\nx,账单\n".encode("gb18030")
    assert [fit.encoding for fit in fits(sample, ["登录", "账单"]) if fit.known] == ["gb18030"]
    assert not any(fit.known for fit in fits(sample, ["text", "Marlowe"]))


def test_a_proposal_fits_the_whole_of_every_file(tmp_path: Path) -> None:
    """The byte that is not in an encoding may be far behind the sample."""
    start = "text\n" + "Größe und Länge\n" * 300_000
    (tmp_path / "a.csv").write_bytes(start.encode("cp1252") + b"\x81\n")
    (tmp_path / "b.csv").write_bytes(b"text\nx\n")
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    found = shown(likely_encodings(files, AS_RECOGNISED, []))
    assert "cp1252" not in found
    (tmp_path / "a.csv").write_bytes(start.encode("cp1252"))
    assert shown(likely_encodings(files, AS_RECOGNISED, [])) == ["cp1252"]
    (tmp_path / "b.csv").write_text("text\nGröße\n", encoding="utf-8")
    assert likely_encodings(files, AS_RECOGNISED, []) == []


def test_an_encoding_that_makes_nonsense_is_doubted(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes("text\n客户无法登录\n".encode("gb18030"))
    files = [str(file)]
    assert likely_encodings(files, FileFormat(encoding="gb18030"), []) == []
    assert shown(likely_encodings(files, FileFormat(encoding="cp1252"), []))[0] == "gb18030"
    assert shown(likely_encodings(files, FileFormat(encoding="cp949"), [])) == []


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("ログインできません,請求", "shift_jis"), ("ログインできません,請求", "Shift-JIS"),
        ("ログインできません,請求", "euc_jis_2004"), ("客户无法登录", "gbk"),
        ("客户无法登录", "GB2312"), ("無法登入帳號", "big5"), ("로그인할 수 없습니다", "euc-kr"),
        ("Größe und Maße", "windows-1252"), ("Größe und Maße", "latin-1"),
    ],
)  # fmt: skip
def test_an_encoding_that_reads_like_text_is_not_doubted(
    tmp_path: Path, text: str, encoding: str
) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(f"text\n{text}\n".encode(encoding))
    assert likely_encodings([str(file)], FileFormat(encoding=encoding), []) == []


@given(st.lists(st.sampled_from(["Текст,Метка", "text,label", "内容,标签", "é"]), min_size=2))
def test_utf_16_without_a_mark_is_known_by_its_line_ends(lines: list[str]) -> None:
    text = "\r\n".join([*lines, ""])
    for encoding in ("utf-16-le", "utf-16-be"):
        assert unmarked_utf_16(text.encode(encoding)) == encoding

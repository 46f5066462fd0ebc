"""`.eml` and `.mbox`: what a mail's row has, where a mail ends, and mails that break parsers."""

from __future__ import annotations

from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.file_list import file_digests, list_files
from dpray.io.formats import FilePart
from dpray.io.public_files import read_few_shot
from dpray.io.records import read_file_header, read_rows, scan_part
from dpray.io.text_files import LONGEST_ROW
from dpray.types import InputError

BEGIN = b"From ann@clinic.org Wed Jan 31 09:00:00 2024\n"
PLAIN = b"From: a@b.org\nSubject: S\n\nHello\n"
EMPTY = {"subject": "", "from": "", "to": "", "date": ""}


def made(text: str = "Hello\n\n> before\n", **headers: str) -> EmailMessage:
    mail = EmailMessage()
    for name, value in headers.items():
        mail[name] = value
    mail.set_content(text)
    return mail


def read(folder: Path, content: bytes, name: str = "Billing/1.eml") -> list[object]:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return [row for _, row in scan_part(FilePart(str(file)))]


def text(folder: Path, content: bytes) -> object:
    [row] = read(folder, content)
    return row["text"] if isinstance(row, dict) else str(row)


def test_a_mail_is_a_row(tmp_path: Path) -> None:
    mail = made(
        Subject="Grüße aus Köln", From='"Doe, Jane j@x.de" <Jane@Clinic.org>',
        To='a@b.org, "q@r.org" <D@e.org>', Date="Wed, 31 Jan 2024 09:00:00 +0100",
    )  # fmt: skip
    mail.add_alternative("<p>Marlowe</p>", subtype="html")
    mail.add_attachment("Marlowe", filename="a.txt")
    mail.add_attachment(made("Marlowe"))
    row = {
        "subject": "Grüße aus Köln",
        "from": "jane@clinic.org",
        "to": "a@b.org, d@e.org",
        "date": "2024-01-31T09:00:00+01:00",
        "text": "Hello\n\n> before",
        "label": "Billing",
    }
    for content in (bytes(mail), mail.as_bytes(policy=SMTP)):
        assert read(tmp_path, content) == [row]
        unlabelled = {name: value for name, value in row.items() if name != "label"}
        assert read(tmp_path, BEGIN + content, "a.mbox") == [unlabelled]
        assert read(tmp_path, content, "label=x/1.eml") == [{**unlabelled, "label": "x"}]
    assert read_file_header(str(tmp_path / "Billing/1.eml")).columns == [*row]
    assert read_file_header(str(tmp_path / "a.mbox")).columns == [*unlabelled]


@pytest.mark.parametrize(
    ("headers", "content", "expected"),
    [
        (b"Content-Type: text/plain; charset=iso-8859-1", b"K\xe4se", "Käse"),
        (b"Content-Type: text/plain; charset=us-ascii", "Käse".encode(), "Käse"),
        (b"Content-Type: text/plain; charset=x-odd", "Käse".encode(), "Käse"),
        (b"Subject: x", "Käse".encode(), "Käse"),
        (b"Content-Type: text/plain; charset=utf-8", b"K\xe4se", "K\ufffdse"),
        (b"Content-Transfer-Encoding: quoted-printable", b"K=C3=A4=\nse", "Käse"),
        (b"Content-Transfer-Encoding: base64", b"S8Ok!c2U=", "Käse"),
        (b"Content-Type: application/pdf", b"Marlowe", ""),
        (b"Content-Type: multipart/mixed", b"Marlowe", ""),
        (b"Content-Type: text/plain; charset=x-odd", b"K\xe4se", "in an encoding that is not"),
        (b"Content-Type: text/plain; charset=punycode", b"K\xe4se", "in an encoding that is not"),
    ],
)
def test_the_body_is_decoded(tmp_path: Path, headers: bytes, content: bytes, expected: str) -> None:
    assert expected in str(text(tmp_path, headers + b"\n\n" + content))


def test_html_is_its_text(tmp_path: Path) -> None:
    html = (
        b"<html><head><title>No</title><STYLE>p {}</STYLE></head>\n<p>5 &lt; 6\n&amp; more</p>"
        b"<!-- no > --><script>if (1 < 2) no()</script><div>a<br/>b <b>c</b>d</div>\n\n<p></p>1 < 2"
    )
    assert text(tmp_path, b"Content-Type: text/html\n\n" + html) == "5 < 6 & more\na\nb cd\n1 < 2"


def test_headers_that_no_parser_takes_stay_as_they_are_written(tmp_path: Path) -> None:
    odd = b"From: (((((\nSubject: raw \xc3\xa4 =?x?q?y?=\n\tmore\nDate: today\nTo: all\n\nx"
    [row] = read(tmp_path, odd)
    shown = {"subject": "raw ä y more", "from": "(((((", "to": "all", "date": "today"}
    assert row == {**shown, "text": "x", "label": "Billing"}
    [row] = read(tmp_path, b"From: a@b.org\nfrom: c@d.org\nSubject: " + b"=?utf-8?q?a?= " * 9000)
    assert isinstance(row, dict) and row["from"] == "a@b.org" and len(row["subject"]) == 125_999


def test_where_a_mail_in_a_mbox_ends(tmp_path: Path) -> None:
    inner = b"\nFrom here on\n>From Ann at 09:00:00 in 2024\n>>From x\n" + BEGIN + b"> From y\n"
    box = b"\n" + BEGIN + PLAIN + inner + b"\n" + BEGIN.replace(b"\n", b"\r\n") + PLAIN
    rows = read(tmp_path, box, "a.mbox")
    assert [row["text"] for row in rows if isinstance(row, dict)] == [
        "Hello\n\nFrom here on\nFrom Ann at 09:00:00 in 2024\n>From x\n"
        + BEGIN.decode() + "> From y",
        "Hello",
    ]  # fmt: skip
    assert read(tmp_path, b"", "a.mbox") == read(tmp_path, b"\n\n", "a.mbox") == []


DEEP = b"".join(
    b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(1000)
)
HOSTILE = {
    "deep": (DEEP, "too many lines or parts"),
    "mails in mails": (b"Content-Type: message/rfc822\n\n" * 1000, "too many lines or parts"),
    "digests": (
        b"".join(
            b"Content-Type: multipart/digest; boundary=b%d\n\n--b%d\n\n" % (n, n)
            for n in range(190)
        ),
        None,
    ),
    "lines and ends": (
        b"".join(b"Content-Type: multipart/x; boundary=%d\n\n--%d\n" % (n, n) for n in range(150))
        + b"\n" * 200_000,
        "too many lines or parts",
    ),
    "long": (b"Subject: x\n\n" + b"Marlowe" * (LONGEST_ROW // 7), "longer than 67,108,864"),
    "no headers": (b"\nMarlowe", "no headers"),
    "open comments": (b"Content-Type: text/html\n\n" + b"<!-- <a <script " * 40_000, None),
    "ends without beginnings": (b"Content-Type: text/html\n\n" + b"<script></scrip" * 40_000, None),
    "quotes": (b'From: "' + b'"' * 60_000 + b"\n\nx", None),
    "addresses": (b"To: " + b"x <a@b.c>, " * 60_000 + b"\n\nx", None),
    "no address": (b"From: " + b"a" * 1_000_000 + b"\n\nx", None),
    "a number": (b"Content-Type: text/html\n\n&#" + b"9" * 5000 + b";", "cannot be read"),
    "a date": (b"Date: Mon, 31 Jan 99999999999 09:00:00 +9999\n\nx", None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_mail_costs_its_own_row_at_most(tmp_path: Path, name: str) -> None:
    content, said = HOSTILE[name]
    box = b"\n".join([BEGIN + PLAIN, BEGIN + content + b"\n", BEGIN + PLAIN])
    before = thread_time()
    first, found, last = read(tmp_path, box, "a.mbox")
    assert first == last and isinstance(first, dict) and first["text"] == "Hello"
    assert thread_time() - before < 60  # hours, if the time grew with the square of the length
    if said is None:
        assert isinstance(found, dict)
    else:
        assert str(found).startswith("a.mbox, row 2: ") and said in str(found)
        assert "Marlowe" not in str(found)
    [alone] = read(tmp_path, content)
    assert isinstance(alone, InputError) == (said is not None)


def test_a_folder_of_mails_has_labels(tmp_path: Path) -> None:
    for name in ("b/1.eml", "a/2.eml", "a/3.EML.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PLAIN)
    assert list_files(str(tmp_path)) == [
        str(tmp_path / name) for name in ("a/2.eml", "a/3.EML.gz", "b/1.eml")
    ]
    assert [row["label"] for _, row in read_rows(str(tmp_path / "a/2.eml"))] == ["a"]
    before = file_digests(f"{tmp_path}/*/1.eml")
    (tmp_path / "b").rename(tmp_path / "c")
    assert file_digests(f"{tmp_path}/*/1.eml") != before


def test_public_examples_may_be_mails(tmp_path: Path) -> None:
    read(tmp_path, PLAIN)
    read(tmp_path, PLAIN.replace(b"Hello", b"Bye"), "Access/1.eml")
    few_shot = read_few_shot(str(tmp_path), 1, "/nowhere")
    assert few_shot.texts == {None: ["Bye", "Hello"], "Billing": ["Hello"], "Access": ["Bye"]}


LINE = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=30)
LINES = st.sampled_from(["", "From x 09:00:00 2024", "> a"]) | LINE
BODIES = st.lists(LINES, max_size=5).map("\n".join)
ADDRESSES = st.from_regex(r"[a-z]{1,9}@[a-z]{1,9}\.org", fullmatch=True)


SUBJECTS = LINE.map(lambda line: " ".join(line.split()))


@given(st.lists(st.tuples(SUBJECTS, ADDRESSES, BODIES), max_size=3))
def test_mails_that_are_written_are_read(
    tmp_path_factory: pytest.TempPathFactory, mails: list[tuple[str, str, str]]
) -> None:
    box = b""
    for subject, sender, body in mails:
        mail = made(body, Subject=subject, From=sender)
        quoted = b"\n".join(
            b">" + line if line.lstrip(b">").startswith(b"From ") else line
            for line in bytes(mail).split(b"\n")
        )
        box += BEGIN + quoted + b"\n"
    found = read(tmp_path_factory.getbasetemp(), box, "mails.mbox")
    rows = [(row["subject"], row["from"], row["text"]) for row in found if isinstance(row, dict)]
    assert rows == [(subject, sender, body.rstrip("\n")) for subject, sender, body in mails]

"""Vocabulary files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpray.methods.dp_kps.terms_file import read_vocabulary
from dpray.types import InputError


def written(folder: Path, data: bytes) -> Path:
    path = folder / "terms.txt"
    path.write_bytes(data)
    return path


def test_one_term_a_line_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "heart failure\r\n\n  \nÉtoile\naspirin".encode())
    assert read_vocabulary(path) == ["heart failure", "Étoile", "aspirin"]


def test_the_first_column_counts(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbfthe\t121431\nnew  york\t12\textra\n")
    assert read_vocabulary(path) == ["the", "new york"]


def test_terms_that_differ_in_case_only_are_one(tmp_path: Path) -> None:
    path = written(tmp_path, "Straße\nSTRASSE\nb\ne\u0301t\u00e9\n\u00c9T\u00c9\nB".encode())
    assert read_vocabulary(path) == ["Straße", "b", "e\u0301t\u00e9"]


def test_stop_words(tmp_path: Path) -> None:
    path = written(tmp_path, b"The\nof mice\nof\nmouse\n")
    assert read_vocabulary(path, "english") == ["of mice", "mouse"]
    assert read_vocabulary(path) == ["The", "of mice", "of", "mouse"]


def test_bad_bytes_are_named_by_their_line(tmp_path: Path) -> None:
    path = written(tmp_path, b"good\n\xff\xfesecret\n")
    with pytest.raises(InputError, match=r"method\.vocabulary: .*line 2: .*UTF-8") as raised:
        read_vocabulary(path)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\tx\n", b"the\nof\n"])
def test_a_file_without_terms(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError, match=r"method\.vocabulary: .*no term"):
        read_vocabulary(written(tmp_path, data), "english")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"method\.vocabulary: .*No such file"):
        read_vocabulary(tmp_path / "none.txt")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"method\.vocabulary"):
        read_vocabulary(tmp_path)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpray.io.public_files import check_public, public_files, read_few_shot
from dpray.types import InputError


@pytest.fixture
def public(tmp_path: Path) -> Path:
    path = tmp_path / "public.jsonl"
    path.write_text('{"text": "a", "label": "x"}\n{"text": "b"}\n{"text": "c", "label": "x"}\n')
    return path


def test_the_private_file_is_not_public_by_any_other_name(tmp_path: Path, public: Path) -> None:
    link, private = tmp_path / "link.jsonl", tmp_path / "private.jsonl"
    private.write_text(public.read_text())
    link.symlink_to(private)
    for path in (private, link, f"file://{private}", f"{tmp_path}/p*.jsonl"):
        with pytest.raises(InputError, match=r"^--public: .* is data\.path itself"):
            public_files(str(path), "--public", str(private))
        # A folder that is refused as data.path, for its link, is private nevertheless.
        with pytest.raises(InputError, match=r"^--public: .* is data\.path itself"):
            public_files(str(path), "--public", str(tmp_path))
    for path in (private, link):
        for named in (str(private), str(tmp_path), f"{tmp_path}/p*.jsonl"):
            with pytest.raises(InputError, match=r"^method\.vocabulary: .* is data\.path itself"):
                check_public(str(path), "method.vocabulary", named)
    link.unlink()
    with pytest.raises(InputError, match=r"^--public: .* is data\.path itself"):
        public_files(str(tmp_path), "--public", str(private))
    assert public_files(str(public), "--public", str(private)) == [str(public)]
    check_public(str(public), "method.vocabulary", str(private))
    check_public(f"{tmp_path}/nothing", "method.vocabulary", str(private))
    # A plan does not need the private data to be here.
    assert public_files(str(public), "--public", f"{tmp_path}/elsewhere/*.jsonl") == [str(public)]


def test_no_cloud_is_asked_for_a_local_file(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "dpray.io.public_files.list_files", lambda path, **_: asked.append(path) or []
    )
    for private in (
        "s3://bucket/notes/",
        "hf://name",
        f"file://{public.parent}",
        str(public.parent),
    ):
        check_public(str(public), "method.vocabulary", private)
    assert asked == [f"file://{public.parent}", str(public.parent)]


def test_examples_are_read_by_label(public: Path) -> None:
    few_shot = read_few_shot(str(public), 2, "/nowhere")
    assert few_shot.of_label("x") == ["a", "c"]
    # An empty text is no example, and a blank label no label.
    public.write_text(public.read_text() + '{"text": " "}\n{"text": "d", "label": ""}\n')
    few_shot = read_few_shot(str(public), 2, "/nowhere")
    assert few_shot.of_label("y") == ["a", "b", "c", "d"] == few_shot.of_label("")
    assert read_few_shot(None, 2, "/nowhere").shown == 0


def test_what_is_wrong_with_examples_is_said(public: Path) -> None:
    def refused(message: str, shown: int = 2, private: str = "/nowhere") -> None:
        with pytest.raises(InputError, match=f"^method.few_shot: {message}"):
            read_few_shot(str(public), shown, private)

    refused(".* has 3 records; method.few_shot_examples is 4", 4)
    refused(".* is data.path itself", private=str(public))
    public.write_text(json.dumps({"text": "a" * 100_001}) + "\n")
    refused("public.jsonl, row 1: more than 100,000 characters")
    public.write_text('{"text": "a"}\n{"words": "b"}\n')
    refused("public.jsonl, row 2: no column 'text'$")

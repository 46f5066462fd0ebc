"""A bucket's model is listed, pinned, fetched whole or not at all. Folders stand in for buckets:
tests/engines/mocked_bucket.py has an S3 server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pyarrow.fs import FileInfo, FileSystem, FileType, LocalFileSystem, SubTreeFileSystem

from dpray.engines.model_path import bucket_folder
from dpray.io.bucket import fetch, look, pinned, shown_name
from dpray.types import InputError, Resumable

URI = "s3://models/tiny?region=eu-west-1"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket" / "tiny"
    (folder / ".cache").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"12345678")
    (folder / ".cache" / "lock").touch()
    return folder


def connect(tmp_path: Path):
    def opened(uri: str) -> tuple[FileSystem, str]:
        assert uri == URI
        return SubTreeFileSystem(str(tmp_path / "bucket"), LocalFileSystem()), "tiny"

    return opened


def test_a_name_is_pinned_to_the_files_and_its_folder_is_fetched_once(bucket, tmp_path):
    opened, cache = connect(tmp_path), tmp_path / "cache"
    name = pinned(URI, "engine.model", opened)
    assert pinned(name, "engine.model", opened) == name
    assert pinned("a/b", "engine.model", opened) == "a/b"

    folder = bucket_folder(name, "engine.model", cache, opened)
    assert {path.name for path in folder.rglob("*")} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"12345678"
    assert bucket_folder(URI, "engine.model", cache, opened) == folder
    (bucket / "model.safetensors").unlink()  # it is not looked up again
    assert bucket_folder(name, "engine.model", cache, opened) == folder


def test_other_files_have_another_digest_and_a_pinned_name_refuses_them(bucket, tmp_path):
    opened = connect(tmp_path)
    before = pinned(URI, "engine.model", opened)
    os.utime(bucket / "model.safetensors", ns=(0, 1_000))
    now = pinned(URI, "engine.model", opened)
    (bucket / "other.json").touch()
    assert len({before, now, pinned(URI, "engine.model", opened)}) == 3
    with pytest.raises(InputError, match=r"^engine.model: the files of s3://.* have changed"):
        bucket_folder(before, "engine.model", tmp_path / "cache", opened)


def test_a_released_name_has_no_bucket(bucket, tmp_path):
    name = pinned(URI, "engine.model", connect(tmp_path))
    assert shown_name(name) == f"tiny (sha256 {name.partition('#')[2]})"
    assert shown_name(URI) == "tiny"


@pytest.mark.parametrize("content", [b"1234", b"123456789"])
def test_a_file_that_is_not_whole_is_no_model(bucket, tmp_path, content):
    found, into = look(URI, "engine.model", connect(tmp_path)), tmp_path / "into"
    into.mkdir()
    (bucket / "model.safetensors").write_bytes(content)
    with pytest.raises(Resumable, match=r"model.safetensors broke off"):
        fetch(found, into, "engine.model")


def test_files_that_change_while_they_are_fetched_are_no_model(bucket, tmp_path):
    found, into = look(URI, "engine.model", connect(tmp_path)), tmp_path / "into"
    into.mkdir()
    os.utime(bucket / "model.safetensors", ns=(0, 1_000))
    with pytest.raises(InputError, match="have changed"):
        fetch(found, into, "engine.model")


def test_what_a_killed_fetch_left_is_removed(bucket, tmp_path):
    cache, opened = tmp_path / "cache", connect(tmp_path)
    digest = look(URI, "engine.model", opened).digest
    killed = cache / f"bucket-{digest}.part-killed"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"12")
    folder = bucket_folder(URI, "engine.model", cache, opened)
    assert (folder / "model.safetensors").read_bytes() == b"12345678"
    assert not killed.exists()


def test_a_folder_that_is_not_wholly_uploaded_is_refused(bucket, tmp_path):
    opened = connect(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (bucket / "model.safetensors.index.json").write_text(json.dumps(index))
    (bucket / "model-1.safetensors").touch()
    with pytest.raises(InputError, match=r"has no model-2.safetensors: .*not wholly uploaded"):
        look(URI, "engine.model", opened)
    (bucket / "model-2.safetensors").touch()
    look(URI, "engine.model", opened)
    (bucket / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config.json"):
        look(URI, "embedder.model", opened)


@pytest.mark.parametrize(
    "index",
    ["", "[" * 100_000, "[1]", "null", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": {}}}'],
)
def test_an_index_that_is_none_is_refused(bucket, tmp_path, index):
    (bucket / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=r"^engine.model: s3://"):
        look(URI, "engine.model", connect(tmp_path))


def test_no_file_of_a_folder_without_a_model_is_asked_for(bucket, tmp_path, monkeypatch):
    """A whole bucket may be named by mistake."""
    (bucket / "config.json").unlink()
    monkeypatch.setattr("dpray.io.bucket._tag", lambda *_: pytest.fail("asked"))
    with pytest.raises(InputError, match=r"has no config.json"):
        look(URI, "engine.model", connect(tmp_path))


def test_files_outside_of_the_folder_are_none_of_the_model(bucket, tmp_path):
    """An object's name may hold "..", which leads out of the folder that it is written to."""
    opened, _ = connect(tmp_path)(URI)

    class Hostile:
        def get_file_info(self, asked):
            if isinstance(asked, str):
                return opened.get_file_info(asked)
            return [
                *opened.get_file_info(asked),
                FileInfo("tiny/../../out.json", FileType.File, size=1),
                FileInfo("tiny/a/../../../out.json", FileType.File, size=1),
            ]

        def __getattr__(self, name):
            return getattr(opened, name)

    found = look(URI, "engine.model", lambda uri: (Hostile(), "tiny"))
    assert [file.name for file in found.files] == ["config.json", "model.safetensors"]


def test_a_missing_folder_and_a_secret_are_refused(tmp_path):
    (tmp_path / "bucket").mkdir()
    with pytest.raises(InputError, match=r"^engine.model: .* no such folder in the bucket"):
        look(URI, "engine.model", connect(tmp_path))
    for uri in ("s3://key:hidden@models/tiny", "s3://models/t?endpoint_override=a:hidden@host"):
        with pytest.raises(InputError) as refused:
            look(uri, "engine.model")
        assert "hidden" not in str(refused.value)

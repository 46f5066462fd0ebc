"""A release in a bucket: whole if `release.json` is there, never of two runs, never private."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs

from dpray.config.config import Config
from dpray.evaluation.canaries import _run_copy
from dpray.evaluation.rehearse import on_stand_in
from dpray.io.bucket import Connect
from dpray.methods.config import parse_config
from dpray.report.bucket_copy import check_copy, copy_release
from dpray.types import InputError, Resumable
from tests.report.reports import a_report

URI = "s3://bucket/notes"


class Breaking(LocalFileSystem):
    """Like a bucket it needs no folders, and its objects appear whole or not at all."""

    cachable = False

    def __init__(self, writes: int) -> None:
        super().__init__(auto_mkdir=True)
        self.left, self.written = writes, list[str]()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "the line broke")
            self.written.append(Path(path).name)
        return super()._open(path, mode, **options)


def bucket(tmp_path: Path, writes: int = 99) -> tuple[Connect, Breaking]:
    backend = Breaking(writes)
    return lambda uri: (fs.PyFileSystem(fs.FSSpecHandler(backend)), f"{tmp_path}/bucket"), backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "private").mkdir(parents=True)
    (run / "private" / "rows.jsonl").write_text("Marlowe")
    (run / "notes.txt").write_text("Marlowe")
    (run / "run.json").write_text('{"run_id": "one"}')
    (run / "privacy_report.json").write_text(json.dumps(a_report()))
    (run / "synthetic.jsonl").write_text('{"text": "a"}\n')
    return run


NAMES = {"run.json", "privacy_report.json", "synthetic.jsonl"}


def there(tmp_path: Path) -> dict[str, bytes]:
    found = (tmp_path / "bucket").rglob("*")
    return {path.name: path.read_bytes() for path in found if path.is_file()}


def test_a_bucket_gets_the_released_files_and_last_their_list(folder: Path, tmp_path: Path) -> None:
    connect, backend = bucket(tmp_path)
    check_copy(folder, URI, connect)
    copy_release(folder, URI, connect)
    found = there(tmp_path)
    assert backend.written[0] == "run.json" and backend.written[-1] == "release.json"
    assert {*found} == NAMES | {"release.json"}
    marker = json.loads(found.pop("release.json"))
    assert marker["run_id"] == "one" and marker["files"] == {
        name: {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in found.items()
    }
    assert not any(b"Marlowe" in content for content in found.values())
    # The same command copies nothing again; a card that was written since is copied.
    again, backend = bucket(tmp_path)
    copy_release(folder, URI, again)
    assert backend.written == []
    (folder / "README.md").write_text("a card")
    copy_release(folder, URI, again)
    assert {*there(tmp_path)} == NAMES | {"README.md", "release.json"}


@pytest.mark.parametrize("writes", range(4))
def test_a_copy_that_broke_off_is_not_whole_and_goes_on(
    folder: Path, tmp_path: Path, writes: int
) -> None:
    connect, _ = bucket(tmp_path, writes)
    with pytest.raises(Resumable, match=rf"^output\.copy_to: {URI} cannot be reached"):
        copy_release(folder, URI, connect)
    assert "release.json" not in there(tmp_path)
    check_copy(folder, URI, connect)
    copy_release(folder, URI, bucket(tmp_path)[0])
    assert {*there(tmp_path)} == NAMES | {"release.json"}
    # A release that changed is never listed as the old one.
    (folder / "synthetic.jsonl").write_text('{"text": "longer"}\n')
    with pytest.raises(Resumable):
        copy_release(folder, URI, bucket(tmp_path, 1)[0])
    assert "release.json" not in there(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("other.csv", "x", "has other files; give an empty folder of the bucket"),
        ("run.json", '{"run_id": "two"}', "has the release of another run; give another folder"),
        ("run.json", "[]", "has the release of another run"),
        ("release.json", '{"run_id": "one"}', "has other files"),
    ],
)
def test_files_of_somebody_else_stay(
    folder: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / name).write_text(content)
    before = there(tmp_path)
    for copy in (check_copy, copy_release):
        with pytest.raises(InputError, match=rf"^output\.copy_to: {URI} {said}"):
            copy(folder, URI, bucket(tmp_path)[0])
    assert there(tmp_path) == before


@pytest.mark.parametrize("name", ["run.json", "synthetic.jsonl"])
def test_no_link_is_followed(folder: Path, tmp_path: Path, name: str) -> None:
    kept = folder / "private" / name
    (folder / name).rename(kept)
    (folder / name).symlink_to(kept)
    with pytest.raises(InputError, match=rf"{name}: a link is not uploaded"):
        copy_release(folder, URI, bucket(tmp_path)[0])
    assert not there(tmp_path)


def test_a_new_run_finds_an_earlier_one_before_it_is_charged(folder: Path, tmp_path: Path) -> None:
    connect, _ = bucket(tmp_path)
    copy_release(folder, URI, connect)
    with pytest.raises(InputError, match="has the release of another run"):
        check_copy(tmp_path / "new", URI, connect)


def test_a_run_that_claims_the_folder_meanwhile_ends_the_other(
    folder: Path, tmp_path: Path
) -> None:
    connect, backend = bucket(tmp_path)
    claim = backend._open

    def late(path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and path.endswith("synthetic.jsonl"):
            (tmp_path / "bucket" / "run.json").write_text('{"run_id": "two"}')
        return claim(path, mode, **options)

    backend._open = late
    with pytest.raises(InputError, match="has the release of another run"):
        copy_release(folder, URI, connect)
    assert "release.json" not in there(tmp_path)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://bucket", "a folder in a bucket"), ("/mnt/notes", "a folder in a bucket"),
        ("abfs://a/b", "a folder in a bucket"), ("s3://key:secret@bucket/x", "has no place in it"),
        ("s3://bucket/x?secret_key=hunter2", "has no place in it"),
    ],
)  # fmt: skip
def test_what_is_no_place_for_a_copy(settings: Callable[..., Any], uri: str, said: str) -> None:
    with pytest.raises(InputError, match=rf"output\.copy_to: .*{said}") as raised:
        parse_config(settings(output__copy_to=uri))
    assert "hunter2" not in str(raised.value)


def test_nothing_without_noise_is_copied(settings: Callable[..., Any]) -> None:
    tree = settings(method={"name": "aug_pe", "records": 4}, privacy__epsilon=float("inf"))
    assert parse_config(tree).not_private
    tree["output"]["copy_to"] = URI
    with pytest.raises(InputError, match=r"output\.copy_to: nothing of a run without noise"):
        parse_config(tree)


def test_what_runs_on_other_records_is_not_copied(
    settings: Callable[..., Any], tmp_path: Path
) -> None:
    """A run with canaries holds private records and charges nothing."""
    config, ran = parse_config(settings(output__copy_to=URI)), list[Config]()
    _run_copy(config, tmp_path, lambda copy, show: ran.append(copy), lambda progress: None)
    assert ran[0].output.copy_to is None and ran[0].data.query is None
    tree = on_stand_in(config, {"name": "dp_sgd"}, tmp_path / "a.jsonl", tmp_path)
    assert tree["output"]["copy_to"] is None and tree["data"]["query"] is None

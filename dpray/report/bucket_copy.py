"""A finished release is copied to a bucket, `output.copy_to`.

A run needs a local folder: its lock and its renames have no counterpart in a bucket, whose objects
appear whole, but one by one. So a bucket gets the files that may be released, once the run has
finished, in this order: `run.json`, by which the run claims the folder; the other files; and last
`release.json`, with the sizes and digests of all. A release is whole if `release.json` is there,
and before a file is replaced it is removed. The same command copies again what was cut off.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow
from pyarrow import fs

from dpray.io.bucket import FILES_AT_ONCE, Connect, explained
from dpray.io.files import read_json, sha256_of
from dpray.report.card import released_files
from dpray.runs.folder import ReleaseFolder
from dpray.types import InputError, Json, Resumable

COPY_KEY = "output.copy_to"

MARKER, CLAIM = "release.json", "run.json"

COPIED_BYTES = 4 << 20


def check_copy(folder: Path, uri: str, connect: Connect | None = None) -> None:
    """Raise InputError, before a run is charged, if its release cannot be copied: the bucket is not
    there, refuses these credentials, or has other files in this folder. Raises Resumable if it
    cannot be reached."""
    _at(uri, connect, lambda filesystem, root: _check_own(folder, uri, filesystem, root))


def copy_release(folder: Path, uri: str, connect: Connect | None = None) -> None:
    """Copy the release of a finished run; one that is there already and the same stays. Raises
    InputError and Resumable as `check_copy` does, and InputError for a link among the files."""
    with closing(ReleaseFolder(str(folder))):  # one process copies at a time
        names = [CLAIM, *released_files(folder)]
        if (folder / CLAIM).is_symlink():  # of the others, `released_files` says so
            raise InputError(f"{folder / CLAIM}: a link is not uploaded; put the file itself there")
        _at(uri, connect, lambda filesystem, root: _copy(folder, names, uri, filesystem, root))


def _at(uri: str, connect: Connect | None, work: Callable[[fs.FileSystem, str], None]) -> None:
    try:
        work(*(connect or fs.FileSystem.from_uri)(uri))
    except (OSError, ValueError, RecursionError, pyarrow.ArrowException) as error:
        raise explained(error, COPY_KEY, uri) from None


def _check_own(folder: Path, uri: str, filesystem: fs.FileSystem, root: str) -> None:
    """Raise InputError if the folder in the bucket has files of another run, or of none."""
    claim = folder / CLAIM
    own = read_json(claim).get("run_id") if claim.exists() else None
    there = _json_at(filesystem, f"{root}/{CLAIM}")
    if there is None:
        name = root.partition("/")[0]
        if name and filesystem.get_file_info(name).type == fs.FileType.NotFound:
            raise InputError(f"{COPY_KEY}: {uri}: there is no such bucket")
        found = filesystem.get_file_info(
            fs.FileSelector(root, allow_not_found=True, recursive=True)
        )
        if any(info.type == fs.FileType.File for info in found):
            raise InputError(
                f"{COPY_KEY}: {uri} has other files; give an empty folder of the bucket"
            )
    elif own is None or there.get("run_id") != own:
        raise InputError(f"{COPY_KEY}: {uri} has the release of another run; give another folder")


def _copy(
    folder: Path, names: Sequence[str], uri: str, filesystem: fs.FileSystem, root: str
) -> None:
    _check_own(folder, uri, filesystem, root)
    run = read_json(folder / CLAIM)["run_id"]
    marker, files = _json_at(filesystem, f"{root}/{MARKER}"), _digests(folder, names)
    if marker == (whole := {"run_id": run, "files": files}) and _sizes_are(filesystem, root, files):
        return
    if marker is not None:
        filesystem.delete_file(f"{root}/{MARKER}")
    _put(filesystem, root, CLAIM, (folder / CLAIM).read_bytes())
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        for _ in pool.map(lambda name: _upload(filesystem, root, folder, name), names[1:]):
            pass
    # Two runs that began to copy at the same moment: the later claim is there, and the other ends.
    _check_own(folder, uri, filesystem, root)
    if _digests(folder, names) != files or not _sizes_are(filesystem, root, files):
        raise Resumable(f"{COPY_KEY}: a file of {uri} changed while it was copied; try again")
    _put(filesystem, root, MARKER, json.dumps(whole, indent=2).encode() + b"\n")


def _digests(folder: Path, names: Sequence[str]) -> dict[str, Json]:
    return {
        name: {"sha256": sha256_of(folder / name), "bytes": (folder / name).stat().st_size}
        for name in names
    }


def _sizes_are(filesystem: fs.FileSystem, root: str, files: dict[str, Json]) -> bool:
    infos = filesystem.get_file_info([f"{root}/{name}" for name in files])
    return [info.size for info in infos] == [file["bytes"] for file in files.values()]


def _json_at(filesystem: fs.FileSystem, path: str) -> Json | None:
    """Return a JSON object in the bucket, None if it is not there, {} for another file."""
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as stream:
        try:
            found = json.loads(stream.read())
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def _put(filesystem: fs.FileSystem, root: str, name: str, content: bytes) -> None:
    with filesystem.open_output_stream(f"{root}/{name}") as stream:
        stream.write(content)


def _upload(filesystem: fs.FileSystem, root: str, folder: Path, name: str) -> None:
    with (
        open(folder / name, "rb") as source,
        filesystem.open_output_stream(f"{root}/{name}") as target,
    ):
        shutil.copyfileobj(source, target, COPIED_BYTES)

"""A model's folder in a bucket: `s3://bucket/folder` or `gs://bucket/folder`.

A run looks at the bucket once, before its plan, and pins the name: `s3://bucket/folder#DIGEST`.
Every process of the run then fetches files of this digest or none. The digest covers the names,
sizes and entity tags of the files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from dpray.extras import Late
from dpray.io.files import NOT_IN_URLS, disk_is_full, holds_secret
from dpray.types import InputError, Resumable, first_line

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import fs
else:  # a training without Ray needs neither
    pyarrow, fs = Late("pyarrow"), Late("pyarrow.fs")

BUCKETS = ("s3://", "gs://")

DIGITS = 16
"""Hexadecimal digits of a digest."""

FILES_AT_ONCE = 8
"""Files that are fetched at once."""

MODEL_FILES = ("config.json", "adapter_config.json", "modules.json")
"""A model's folder has one of these."""

REMEDIES = {
    r"NO_SUCH_BUCKET|NoSuchBucket": "there is no such bucket",
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|INVALID_CLIENT_TOKEN|FORBIDDEN|Forbidden|"
    r"PERMISSION_DENIED|HTTP status 40[13]|HTTP response code 40[13]|[Cc]redential": "the bucket "
    "refuses the credentials of this machine, or it has none; give its account the right to list "
    "and read the folder, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "GOOGLE_APPLICATION_CREDENTIALS",
}
"""The meanings of the messages of `pyarrow.fs`."""

Connect = Callable[[str], "tuple[fs.FileSystem, str]"]


@dataclass(frozen=True)
class BucketFile:
    name: str
    size: int
    tag: str


@dataclass(frozen=True)
class BucketFolder:
    """The files of a folder in a bucket, at one time."""

    uri: str
    filesystem: fs.FileSystem
    root: str
    files: tuple[BucketFile, ...]

    @property
    def digest(self) -> str:
        place = self.uri.partition("?")[0].rstrip("/")
        lines = [place, *(f"{file.name} {file.size} {file.tag}" for file in self.files)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def in_bucket(model: str) -> bool:
    return model.startswith(BUCKETS)


def without_pin(model: str) -> tuple[str, str]:
    """Return a model's name without the digest that it may be pinned to, and that digest or ""."""
    uri, _, digest = model.partition("#")
    return uri, digest


def shown_name(model: str) -> str:
    """Return the public name of a pinned model: the folder's last part and the digest."""
    uri, digest = without_pin(model)
    name = unquote(PurePosixPath(uri.partition("?")[0]).name)
    return f"{name} (sha256 {digest})" if digest else name


def pinned(model: str, key: str, connect: Connect | None = None) -> str:
    """Return a bucket's model with the digest of its files now; any other name, and a pinned one,
    as it is. Raises InputError that names `key`, and Resumable, as `look` does."""
    if not in_bucket(model) or without_pin(model)[1]:
        return model
    return f"{model}#{look(model, key, connect).digest}"


def look(model: str, key: str, connect: Connect | None = None) -> BucketFolder:
    """List the files of a model's folder, without hidden ones.

    Raises InputError that names `key` for a URI with a secret, a missing bucket or folder, one that
    these credentials may not read, one that is not wholly uploaded, and files that are not those
    that `model` is pinned to; Resumable if the bucket cannot be reached.
    """
    uri, digest = without_pin(model)
    if holds_secret(uri) or "@" in uri.partition("?")[2]:
        raise InputError(f"{key}: {NOT_IN_URLS}")
    try:
        filesystem, root = (connect or fs.FileSystem.from_uri)(uri)
        found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
        sizes = {
            PurePosixPath(info.path).relative_to(root): info.size
            for info in found
            if info.type == fs.FileType.File
        }
        names = sorted(str(name) for name in sizes if is_of_model(name))
        if not {*MODEL_FILES} & {*names}:
            raise _not_whole(key, uri, "config.json")  # before each file of a bucket is asked for
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            tags = list(pool.map(lambda name: _tag(filesystem, f"{root}/{name}"), names))
        missing = _missing_shard(filesystem, root, names)
    except FileNotFoundError:
        raise InputError(f"{key}: {uri}: there is no such folder in the bucket") from None
    except (OSError, ValueError, RecursionError, pyarrow.ArrowException) as error:
        raise explained(error, key, uri) from None
    if missing:
        raise _not_whole(key, uri, missing)
    files = [
        BucketFile(name, sizes[PurePosixPath(name)], tag)
        for name, tag in zip(names, tags, strict=True)
    ]
    folder = BucketFolder(uri, filesystem, root, tuple(files))
    if digest and folder.digest != digest:
        raise InputError(
            f"{key}: the files of {uri} have changed since the run began; restore them, or choose "
            "another output.path"
        )
    return folder


def fetch(folder: BucketFolder, into: Path, key: str) -> None:
    """Copy the files into an empty folder, and make sure that each is whole and that none changed
    meanwhile. Raises InputError and Resumable as `look` does, and InputError if the disk has no
    room for them."""
    size = sum(file.size for file in folder.files)
    if (free := shutil.disk_usage(into).free) < size:
        raise InputError(
            f"{key}: {folder.uri} has {size / 2**30:.1f} GiB, and the disk of the cache "
            f"(XDG_CACHE_HOME) has {free / 2**30:.1f} GiB left"
        )

    def copy(file: BucketFile) -> None:
        place = into / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        source = folder.filesystem.open_input_stream(f"{folder.root}/{file.name}")
        with source, open(place, "xb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
        if place.stat().st_size != file.size:
            raise Resumable(f"{key}: {folder.uri}/{file.name} broke off; try again")

    try:
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            for _ in pool.map(copy, folder.files):
                pass
    except (OSError, pyarrow.ArrowException) as error:
        if disk_is_full(error):
            raise
        raise explained(error, key, folder.uri) from None
    look(f"{folder.uri}#{folder.digest}", key, lambda uri: (folder.filesystem, folder.root))


def is_of_model(name: PurePath) -> bool:
    """Return whether a file in a model's folder belongs to the model. Git, the hub's client and
    Python write to hidden folders and to `__pycache__` whenever they look at the model."""
    parts = name.parts
    return not any(part.startswith(".") or part == "__pycache__" for part in parts)


def _tag(filesystem: fs.FileSystem, path: str) -> str:
    """Return what changes with a file's content: its entity tag, or the time of its last change."""
    with filesystem.open_input_stream(path) as stream:
        known = {str(name).lower(): value for name, value in (stream.metadata() or {}).items()}
    if tag := known.get("etag"):
        return tag.decode() if isinstance(tag, bytes) else str(tag)
    return str(filesystem.get_file_info(path).mtime_ns)


def _not_whole(key: str, uri: str, name: str) -> InputError:
    return InputError(
        f"{key}: {uri} has no {name}: it is no model's folder, or not wholly uploaded"
    )


def _missing_shard(filesystem: fs.FileSystem, root: str, names: list[str]) -> str | None:
    """Return a file of weights that a whole model would have here, or None. Raises ValueError for
    a file that is no index."""
    for index in names:
        if index.endswith(".safetensors.index.json"):
            with filesystem.open_input_stream(f"{root}/{index}") as stream:
                read = json.loads(stream.read())
            found = read.get("weight_map") if isinstance(read, dict) else None
            if not isinstance(found, dict) or not all(isinstance(x, str) for x in found.values()):
                raise ValueError(f"{index} is no index of a model's weights")
            shards, folder = {*found.values()}, PurePosixPath(index).parent
            absent = {str(folder / shard) for shard in shards} - {*names}
            if absent:
                return min(absent)
    return None


def explained(error: Exception, key: str, uri: str) -> InputError | Resumable:
    """Return the error of a file system as one that names the key and the remedy."""
    line = first_line(error)
    for pattern, meaning in REMEDIES.items():
        if re.search(pattern, line):
            return InputError(f"{key}: {uri}: {meaning}")
    if isinstance(error, OSError):
        return Resumable(f"{key}: {uri} cannot be reached ({line}); try again later")
    return InputError(f"{key}: {uri}: {line}")

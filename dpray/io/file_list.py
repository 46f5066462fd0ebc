"""The files that a path names, and their digests.

Digests bind the files to the budget that pays for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path, PurePosixPath
from threading import Event

import pyarrow.fs
from pyarrow.fs import FileSelector, FileType

from dpray.io.files import NOT_IN_URLS, holds_secret, names_cloud
from dpray.io.formats import (
    CONTENTS,
    ENDINGS,
    ONE_TEXT,
    base_name,
    folder_columns,
    kind_of,
    without_compression,
)
from dpray.types import InputError, first_line

SAVED, SAVED_SPLITS, FILES = "state.json", "dataset_dict.json", "_data_files"
"""`save_to_disk` of Hugging Face's `datasets` writes the first into the folder of a Dataset, with
its files under the third, and the second into that of a DatasetDict, which has a folder for each
split."""

SCHEMES = (
    "file://",
    "hf://",
    "s3://",
    "gs://",
    "gcs://",
    "abfs://",
    "abfss://",
    "hdfs://",
    "viewfs://",
)
"""The beginnings of the URIs that are read."""

DEEPEST = 6
"""Levels of folders that are looked into for files that an error names."""

REMEDIES = {
    (".tar", ".tgz", ".tbz", ".tbz2", ".7z", ".rar", ".xz", ".lz4"): "unpack it",
    (".gzip", ".zstd", ".bzip2"): "end its name in .gz, .zst or .bz2",
    (".xls", ".xlsm", ".xlsb", ".ods"): "save it as .xlsx",
    (".msg", ".pst"): "save the mails as .eml or .mbox",
    (".db", ".sqlite", ".sqlite3"): "an SQLite file? data.path=sqlite:///office.db with "
    "data.query='SELECT ...' reads it",
}
"""Remedies for files that are not read, by the endings of their names."""

TABLE_LOGS = {
    "_delta_log": (
        ".json",
        "a Delta table, whose files also have deleted rows; write one version of it to a file: "
        "pyarrow.parquet.write_table(deltalake.DeltaTable(FOLDER).to_pyarrow_table(), FILE)",
    ),
    "metadata": (
        ".metadata.json",
        "an Iceberg table, whose files also have deleted rows; write one snapshot of it to a file: "
        "pyarrow.parquet.write_table(TABLE.scan().to_arrow(), FILE)",
    ),
}
"""The folder in a table's folder that has its log, with the ending of a file there, and how the
table is refused. The files of rows that were deleted, and of earlier versions, stay next to it."""

READERS = 8
"""Files that are hashed at once: a core hashes about as fast as a disk reads, or faster."""

READ_BYTES = 1 << 20


def list_files(path: str, key: str = "data.path", *, once: bool = True) -> list[str]:
    """List the files that a path, a folder, a glob (`*`, `?`) or a cloud URI names, sorted.

    A folder's files are those in it that are read; a folder that `save_to_disk` wrote has its
    Arrow files. Texts and mails (`.txt`, `.eml`), one record each, are those in a folder without
    other files that are read, and in the folders below. Folders `name=value` are read through.
    Names that begin with a dot are left out, and links to folders within a folder or a glob are not
    followed.

    It opens no file with records. Raises InputError that names `key` if there is no such file, if
    none is of a kind that is read, if a record would be read twice (with `once`), and for a URI
    with a password: a release holds its configuration.
    """
    if holds_secret(path):
        raise InputError(f"{key}: {NOT_IN_URLS}")
    if path.startswith("hf://"):
        return [path]
    if names_cloud(path) and not path.startswith(SCHEMES):
        # Without the path: a link often carries a token.
        listed = ", ".join(SCHEMES)
        raise InputError(
            f"{key}: nothing is read from there; download it, or give a path, {listed}; a database "
            "takes data.query"
        )
    try:
        filesystem, root = filesystem_of(path)
        _refuse_table(filesystem, root, f"{key}: {path}")
        scheme = path.split("://", 1)[0] + "://" if "://" in path else ""
        found = [scheme + file for file in sorted(_named(filesystem, root, path, key))]
        if once:
            _check_distinct(found, key)
    except (OSError, ValueError, RuntimeError, pyarrow.ArrowException) as error:
        raise InputError(f"{key}: {path}: {first_line(error)}") from None
    return found


def identity(file: str) -> tuple[int, int] | str:
    """Return what all names of one file have in common, by any of its links and schemes."""
    scheme, _, name = file.rpartition("://")
    if scheme == "hf":
        return name if "#" in name else f"{name}#train"  # as `read_rows` has it
    if scheme not in ("", "file"):
        return name  # in a cloud
    status = os.stat(name)
    return status.st_dev, status.st_ino


def _check_distinct(files: Sequence[str], key: str) -> None:
    """Raise InputError for two files with the same records: a record that is read twice counts
    twice, and its epsilon doubles."""
    one_file: dict[object, int] = {}
    one_content: dict[str, int] = {}
    for number, file in enumerate(files):
        first = one_file.setdefault(identity(file), number)
        if first != number:
            raise InputError(f"{key}: {files[first]} and {file} are one file; remove one name")
        for name in _content_names(file):
            first = one_content.setdefault(name, number)
            if first != number:
                raise InputError(
                    f"{key}: {files[first]} and {file} seem to be one file and its compressed "
                    "form; move one elsewhere"
                )


def _content_names(file: str) -> list[str]:
    """Return the names that a file may have without its compression. A `.zip` often has the name
    of its file without that file's ending."""
    name, compression = without_compression(file)
    while compression is not None:
        name, compression = without_compression(name)
    stem, dot, ending = name.rpartition(".")
    if dot + ending.lower() in CONTENTS:
        return [stem + dot + ending.lower()]
    return [name + ending for ending in CONTENTS]


def filesystem_of(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return a path's file system, and its name there."""
    if "://" in path:
        found: tuple[pyarrow.fs.FileSystem, str] = pyarrow.fs.FileSystem.from_uri(path)
        return found
    return pyarrow.fs.LocalFileSystem(), str(Path(path).expanduser().absolute())


def _refuse_table(filesystem: pyarrow.fs.FileSystem, root: str, where: str) -> None:
    """Raise InputError for a folder of a table, a part of it, and a glob in it."""
    place = PurePosixPath(re.split("[*?]", root)[0])
    folders = [each for each in (place, *place.parents)[:4] if each.name]
    for folder, (name, (ending, what)) in product(folders, TABLE_LOGS.items()):
        log, found = FileSelector(f"{folder}/{name}", allow_not_found=True), []
        with suppress(OSError):  # above what may be read, a bucket may refuse to look
            found = filesystem.get_file_info(log)
        if any(info.path.endswith(ending) for info in found):
            raise InputError(f"{where}: {what}")


def _named(filesystem: pyarrow.fs.FileSystem, root: str, path: str, key: str) -> list[str]:
    if any(sign in root for sign in "*?"):
        if "**" in root:
            raise InputError(f"{key}: {path}: ** has no meaning here; write */ for each level")
        files = _glob(filesystem, root)
        if not files:
            raise InputError(f"{key}: no file matches {path}")
        return _read_ones(files, path, key)
    info = filesystem.get_file_info(root)
    if info.type == FileType.NotFound:
        raise InputError(f"{key}: no such file or folder: {path}")
    if info.type == FileType.Directory:
        return _in_folder(filesystem, root.rstrip("/"), path, key)
    if (kind := kind_of(root)) in ONE_TEXT:
        raise InputError(
            f"{key}: {path}: one .{kind} file is one text; give a folder of them, or make it JSONL "
            "or CSV with a record in each line"
        )
    if not PurePosixPath(root).suffix.strip("."):
        raise InputError(
            f"{key}: {path}: a name without an ending; end it in that of its kind: {ENDINGS}"
        )
    return _read_ones([root], path, key)


def _in_folder(filesystem: pyarrow.fs.FileSystem, root: str, path: str, key: str) -> list[str]:
    files = _glob(filesystem, f"{root}/*")
    names = {base_name(file) for file in files}
    if SAVED in names:
        return _saved(filesystem, root, path, key)
    if SAVED_SPLITS in names:
        raise InputError(f"{key}: {path}: a DatasetDict; give the folder of one of its splits")
    files += _partitions(filesystem, root)
    if tables := [file for file in files if kind_of(file) not in (None, *ONE_TEXT)]:
        return tables
    texts = {*files, *_glob(filesystem, f"{root}/*/*")}
    if found := [file for file in texts if kind_of(file) in ONE_TEXT]:
        if any(kind_of(file) in ONE_TEXT for file in _glob(filesystem, f"{root}/*/*/*")):
            setting = _pasted(f"{path.rstrip('/')}/*/*/*.{kind_of(found[0])}", key)
            raise InputError(f"{key}: {path}: texts lie at several depths; give {setting}")
        return found
    raise InputError(f"{key}: {path}: {_why_none(filesystem, root, path, key)}")


def _partitions(filesystem: pyarrow.fs.FileSystem, root: str) -> list[str]:
    """Return the files in the folders `name=value` of a folder, at any depth."""
    folders, files = [root], []
    while folders := _folders(filesystem, folders, "*=*"):
        files += _listed(filesystem, folders, "*", FileType.File)
    return files


def _why_none(filesystem: pyarrow.fs.FileSystem, root: str, path: str, key: str) -> str:
    """Return what a folder holds in place of files that are read, and the remedy."""
    others: list[str] = []
    for level in range(1, DEEPEST + 1):
        files = _glob(filesystem, root + "/*" * level)
        if read := [file for file in files if kind_of(file) is not None]:
            endings = {PurePosixPath(file).suffix for file in read}
            glob = path.rstrip("/") + "/*" * level + ("".join(endings) if len(endings) == 1 else "")
            return f"the files that are read lie deeper ({len(read):,}); give {_pasted(glob, key)}"
        others += [file for file in files if not base_name(file).startswith("_")]
    if not others:
        return f"the folder holds no files that are read: {ENDINGS}"
    more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
    return f"{others[0].removeprefix(root + '/')}{more}: {_not_read(others[0])}"


def _pasted(path: str, key: str) -> str:
    """Return a path as a shell takes it after a command: with its key, if that is no option."""
    return shlex.quote(f"{key}={path}" if "." in key else path)


def _not_read(file: str) -> str:
    """Return why a file is not read, and the remedy."""
    name, compression = without_compression(base_name(file).lower())
    ending = PurePosixPath(name).suffix
    if compression is not None and ending != ".tar":
        name, ending = base_name(file), PurePosixPath(file).suffix.lower()
    if not ending.strip("."):
        return "a name without an ending; end the names of texts in .txt"
    found = next((remedy for endings, remedy in REMEDIES.items() if ending in endings), None)
    return (
        f"a kind of file that is not read ({ending}); {found or f'convert it to one of {ENDINGS}'}"
    )


def _saved(filesystem: pyarrow.fs.FileSystem, root: str, path: str, key: str) -> list[str]:
    """Return the Arrow files of a folder that `save_to_disk` wrote."""
    with filesystem.open_input_stream(f"{root}/{SAVED}") as stream:
        content = stream.read()
    try:
        files = [f"{root}/{base_name(each['filename'])}" for each in json.loads(content)[FILES]]
    except (ValueError, LookupError, TypeError, AttributeError):
        files = []
    if not files:
        raise InputError(f"{key}: {path}/{SAVED} is not that of save_to_disk")
    return files


def _read_ones(files: list[str], path: str, key: str) -> list[str]:
    """Return the files of kinds that are read. Raises InputError if there is none."""
    if found := [file for file in files if kind_of(file) is not None]:
        return found
    raise InputError(f"{key}: {path}: {_not_read(files[0])}")


def _glob(filesystem: pyarrow.fs.FileSystem, pattern: str) -> list[str]:
    """Return the files that match. Only `*` and `?` are special; a bracket is a part of a name.

    A local link to a folder is not followed: it may lead to files that are listed already."""
    base = re.split("[*?]", pattern)[0].rsplit("/", 1)[0] or "/"
    *folders, last = [level for level in pattern[len(base) :].split("/") if level]
    found = [base]
    for level in folders:
        found = _folders(filesystem, found, level)
    return sorted(_listed(filesystem, found, last, FileType.File))


def _folders(filesystem: pyarrow.fs.FileSystem, above: Sequence[str], level: str) -> list[str]:
    is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    below = _listed(filesystem, above, level, FileType.Directory)
    return [folder for folder in below if not (is_local and os.path.islink(folder))]


def _listed(
    filesystem: pyarrow.fs.FileSystem, folders: Sequence[str], level: str, kind: FileType
) -> list[str]:
    selectors = [FileSelector(folder, allow_not_found=True) for folder in folders]
    infos = [info for each in selectors for info in filesystem.get_file_info(each)]
    names = level.replace("[", "[[]")
    found = [i.path for i in infos if i.type == kind and fnmatchcase(i.base_name, names)]
    return [path for path in found if level[0] == "." or not base_name(path).startswith(".")]


REPORT_SECONDS = 1.0
"""Between two calls of `on_share`."""


def file_digests(path: str, on_share: Callable[[float], None] = lambda share: None) -> list[bytes]:
    """Return the SHA-256 of each file that `path` names, in order, or an `hf://` name itself. They
    are as private as the files: a digest confirms a guess of all records.

    `on_share` is called every `REPORT_SECONDS` with the share of the files that is read. Every call
    reads all files: a file may change and keep its size and its time of change, and both promises
    that a digest keeps are about privacy (docs/privacy.md, section 6.2).
    """
    files = list_files(path)
    read = [0.0] * len(files)
    stopped = Event()
    pool = ThreadPoolExecutor(READERS)
    try:
        numbers = range(len(files))
        digests = [pool.submit(_hash_file, files[n], read, n, stopped) for n in numbers]
        while wait(digests, timeout=REPORT_SECONDS).not_done:
            on_share(sum(read) / len(files))
        return [digest.result() for digest in digests]
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def total_size(files: Sequence[str]) -> int:
    """Return the bytes of files that one path names; 0 for those of which nobody knows, as an
    `hf://` name."""
    if files[0].startswith("hf://"):
        return 0
    filesystem = filesystem_of(files[0])[0]
    infos = filesystem.get_file_info([filesystem_of(file)[1] for file in files])
    return sum(info.size or 0 for info in infos)


def file_digest(file: str) -> bytes:
    """Return one of the digests of `file_digests`."""
    return _hash_file(file, [0.0], 0, Event())


def _hash_file(file: str, read: list[float], number: int, stopped: Event) -> bytes:
    """Hash a file, and keep the share of it that is read in `read[number]`."""
    if file.startswith("hf://"):
        return file.encode()
    filesystem, name = filesystem_of(file)
    sha256, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    try:
        size = filesystem.get_file_info(name).size or 1
        with filesystem.open_input_stream(name, compression=None) as stream:
            while not stopped.is_set() and (found := stream.readinto(buffer)):
                sha256.update(buffer[:found])
                read[number] = min(1.0, read[number] + found / size)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({type(error).__name__})") from None
    if kind_of(name) in ONE_TEXT:
        sha256.update(f"\0{name.split('/')[-2]}".encode())  # the label
    elif named := folder_columns(name):
        sha256.update(f"\0{sorted(named.items())}".encode("utf-8", "surrogatepass"))
    return sha256.digest()


def fingerprint(digests: Iterable[bytes]) -> str:
    """Return the SHA-256 over the digests of all files. It changes if one of them does."""
    return hashlib.sha256(b"".join(digests)).hexdigest()

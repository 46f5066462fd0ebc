"""`list_files` finds the files that a path names."""

from __future__ import annotations

import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import pyarrow.fs

from dpray.io.formats import ENDINGS, base_name, kind_of
from dpray.types import InputError, first_line

PASSWORD = re.compile(r"\w[\w+.-]*://[^@/]*:(?!\d+/)[^@]*@")
"""It matches the beginning of a URI with a password, which may hold a slash and is not a port."""

SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""`save_to_disk` of Hugging Face's `datasets` writes the first into the folder of a Dataset, and
the second into that of a DatasetDict, which has a folder for each split."""

CONVERTED = dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV")
CONVERTED |= dict.fromkeys((".pdf", ".docx", ".doc", ".html"), "save its text as .txt")
CONVERTED |= dict.fromkeys((".tar", ".tgz", ".7z", ".rar"), "unpack it")


def list_files(path: str, key: str = "data.path") -> list[str]:
    """List the files that a path, a folder, a glob (`*`, `?`) or a cloud URI names, sorted.

    A folder's files are those in it that are read; a folder that `save_to_disk` wrote has its
    Arrow files. Texts (`.txt`), one record each, are those in a folder without other files that
    are read, and in the folders below. Names that begin with a dot are left out.

    It opens no file with records. Raises InputError that names `key` where there is no such file,
    where none is of a kind that is read, and for a URI with a password: a release holds its
    configuration.
    """
    if PASSWORD.match(path):
        raise InputError(f"{key}: a password has no place in it; give it in the environment")
    if path.startswith("hf://"):
        return [path]
    try:
        filesystem, root = filesystem_of(path)
        found = _named(filesystem, root, path, key)
    except (OSError, ValueError, RuntimeError, pyarrow.ArrowException) as error:
        raise InputError(f"{key}: {path}: {first_line(error)}") from None
    scheme = path.split("://", 1)[0] + "://" if "://" in path else ""
    return [scheme + file for file in sorted(found)]


def filesystem_of(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return a path's file system, and its name there."""
    if "://" in path:
        found: tuple[pyarrow.fs.FileSystem, str] = pyarrow.fs.FileSystem.from_uri(path)
        return found
    return pyarrow.fs.LocalFileSystem(), str(Path(path).expanduser().absolute())


def _named(filesystem: pyarrow.fs.FileSystem, root: str, path: str, key: str) -> list[str]:
    if any(sign in root for sign in "*?"):
        files = _glob(filesystem, root)
        if not files:
            raise InputError(f"{key}: no file matches {path}")
        return _read_ones(files, path, key)
    info = filesystem.get_file_info(root)
    if info.type == pyarrow.fs.FileType.NotFound:
        raise InputError(f"{key}: no such file or folder: {path}")
    if info.type == pyarrow.fs.FileType.Directory:
        return _in_folder(filesystem, root.rstrip("/"), path, key)
    if kind_of(root) == "txt":
        raise InputError(
            f"{key}: {path}: one .txt file is one text; give a folder of them, or make it JSONL or "
            "CSV with a record in each line"
        )
    return _read_ones([root], path, key)


def _in_folder(filesystem: pyarrow.fs.FileSystem, root: str, path: str, key: str) -> list[str]:
    files = _glob(filesystem, f"{root}/*")
    names = {base_name(file) for file in files}
    if SAVED in names:
        return _saved(filesystem, root, path, key)
    if SAVED_SPLITS in names:
        with filesystem.open_input_stream(f"{root}/{SAVED_SPLITS}") as stream:
            splits = json.loads(stream.read())["splits"]
        raise InputError(
            f"{key}: {path}: a DatasetDict of {', '.join(splits)}; give the folder of one of them"
        )
    tables = [file for file in files if kind_of(file) not in (None, "txt")]
    if tables:
        return tables
    files += _glob(filesystem, f"{root}/*/*")
    return _read_ones([file for file in files if kind_of(file) in (None, "txt")], path, key)


def _saved(filesystem: pyarrow.fs.FileSystem, root: str, path: str, key: str) -> list[str]:
    """Return the Arrow files of a folder that `save_to_disk` wrote."""
    with filesystem.open_input_stream(f"{root}/{SAVED}") as stream:
        state = json.loads(stream.read())
    try:
        return [f"{root}/{base_name(file['filename'])}" for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"{key}: {path}/{SAVED} is not that of save_to_disk") from None


def _read_ones(files: list[str], path: str, key: str) -> list[str]:
    """Return the files of kinds that are read. Raises InputError where there is none."""
    if found := [file for file in files if kind_of(file) is not None]:
        return found
    if not files:
        raise InputError(f"{key}: {path}: the folder holds no files that are read: {ENDINGS}")
    endings = Counter(PurePosixPath(file).suffix.lower() or "no ending" for file in files)
    [(most, _)] = endings.most_common(1)
    advice = f"; {CONVERTED[most]}" if most in CONVERTED else ""
    raise InputError(
        f"{key}: {path}: a kind of file that is not read ({most}){advice}. Read are {ENDINGS}"
    )


def _glob(filesystem: pyarrow.fs.FileSystem, pattern: str) -> list[str]:
    fixed = pattern[: min((pattern.find(s) for s in "*?" if s in pattern), default=len(pattern))]
    base = fixed.rsplit("/", 1)[0] or "/"
    recursive = "/" in pattern[len(base) + 1 :]
    selector = pyarrow.fs.FileSelector(base, allow_not_found=True, recursive=recursive)
    # Only `*` and `?` are special; a bracket is a part of a name.
    plain = pattern.replace("[", "[[]")
    return [
        info.path
        for info in filesystem.get_file_info(selector)
        if info.is_file
        and fnmatchcase(info.path, plain)
        and not base_name(info.path).startswith(".")
    ]

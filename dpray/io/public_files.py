"""Files that are said to be public are not the private ones by another name."""

from __future__ import annotations

import os
from contextlib import suppress

from dpray.io.file_list import list_files
from dpray.types import InputError


def public_files(path: str, key: str, private: str) -> list[str]:
    """List the files that `path` names, which has to be public: `list_files`. Raises InputError
    that names `key` where one of them is one of `private`, the configuration's `data.path`."""
    files = list_files(path, key)
    private_files: list[str] = []
    with suppress(InputError):  # the private data may be elsewhere: a plan does not need it
        private_files = list_files(private)
    if {*map(_identity, files)} & {*map(_identity, private_files)}:
        raise InputError(f"{key}: {path} is data.path itself; give public records")
    return files


def _identity(file: str) -> tuple[int, int] | str:
    """Return what two names of one file have in common, by any of its links and schemes."""
    scheme, _, name = file.rpartition("://")
    if scheme == "hf":
        return name if "#" in name else f"{name}#train"  # as `read_rows` has it
    if scheme not in ("", "file"):
        return name  # in a cloud
    status = os.stat(name)
    return status.st_dev, status.st_ino

"""Files that are said to be public are not the private ones by another name."""

from __future__ import annotations

from contextlib import suppress

from dpray.io.file_list import identity, list_files
from dpray.types import InputError


def public_files(path: str, key: str, private: str) -> list[str]:
    """List the files that `path` names, which has to be public: `list_files`. Raises InputError
    that names `key` where one of them is one of `private`, the configuration's `data.path`."""
    files = list_files(path, key)
    private_files: list[str] = []
    with suppress(InputError):  # the private data may be elsewhere: a plan does not need it
        private_files = list_files(private, once=False)
    if {*map(identity, files)} & {*map(identity, private_files)}:
        raise InputError(f"{key}: {path} is data.path itself; give public records")
    return files

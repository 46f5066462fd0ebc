"""Digests of files with records bind them to the budget that pays for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from dpray.io.file_list import filesystem_of, list_files
from dpray.io.formats import kind_of
from dpray.types import InputError

READERS = 8
"""So many files are hashed at once: a core hashes about as fast as a disk reads, or faster."""

READ_BYTES = 1 << 20


def file_digests(
    path: str, on_share: Callable[[float], None] = lambda share: None, every: float = 1.0
) -> list[bytes]:
    """Return the SHA-256 of each file that `path` names, in order, or an `hf://` name itself. They
    are as private as the files: whoever can guess all records could confirm the guess.

    Several files are read at once, each from its beginning to its end; `on_share` is called `every`
    so many seconds with the share of the files that is read. Nothing that an earlier call found is
    used: a file may change and keep its size and its time of change, and both promises that a
    digest keeps are about privacy (docs/privacy.md, section 6.2).
    """
    files = [_HashedFile(file) for file in list_files(path)]
    pool = ThreadPoolExecutor(READERS)
    try:
        digests = [pool.submit(file.digest) for file in files]
        while wait(digests, timeout=every).not_done:
            on_share(sum(file.share for file in files) / len(files))
        return [digest.result() for digest in digests]
    finally:
        for file in files:
            file.stopped = True
        pool.shutdown(cancel_futures=True)


class _HashedFile:
    """A `_HashedFile` is hashed in one thread, and looked at and stopped in another."""

    def __init__(self, file: str) -> None:
        self.file, self.stopped = file, False
        self._size, self._read = 1, 0

    @property
    def share(self) -> float:
        return min(1.0, self._read / self._size)

    def digest(self) -> bytes:
        if self.file.startswith("hf://"):
            return self.file.encode()
        filesystem, name = filesystem_of(self.file)
        sha256, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
        try:
            self._size = filesystem.get_file_info(name).size or 1
            with filesystem.open_input_stream(name, compression=None) as stream:
                while not self.stopped and (found := stream.readinto(buffer)):
                    sha256.update(buffer[:found])
                    self._read += found
        except OSError as error:
            raise InputError(f"{self.file}: cannot be read ({type(error).__name__})") from None
        if kind_of(name) == "txt":
            sha256.update(f"\0{name.split('/')[-2]}".encode())  # the label
        return sha256.digest()


def fingerprint(digests: Iterable[bytes]) -> str:
    """Return the SHA-256 over the digests of all files, which changes where one of them does."""
    return hashlib.sha256(b"".join(digests)).hexdigest()

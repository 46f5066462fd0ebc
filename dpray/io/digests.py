"""Digests of files with records bind them to the budget that pays for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

from dpray.io.file_list import filesystem_of, list_files
from dpray.io.formats import kind_of
from dpray.types import InputError

READERS = 8
"""Files that are hashed at once: a core hashes about as fast as a disk reads, or faster."""

READ_BYTES = 1 << 20


def file_digests(
    path: str, on_share: Callable[[float], None] = lambda share: None, every: float = 1.0
) -> list[bytes]:
    """Return the SHA-256 of each file that `path` names, in order, or an `hf://` name itself. They
    are as private as the files: whoever can guess all records could confirm the guess.

    `on_share` is called every so many seconds with the share of the files that is read. Nothing
    that an earlier call found is used: a file may change and keep its size and its time of change,
    and both promises that a digest keeps are about privacy (docs/privacy.md, section 6.2).
    """
    files = list_files(path)
    read = [0.0] * len(files)
    stopped = Event()
    pool = ThreadPoolExecutor(READERS)
    try:
        numbers = range(len(files))
        digests = [pool.submit(_digest, files[n], read, n, stopped) for n in numbers]
        while wait(digests, timeout=every).not_done:
            on_share(sum(read) / len(files))
        return [digest.result() for digest in digests]
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def _digest(file: str, read: list[float], number: int, stopped: Event) -> bytes:
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
    if kind_of(name) == "txt":
        sha256.update(f"\0{name.split('/')[-2]}".encode())  # the label
    return sha256.digest()


def fingerprint(digests: Iterable[bytes]) -> str:
    """Return the SHA-256 over the digests of all files. It changes if one of them does."""
    return hashlib.sha256(b"".join(digests)).hexdigest()

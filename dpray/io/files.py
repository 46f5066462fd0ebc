"""The files that dpray writes: whole after a crash, and private ones for their owner only.

The second half judges places that cannot keep a ledger: folders that Ray deletes, disks on a
network, and files with more than one name. A place is judged by its resolved path: links are
followed, environment variables are not asked.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

from dpray.types import InputError

SQLITE_FULL = ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")
"""SQLite's names of a full disk; the second is that of the file next to a write-ahead log, which
could not grow ("disk I/O error")."""

DISK_FULL = "output.path: no space is left on its disk, or on the ledger's; make room"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

NOT_IN_URLS = "a password, key or token has no place in it; give it in the environment"

_PASSWORD = re.compile(r"\w[\w+.-]*:/+[^@/]*:(?!\d+/)[^@]*@")
"""It matches the beginning of a URI with a password, which may hold a slash and is not a port."""

_TOKEN = re.compile(
    r"\w[\w+.-]*:/.*[?&][^=&]*(pass|pwd|odbc_connect|secret|token|key|sig|credentials?)[^=&]*="
    r"(?<!_kind=)",
    re.IGNORECASE | re.DOTALL,
)
"""It matches a URI with a key of its query that is named like a secret, as `sig` of Azure is."""


def holds_secret(text: str) -> bool:
    """Return whether a text is a URI with a password, a key or a token. A release holds its
    configuration, and errors show paths."""
    return bool(_PASSWORD.match(text) or _TOKEN.match(text))


def names_cloud(path: str | Path) -> bool:
    """Return whether a path begins like a URI: as a local path, `s3://bucket/run` would be a folder
    `s3:`.

    What dpray writes needs a local file system: the lock and the renames that make a release whole
    have no counterpart in an object store.
    """
    return _SCHEME.match(str(path)) is not None


def refuse_cloud(path: Path, key: str) -> None:
    """Raise InputError that names the key for a path that begins like a URI."""
    if names_cloud(path):
        # Without the path, which has lost a slash of its URI.
        raise InputError(f"{key}: no cloud path; copy what is written to a cloud afterwards")


def check_writable(path: Path, key: str) -> None:
    """Raise InputError that names the key if a file could not be written. Makes nothing."""
    refuse_cloud(path, key)
    try:
        made = next(place for place in (path.parent, *path.parent.parents) if place.exists())
        if path.is_dir():
            raise IsADirectoryError
        with TemporaryFile(dir=made):
            pass
    except (OSError, ValueError) as error:
        raise InputError(f"{key}: cannot write {path} ({type(error).__name__})") from None


def disk_is_full(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, says that no space is left: the
    system's, or SQLite's, which SQLAlchemy has as `orig`. Ray has what a task raised as `cause`."""
    seen: list[BaseException | None] = [error]
    while seen:
        if (found := seen.pop()) is None:
            continue
        if isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if getattr(found, "sqlite_errorname", None) in SQLITE_FULL:
            return True
        seen += [found.__cause__, getattr(found, "orig", None), getattr(found, "cause", None)]
    return False


def make_private(folder: Path) -> None:
    """Make the folder for its owner only; an existing one is closed to others. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def owners_only(path: str, flags: int) -> int:
    """Open a file for its owner only: an `opener` of `open`."""
    return os.open(path, flags, 0o600)


def read_json(path: Path | Traversable, key: str = "") -> dict[str, Any]:
    """Read a JSON object. Raises InputError that names the path and, if it is given, the key."""
    where = f"{key}: " if key else ""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"{where}cannot read {path}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{where}{path} is not JSON") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}{path} is not a JSON object")
    return value


def touch_private(path: str) -> None:
    """Make an empty file for its owner only if there is none; SQLite gives its journals the same
    rights. A path that cannot be a file raises nothing here: opening it will.

    A file that is there is not opened: closing it would give up the locks that SQLite holds on it
    in this process."""
    with suppress(OSError):
        os.close(owners_only(os.path.realpath(path), os.O_CREAT | os.O_EXCL))


def write_durably(path: Path, text: str | Iterable[str], *, private: bool = False) -> None:
    """Replace a file with a text, or with texts one after the other. After a crash it holds the old
    text or the new one, whole. With `private` it is for its owner only. What cannot be written
    takes no room."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    opener = owners_only if private else None
    try:
        with open(temporary, "w", encoding="utf-8", opener=opener) as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


RAY_RESOURCES = "runtime_resources"
RAY_PACKAGES = ("working_dir_files", "py_modules_files")
"""Below its session's folder, Ray unpacks what a job brings along into
`runtime_resources/working_dir_files/_ray_pkg_HASH` (a package from elsewhere has another last
name), and deletes it once no job uses it: see `DEFAULT_RUNTIME_ENV_DIR_NAME` in
`ray._private.ray_constants`, and `working_dir` and `py_modules` in `ray._private.runtime_env`."""

NETWORK = {
    "9p", "afs", "beegfs", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cifs", "davfs", "davfs2",
    "fuse", "gcsfuse", "gfs2", "glusterfs", "goofys", "gpfs", "juicefs", "lustre", "mount-s3",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "rclone", "s3fs", "seaweedfs", "smb3",
    "smbfs", "sshfs",
}  # fmt: skip
"""Several machines may mount file systems of these types. `fuse` alone is a program that gives no
name, as those for buckets do."""


def in_ray_package(path: str) -> bool:
    """Return whether a path lies in a folder that Ray unpacked for a job and will delete."""
    parts = Path(os.path.realpath(path)).parts
    return any(
        folder == RAY_RESOURCES and kind in RAY_PACKAGES for folder, kind in pairwise(parts[:-1])
    )


def names_of_file(path: str) -> int:
    """Return the number of a file's hard links; 0 if there is no file."""
    try:
        return os.stat(path).st_nlink
    except OSError:
        return 0


def mounted() -> list[tuple[str, str]]:
    """Return where each file system is mounted, and its type, in the order of mounting."""
    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def is_mounted_alone(path: str) -> bool:
    """Return whether a path is a mount point itself, as a single file in a container may be."""
    return os.path.realpath(path) in dict(mounted())


def network_file_system(path: str) -> str | None:
    """Return the type of the network file system that holds a path; None for a local or an unknown
    one."""
    place, longest, kind = os.path.realpath(path), 0, ""
    for point, found in mounted():
        # The later one of two at one place hides the other.
        if os.path.commonpath([point, place]) == point and len(point) >= longest:
            longest, kind = len(point), found.removeprefix("fuse.")
    return kind if kind in NETWORK else None

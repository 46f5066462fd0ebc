"""This module finds places that cannot keep a ledger: folders that Ray deletes, disks on a network,
and files with more than one name.

A place is judged by its resolved path: links are followed, environment variables are not asked.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Linux lists the mounted file systems here; other systems have no such file, and nothing is
refused there."""

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


def is_mounted_alone(path: str, mounts: Path = MOUNTS) -> bool:
    """Return whether a path is a mount point itself, as a single file in a container may be."""
    return os.path.realpath(path) in map(_mount_point, _table(mounts))


def network_file_system(path: str, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the network file system that holds a path; None for a local or an unknown
    one."""
    kind = _file_system(os.path.realpath(path), _table(mounts)).removeprefix("fuse.")
    return kind if kind in NETWORK else None


def _file_system(path: str, table: list[str]) -> str:
    """Return the type of the longest mount point above `path`; the later one of two at one
    place."""
    longest, found = 0, ""
    for line in table:
        point = _mount_point(line)
        if os.path.commonpath([point, path]) == point and len(point) >= longest:
            longest, found = len(point), line.partition(" - ")[2].split(" ")[0]
    return found


def _table(mounts: Path) -> list[str]:
    """Return the lines of the table of mounts, none if the system has no such table."""
    try:
        return mounts.read_text(errors="surrogateescape").split("\n")[:-1]
    except OSError:
        return []


def _mount_point(line: str) -> str:
    # Blanks and line ends in a path are written in octal.
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4])

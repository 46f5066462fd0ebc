"""Models that dpray makes of other files are kept in the user's cache."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from platformdirs import user_cache_path

from dpray.io.files import check_writable, sync_all


def cached(name: str, cache: Path | None = None) -> Path:
    """Return the path of the folder `name` of the cache, which may not exist yet."""
    return (cache or user_cache_path("dpray")) / name


def made_once(name: str, make: Callable[[Path], None], cache: Path | None = None) -> Path:
    """Return the folder `name` of the cache, the user's own by default. At the first call `make`
    fills it, and it appears under its name when it is whole, for its owner alone. One process makes
    it, and others wait meanwhile. Raises InputError where the cache cannot be written."""
    folder = cached(name, cache)
    if folder.is_dir():
        return folder
    check_writable(folder, "the cache (XDG_CACHE_HOME)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            with TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as part:
                # The standard output is the command's: saving a model prints there.
                with contextlib.redirect_stdout(sys.stderr):
                    make(Path(part))
                sync_all(Path(part))
                Path(part).rename(folder)
    return folder

"""A run's output folder: staged and published parts, and at the end the release.

```
synthetic.jsonl, privacy_report.json, privacy_report.html, run.json     may be released
table.jsonl, table.parquet                         may be released, where a record is a table's row
private/                                           never, and only its owner can open it
  lock, staging/ (not yet committed), parts/ (committed), room (on the disk, for what is drawn)
  first/ (the folder of a chain's first run)
```
A part is the output of some batches by one attempt (`*.jsonl`), or of one mechanism (`*.json`). It
is written and flushed to disk in `staging`, then the ledger commits its batches, then it moves to
`parts`. A crash between the last two leaves a committed part in `staging`, which `recover` moves;
`recover` destroys what the ledger did not commit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dpray.io.files import (
    disk_is_full,
    in_ray_package,
    make_private,
    owners_only,
    read_json,
    sha256_of,
    sync,
    sync_all,
    write_durably,
)
from dpray.types import InputError, Json, Resumable

PRIVATE_NOTICE = (
    "This folder is not for release: what is in it was computed from private data without noise, "
    "or is not finished.\n"
)


PARTS = (".jsonl", ".json")

ROOM = "room"
ROOM_BYTES = (64 << 20, 8 << 20, 1 << 20, 256 << 10)
"""The file in `private` that takes room on the disk before a draw, and its size: the first of these
that the disk holds."""

TABLES = ("table.jsonl", "table.parquet")

MODEL = "model"
"""A released model is in the folder of this name."""

CONFIG = "config.json"
"""The file in `private` with the resolved configuration, places included. run.json has it without
them."""

CHECKPOINTS, RAY_TRAIN, RELEASED_MODEL = "checkpoints", "ray_train", "released_model"
TOKENS, EMBEDDINGS, SNAPSHOT = "tokens", "embeddings", "snapshot"

BATCHES_KEY = "batches.key"
"""The file in `private` with the secret key of the coins of batches, which is in no other file of
a run. A finished run does not need it."""

RECORDS = "synthetic.jsonl"
"""The file of a release with its records."""

FIRST = "first"
"""The folder in `private` of the first run of a chain."""

SCRATCH = (MODEL, CHECKPOINTS, RAY_TRAIN, RELEASED_MODEL, TOKENS, EMBEDDINGS, SNAPSHOT)
"""The folders in `private` that a run fills and a finished one has no use for."""


class ReleaseFolder:
    """One run's output folder, held by one process at a time."""

    def __init__(self, path: str) -> None:
        if in_ray_package(path):
            raise InputError(
                f"output.path: {path} lies in a copy of a job's working directory, which Ray "
                "deletes, and the paid release with it: give an absolute path outside"
            )
        self.root = Path(path)
        self.private = self.root / "private"
        self.staging = self.private / "staging"
        self.parts = self.private / "parts"
        try:
            make_private(self.private)
            for folder in (self.staging, self.parts):
                folder.mkdir(exist_ok=True)
            (self.private / "NOT_FOR_RELEASE").write_text(PRIVATE_NOTICE)
            self._lock = open(  # noqa: SIM115 (held until close)
                self.private / "lock", "w", opener=owners_only
            )
        except OSError as error:
            if disk_is_full(error):
                raise Resumable(f"output.path: no space is left for {path}; make room") from None
            raise InputError(f"output.path: {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(f"output.path: another run is writing to {path}") from None

    def close(self) -> None:
        self._lock.close()

    @property
    def synthetic(self) -> Path:
        return self.root / RECORDS

    def read_run(self) -> Json | None:
        """Return the content of run.json, or None if no run began here."""
        if not (self.root / "run.json").exists():
            return None
        run = self.read_json("run.json")
        if not all(isinstance(run.get(key), str) for key in ("run_id", "salt", "state")):
            raise InputError(f"output.path: {self.root}/run.json is not that of a run")
        return run

    def read_json(self, name: str) -> Json:
        return read_json(self.root / name, "output.path")

    def write_json(self, name: str, value: object) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        write_durably(self.root / name, text + "\n")

    def stage(self, name: str, records: Iterable[dict[str, object]]) -> str:
        """Write a part durably; returns its SHA-256, for the ledger."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_durably(self.staging / name, text, private=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def take_room(self) -> None:
        """Take room on the disk for what will be drawn. Raises OSError if there is none."""
        with open(self.private / ROOM, "wb", opener=owners_only) as file:
            for size in ROOM_BYTES:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                    return
                except OSError as error:
                    file.truncate(0)
                    if size == ROOM_BYTES[-1] or not disk_is_full(error):
                        raise

    def give_room(self) -> bool:
        """Give back the room that was taken; return whether there was any."""
        try:
            (self.private / ROOM).unlink()
        except FileNotFoundError:
            return False
        return True

    def move_to_parts(self, name: str) -> None:
        """Move a committed part; safe to repeat."""
        source = self.staging / name
        if source.exists():
            os.replace(source, self.parts / source.name)
            sync(self.parts)

    def recover(self, committed: Callable[[str], bool]) -> None:
        """Recover from a crash: publish each staged part whose SHA-256 is `committed`, and destroy
        the others. Raises InputError for a part that was published and is not `committed`: the
        ledger has forgotten it, and would have it drawn again."""
        for path in sorted(self.staging.iterdir()):
            if path.suffix in PARTS and committed(sha256_of(path)):
                self.move_to_parts(path.name)
            else:
                path.unlink()
        if not all(committed(sha256_of(path)) for path in self._outputs()):
            raise InputError(
                f"output.path: {self.private} holds output that the ledger does not know of: it "
                "was put back to an earlier state, or is another one; choose another folder"
            )

    def has_output(self) -> bool:
        """Return whether anything was published here, or in the first run of a chain."""
        of_first = (self.private / FIRST / "private" / "parts").glob("*.json")
        return any(self._outputs()) or any(of_first)

    def _outputs(self) -> Iterator[Path]:
        return (path for path in self.parts.iterdir() if path.suffix in PARTS)

    def published_output(self, name: str) -> Json | None:
        """Return the output of a mechanism, or None if it is not published."""
        path = self.parts / name
        if not path.exists():
            return None
        output: Json = json.loads(path.read_text(encoding="utf-8"))
        return output

    def published_records(self) -> Iterator[Json]:
        for path in sorted(self.parts.glob("*.jsonl")):
            with open(path, encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines)

    def assemble(self, records: Iterable[dict[str, object]]) -> int:
        """Write synthetic.jsonl, one record at a time; returns their number. Tables that an earlier
        run left here are removed."""
        for name in TABLES:
            (self.root / name).unlink(missing_ok=True)
        written = 0

        def lines() -> Iterator[str]:
            nonlocal written
            for record in records:
                written += 1
                yield json.dumps(record, ensure_ascii=False) + "\n"

        write_durably(self.synthetic, lines())
        return written

    def release_model(self, source: Path, report: dict[str, object]) -> None:
        """Release the files in `source` as the folder `model`, whole or not at all, with the report
        among them: it travels alone."""
        target, staged = self.root / MODEL, self.private / RELEASED_MODEL
        for place in (target, staged):
            shutil.rmtree(place, ignore_errors=True)
        staged.mkdir()
        for path in source.iterdir():
            if path.is_file():
                shutil.copyfile(path, staged / path.name)
        self.write_json(f"private/{staged.name}/privacy_report.json", report)
        sync_all(staged)
        staged.replace(target)

    def remove_work(self) -> None:
        """Remove the parts and scratch folders, which say nothing that the release does not. The
        outputs of mechanisms stay: everything may be drawn from them again, at no cost. So do files
        that are not the run's own: people keep ledgers and evaluations in `private`."""
        for path in [*self.staging.iterdir(), *self.parts.glob("*.jsonl")]:
            path.unlink()
        (self.private / BATCHES_KEY).unlink(missing_ok=True)
        for private in (self.private, self.private / FIRST / "private"):
            for name in SCRATCH:
                shutil.rmtree(private / name, ignore_errors=True)


def refuse_released(folder: Path, key: str) -> None:
    """Raise InputError that names the key for a folder that a run releases: its own, and that of
    its model. What is computed from private records has no place there."""
    place = folder.resolve()
    for run in (place, place.parent) if place.name == MODEL else (place,):
        if (run / "run.json").exists():
            private = folder / "private" if run == place else folder.with_name("private")
            raise InputError(
                f"{key}: {folder}: what a run leaves there may be released, and this may not; give "
                f"a folder such as {private}"
            )

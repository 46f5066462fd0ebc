"""A `Journal` records a training by blocks of steps, so that an interrupted one can resume and is
charged for every step that it may have made.

A block is begun in the ledger, durably, before any of its noise is drawn. After its last step every
rank writes a share of the state, a shard. A manifest lists the shards with their SHA-256, and its
own SHA-256 is published under the block's name. A block that was begun and not published may have
made any number of its steps: when it is begun again, all of them are charged a second time. The
states of the noise and of the sampling are never stored.

A block that a notice cuts short is published with the steps that were made, and the others are
begun as another block. So each step of a published block is in it once, or in a later one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dpray.io.files import read_json, sha256_of, sync, write_durably
from dpray.ledger.ledger import NullLedger, RunLedger
from dpray.types import DprayError

SECONDS_BETWEEN_LOOKS = 2.0


@dataclass(frozen=True)
class TrainingState:
    """The state that an interrupted training resumes from, on any number of ranks: after `steps`
    steps, the weights by their names in `PerExampleLoss.trainable_parameters`, and each of the
    optimizer's moments by the same names. Tensors are on the CPU, mapped from the shards."""

    steps: int
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    moments: Mapping[str, Mapping[str, torch.Tensor]] = field(repr=False)

    @staticmethod
    def load(steps: int, shards: Iterable[Path]) -> TrainingState:
        found: dict[str, dict[str, torch.Tensor]] = {"weights": {}}
        for path in shards:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    kind, _, name = key.partition("/")
                    found.setdefault(kind, {})[name] = file.get_tensor(key)
        return TrainingState(steps, found.pop("weights"), found)


def shard_of(
    tensors: Iterable[tuple[str, torch.Tensor]], rank: int, ranks: int
) -> dict[str, torch.Tensor]:
    """Return the tensors that a rank stores: each goes to the rank that has the least bytes so far.
    They are whole, so that any number of ranks can read them."""
    mine: dict[str, torch.Tensor] = {}
    held = [0] * ranks
    for name, tensor in tensors:
        to = held.index(min(held))
        held[to] += tensor.nbytes
        if to == rank:
            mine[name] = tensor.contiguous()
    return mine


def block_steps(unit: str) -> range:
    """Return the steps, from 0, of the block of this name; none for another unit of the run."""
    kind, _, numbers = unit.partition("-")
    if kind != "steps":
        return range(0)
    first, last = map(int, numbers.split("-"))
    return range(first - 1, last)


def lost_blocks(ledger: RunLedger, key: str) -> list[int]:
    """Return the number of steps of every block that was begun and left no checkpoint, in the
    blocks' order."""
    published = {unit: attempt for unit, (attempt, _) in ledger.published(key)}
    started = ledger.started(key)
    lost = (len(block_steps(unit)) for unit, attempt in started if published.get(unit) != attempt)
    return [steps for steps in lost if steps]


@dataclass(frozen=True)
class Journal:
    """Records one attempt at a training of `steps` steps, in blocks of `block_size`; it travels to
    the ranks.

    `folder` holds the checkpoints and has to be reachable from all ranks' nodes, and from the next
    attempt's.
    """

    ledger: RunLedger
    key: str
    attempt: str
    folder: str
    steps: int
    block_size: int

    def latest(self, rank: int = 0, ranks: int = 1) -> TrainingState | None:
        """Return the state of the last block that was published, None before there is one. Every
        rank reads its share of the shards' bytes. Raises DprayError if one of these shards, or the
        manifest, is not what was published."""
        if (last := self._last_block()) is None:
            return None
        unit, attempt, sha = last
        manifest = self._path(unit, attempt)
        _check_file(manifest, sha)
        listed = read_json(manifest)
        shards = {manifest.with_name(name): digest for name, digest in listed["shards"].items()}
        for path in shards:
            _check_file(path)
        for path, digest in [*shards.items()][rank::ranks]:
            _check_file(path, digest)
        return TrainingState.load(listed["steps"], shards)

    def steps_done(self) -> int:
        """Return the number of steps up to the last checkpoint."""
        last = self._last_block()
        return 0 if last is None else int(json.loads(self._path(*last[:2]).read_text())["steps"])

    def begin(self, first: int) -> None:
        """Begin the block of steps from `first` on; on rank 0."""
        self.ledger.begin(self.key, self.attempt, [self._block(first)])

    def ends_block(self, t: int) -> bool:
        return (t + 1) % self.block_size == 0 or t + 1 == self.steps

    def write(self, first: int, rank: int, shard: Mapping[str, torch.Tensor]) -> tuple[str, str]:
        """Write a rank's shard of the state after the block that begins with step `first`, its
        tensors named as `TrainingState.load` reads them. Return the file's name and SHA-256."""
        path = self._path(self._block(first), self.attempt, f"-{rank:05d}.safetensors")
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        save_file(dict(shard), temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
        return path.name, sha256_of(path)

    def publish(self, first: int, t: int, shards: Iterable[tuple[str, str]]) -> None:
        """Publish the state after step t, the last one that is made in the block that begins with
        step `first`; on rank 0, once all ranks have written their shards."""
        unit = self._block(first)
        manifest, listed = self._path(unit, self.attempt), dict(shards)
        write_durably(manifest, json.dumps({"steps": t + 1, "shards": listed}), private=True)
        self.ledger.publish(self.key, self.attempt, [(unit, sha256_of(manifest))])
        # NFS keeps a removed file that is mapped, under a name of its own that nobody may remove.
        for other in manifest.parent.glob("steps-*"):
            if other.name not in {manifest.name, *listed}:
                other.unlink()

    @contextmanager
    def watched(self, show: Callable[[int], None]) -> Iterator[None]:
        """Call `show` with `steps_done()` every few seconds while ranks elsewhere train."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(SECONDS_BETWEEN_LOOKS):
                try:
                    show(self.steps_done())
                except FileNotFoundError:
                    pass  # a newer checkpoint has just taken its place
                except Exception:
                    return  # without progress the training still goes on

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _last_block(self) -> tuple[str, str, str | None] | None:
        """Return the last published block's name, attempt and manifest's SHA-256."""
        if isinstance(self.ledger, NullLedger):  # it remembers nothing: the file's name says it
            if not (files := list(Path(self.folder).glob("steps-*.json"))):
                return None
            unit, attempt = max(files).stem.rsplit("-", 1)
            return unit, attempt, None
        published = self.ledger.published(self.key)
        return max(((unit, *entry) for unit, entry in published if block_steps(unit)), default=None)

    def _block(self, first: int) -> str:
        """Return the name of the block of steps from `first`, from 0, on."""
        end = min(first - first % self.block_size + self.block_size, self.steps)
        return f"steps-{first + 1:08d}-{end:08d}"

    def _path(self, unit: str, attempt: str, rest: str = ".json") -> Path:
        return Path(self.folder) / f"{unit}-{attempt}{rest}"


def _check_file(path: Path, digest: str | None = None) -> None:
    """Raise DprayError if the file is not there, or has another SHA-256 than a given one."""
    if not path.is_file():
        fault = "is missing"
    elif digest is not None and sha256_of(path) != digest:
        fault = "was changed, or is of another checkpoint"
    else:
        return
    raise DprayError(
        f"private/{path.parent.name}/{path.name}: {fault}; the training cannot go on without it: "
        "put the file back"
    )

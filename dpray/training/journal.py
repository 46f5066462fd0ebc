"""What is noted of a training, step by step, so that one that was cut off can go on and pay.

The steps are taken in blocks. A block is begun in the ledger, durably, before any of its noise is
drawn; after its last step the state is written, flushed, and its SHA-256 published under the
block's name. A block that was begun and not published may have made any number of its steps: when
it is begun again, all of them are charged again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dpray.accounting.run_ledger import NullLedger, RunLedger
from dpray.io.files import sha256_of
from dpray.training.state import TrainingState
from dpray.types import DprayError


@dataclass(frozen=True)
class Blocks:
    """Steps 1 to `steps` in blocks of `size`; the last one may be shorter."""

    steps: int
    size: int

    def name(self, t: int) -> str:
        """Of the block that step t, counted from 0, belongs to."""
        first = t - t % self.size
        return f"steps-{first + 1:08d}-{min(first + self.size, self.steps):08d}"

    def starts(self, t: int) -> bool:
        return t % self.size == 0

    def ends(self, t: int) -> bool:
        return (t + 1) % self.size == 0 or t + 1 == self.steps


def steps_of(unit: str) -> int:
    """The number of steps of the block of this name; 0 for another unit of the run."""
    kind, _, numbers = unit.partition("-")
    if kind != "steps":
        return 0
    first, last = map(int, numbers.split("-"))
    return last - first + 1


def lost_blocks(ledger: RunLedger, key: str) -> list[int]:
    """The steps of every block that was begun and left no checkpoint, in the blocks' order."""
    published = {unit: attempt for unit, (attempt, _) in ledger.published(key)}
    starts: Iterator[tuple[str, str]] = ledger.started(key)
    lost = (steps_of(unit) for unit, attempt in starts if published.get(unit) != attempt)
    return [steps for steps in lost if steps]


def nothing(t: int) -> None:
    pass


@dataclass(frozen=True)
class Journal:
    """Of one attempt at a training; travels to rank 0.

    `folder` holds the checkpoints and has to be reachable from rank 0's node and from the next
    attempt's. `on_step` is told each step's number before it is made.
    """

    ledger: RunLedger
    key: str
    attempt: str
    folder: str
    blocks: Blocks
    on_step: Callable[[int], None] = field(default=nothing, repr=False)

    def latest(self) -> TrainingState | None:
        """The state of the last block that was published, None before there is one. Raises
        DprayError where its file is not what was published."""
        path, sha = self._latest()
        if path is None:
            return None
        if not path.is_file() or (sha is not None and sha256_of(path) != sha):
            raise DprayError(
                f"{path.name}: the training's checkpoint is not there, or altered: it cannot go on"
            )
        return TrainingState.load(path)

    def _latest(self) -> tuple[Path | None, str | None]:
        if isinstance(self.ledger, NullLedger):
            return max(Path(self.folder).glob("steps-*.safetensors"), default=None), None
        found = [entry for entry in self.ledger.published(self.key) if steps_of(entry[0])]
        if not found:
            return None, None
        unit, (attempt, sha) = max(found)
        return self._path(unit, attempt), sha

    def before_step(self, t: int) -> None:
        """On rank 0."""
        if self.blocks.starts(t):
            self.ledger.begin(self.key, self.attempt, [self.blocks.name(t)])
        self.on_step(t)

    def keep(self, t: int, state: TrainingState) -> None:
        """On rank 0, after the last step t of a block."""
        unit = self.blocks.name(t)
        path = self._path(unit, self.attempt)
        path.parent.mkdir(exist_ok=True)
        state.save(path)
        self.ledger.publish_many(self.key, self.attempt, [(unit, sha256_of(path))])
        for other in path.parent.iterdir():
            if other != path:
                other.unlink()

    def _path(self, unit: str, attempt: str) -> Path:
        return Path(self.folder) / f"{unit}-{attempt}.safetensors"

"""`Kind` is the table of what an error does to a run: whether the work that it ended is repeated,
is left for the next command, or has failed for good, and what the user reads.

Everything that has to decide about an error asks this table. No words of an error decide anything,
because they may quote a prompt, but for those of Ray's memory monitor: what they decide changes no
output. `dpray/runs/failures.py` carries out what it says about a run, `dpray/workers/pool.py` what
it says about an actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TypeVar

from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from dpray.engines.base import DeviceLost, EngineError, LoadFailed
from dpray.io.files import DISK_FULL, disk_is_full
from dpray.types import (
    BudgetRefused,
    DprayError,
    InputError,
    LedgerError,
    Resumable,
    first_line,
    is_interruption,
)
from dpray.workers.rows import WorkerError

E = TypeVar("E", bound=BaseException)


class Then(Enum):
    REPEAT = "repeat"
    """The same command does the work again, `runtime.max_attempts` times in all. That is free:
    nobody saw any output, and neither private rows nor draws are the reason, or if they are
    (`Kind.MEMORY`), the output is the same."""

    RESUME = "resume"
    """The command ends, and the same command goes on later: nothing has failed."""

    FAIL = "fail"
    """The command ends, and what was being drawn is never drawn again: private rows or the draw may
    be the reason."""


# What is told of an error


class LostTooOften(Exception):
    """The same work was lost with `runtime.max_attempts` actors, the last time by the error `last`:
    a command stops repeating it."""

    def __init__(self, last: Exception) -> None:
        super().__init__(last)
        self.last = last


def _last(error: BaseException) -> BaseException:
    return error.last if isinstance(error, LostTooOften) else error


def find_error(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the first error of this kind in the chain of causes, through Ray's wrappers."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        # Ray's wrapper is an instance of the wrapped class too, and its message is a traceback.
        if isinstance(current, kind) and not isinstance(current, RayTaskError):
            return current
        waiting += [current.__cause__, current.__context__, getattr(current, "cause", None)]
    return None


def class_name(error: BaseException) -> str:
    """Return the name of an error's class, or of the class that a worker named. What a task raised
    is in a wrapper of Ray, whose name is no class's."""
    if (worker := find_error(error, WorkerError)) is not None:
        return first_line(worker)  # Ray Data adds lines of its own to the name
    return type(find_error(error, Exception) or error).__name__


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise an error of dpray as itself, not in Ray's wrappers."""
    try:
        yield
    except Exception as error:
        if (ours := find_error(error, DprayError)) is not None:
            if ours.args and isinstance(ours.args[0], str):
                # Ours are one line. Ray Data adds lines on retries, although it makes none.
                ours.args = (ours.args[0].partition("\n")[0], *ours.args[1:])
            raise ours from None
        raise


def _is_a(*kinds: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, kinds)


def _was_lost(error: BaseException) -> bool:
    lost = RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError, LocalRayletDiedError
    return any(find_error(error, kind) for kind in lost)


def _ended_for_memory(error: BaseException) -> bool:
    """Ray's memory monitor writes "low on memory" about each process that it ends, also to later
    callers of the actor. A process that the kernel's own monitor ended looks like any lost one."""
    died = find_error(error, RayActorError)
    ended = find_error(error, OutOfMemoryError)
    return ended is not None or "low on memory" in str(died or "")


# The table

REPEAT, RESUME, FAIL = Then


class Kind(Enum):
    """The table: the first row in which an error is found holds.

    `drawing` says what follows while a mechanism is at work, and `otherwise` what follows while
    none is, or if the mechanism pays for its repeats. `says` is the sentence for the user, and
    `loss` what was lost, for the report of a run that repeated it.
    """

    INTERRUPTED = is_interruption, RESUME, RESUME, "interrupted", "an interruption of the run"
    """The person who stops a run has not seen what is being drawn."""

    OUTSIDE = _is_a(Resumable, InputError, BudgetRefused, LedgerError), RESUME, RESUME
    """A mechanism's own code raises none of these: a file has changed, or the ledger cannot be
    reached or refuses."""

    DEVICE_LOST = _is_a(DeviceLost), REPEAT, REPEAT, "{error}", "a lost device or engine process"
    """Told by numbers that only hardware has, CUDA 214 and 220."""

    LOAD_FAILED = _is_a(LoadFailed), REPEAT, REPEAT, "{error}", "an engine that could not be loaded"
    MEMORY = (
        _ended_for_memory,
        REPEAT,
        REPEAT,
        "Ray ended a process: its machine was low on memory",
        "the end of a process whose machine was low on memory",
    )
    """Ray ends whichever process is the newest on a full machine. Private rows or a draw may have
    had a part in that, and no output depends on it: a shard is lost before the draw, a batch has
    its own coins again, and a training pays for its steps."""

    LOST = _was_lost, REPEAT, REPEAT, "actors were lost", "the loss of a machine or of a process"
    OURS = _is_a(DprayError), FAIL, RESUME
    DISK = disk_is_full, FAIL, RESUME, DISK_FULL
    ENGINE = _is_a(EngineError), FAIL, REPEAT
    UNKNOWN = _is_a(BaseException), FAIL, FAIL, "{name}"
    """An error of dpray's own code or of a library, whose words may quote a text."""

    def __init__(
        self,
        found_in: Callable[[BaseException], bool],
        drawing: Then,
        otherwise: Then,
        says: str = "{error}",
        loss: str = "",
    ) -> None:
        self.found_in, self.drawing, self.otherwise = found_in, drawing, otherwise
        self.says, self.loss = says, loss

    def sentence(self, error: BaseException) -> str:
        last = _last(error)
        plain = find_error(last, Exception) or last
        return self.says.format(error=first_line(plain), name=class_name(error))


REPEATED_AFTER = tuple(kind.loss for kind in Kind if kind.loss)
"""The short list: all after which a mechanism draws again, at no cost. The proof is in
docs/privacy.md, section 2.7."""


def kind_of(error: BaseException) -> Kind:
    """Return the row of the table that an error is in."""
    return next(kind for kind in Kind if kind.found_in(_last(error)))


def is_own_failure(error: BaseException) -> bool:
    """Return whether a mechanism that raised this has failed by itself, and may never run again."""
    return kind_of(error).drawing is FAIL

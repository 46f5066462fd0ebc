"""Every row of the table of failures: the error, what becomes of the run, and what is read."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from dpray.engines.base import DeviceLost, EngineError, LoadFailed, OutOfMemory, SelectorFailed
from dpray.ledger.ledger import Ledger
from dpray.methods.config import parse_config
from dpray.methods.registry import make_plan
from dpray.runs.failures import release_with_repeats
from dpray.runs.folder import ReleaseFolder
from dpray.runs.plan import Plan
from dpray.runs.session import Release, Session
from dpray.types import (
    Budget,
    BudgetRefused,
    DprayError,
    InputError,
    LedgerConflict,
    LedgerUnavailable,
    Resumable,
    RunFailed,
)
from dpray.workers.engine import build_engine
from dpray.workers.failures import Kind, LostTooOften, WorkerError, is_own_failure, kind_of

# What Ray 2.60 says of a process that its memory monitor ended.
ENDED = "1 worker(s) were killed due to the node running low on memory. Memory on the node was 9GB"
# What it says of one that the kernel may have ended, or anybody else.
DIED = "The actor died unexpectedly before finishing this task.\n"
KILLED = "Some common causes include: (1) the process was killed by the OOM killer"


def actor_died(message: str) -> ActorDiedError:
    return ActorDiedError(ActorDiedErrorContext(error_message=message, actor_id=b"0" * 16))


def wrapped(error: Exception) -> Exception:
    """As Ray raises what a task raised."""
    found: Exception = RayTaskError("f", "Traceback\n  of several\nlines", error)
    return found.as_instanceof_cause()  # type: ignore[attr-defined,no-any-return]


Panic = type("PanicException", (BaseException,), {})
"""A library in Rust raises such."""

VERDICTS = {
    Kind.INTERRUPTED: ("resume", "resume", "an interruption of the run"),
    Kind.OUTSIDE: ("resume", "resume", ""),
    Kind.DEVICE_LOST: (
        "repeat",
        "repeat",
        "a lost device or engine process",
    ),
    Kind.LOAD_FAILED: ("repeat", "repeat", "an engine that could not be loaded"),
    Kind.MEMORY: ("repeat", "repeat", "the end of a process whose machine was low on memory"),
    Kind.LOST: ("repeat", "repeat", "the loss of a machine or of a process"),
    Kind.OURS: ("fail", "resume", ""),
    Kind.DISK: ("fail", "resume", ""),
    Kind.ENGINE: ("fail", "repeat", ""),
    Kind.UNKNOWN: ("fail", "fail", ""),
}
"""By row: the consequence while a mechanism draws, and otherwise, and the loss in the report."""

NO_ROOM = "output.path: no space is left on its disk, or on the ledger's; make room"
LOW = "Ray ended a process: its machine was low on memory"


EXAMPLES: list[tuple[BaseException, Kind, str]] = [
    (KeyboardInterrupt(), Kind.INTERRUPTED, "interrupted"),
    (SystemExit(143), Kind.INTERRUPTED, "interrupted"),
    (Resumable("on_progress raised ValueError"), Kind.OUTSIDE, "on_progress raised ValueError"),
    (InputError("notes.jsonl has changed"), Kind.OUTSIDE, "notes.jsonl has changed"),
    (LedgerUnavailable("no answer"), Kind.OUTSIDE, "no answer"),
    (LedgerConflict("another one"), Kind.OUTSIDE, "another one"),
    (BudgetRefused("notes", *[Budget(1, 0)] * 3), Kind.OUTSIDE, "budget of 'notes' refused"),
    (DeviceLost("a device is gone"), Kind.DEVICE_LOST, "a device is gone"),
    (LoadFailed("there is no GPU"), Kind.LOAD_FAILED, "there is no GPU"),
    (OutOfMemoryError(ENDED), Kind.MEMORY, LOW),
    (actor_died(ENDED), Kind.MEMORY, LOW),
    (actor_died(KILLED), Kind.LOST, "actors were lost"),
    (RayActorError(), Kind.LOST, "actors were lost"),
    (WorkerCrashedError(), Kind.LOST, "actors were lost"),
    (NodeDiedError("a node died"), Kind.LOST, "actors were lost"),
    (ObjectLostError("0" * 56, None, ""), Kind.LOST, "actors were lost"),  # type: ignore[arg-type]
    (LocalRayletDiedError(), Kind.LOST, "actors were lost"),
    (DprayError("an engine actor failed"), Kind.OURS, "an engine actor failed"),
    (OSError(errno.ENOSPC, "No space left on device"), Kind.DISK, NO_ROOM),
    (
        EngineError("a group was not whole at token 3"),
        Kind.ENGINE,
        "a group was not whole at token 3",
    ),
    (SelectorFailed("it failed (IndexError)"), Kind.ENGINE, "it failed (IndexError)"),
    (OutOfMemory("in a step"), Kind.ENGINE, "in a step"),
    (WorkerError("ValueError\nof Ray Data"), Kind.UNKNOWN, "ValueError"),
    (KeyError("Marlowe"), Kind.UNKNOWN, "KeyError"),
    (wrapped(KeyError("Marlowe")), Kind.UNKNOWN, "KeyError"),
    (OSError(errno.EIO, "Input/output error"), Kind.UNKNOWN, "OSError"),
    (MemoryError(), Kind.UNKNOWN, "MemoryError"),
    (RuntimeError("uncorrectable ECC error; the actor died"), Kind.UNKNOWN, "RuntimeError"),
    (Panic("Marlowe"), Kind.UNKNOWN, "PanicException"),
]
every_example = pytest.mark.parametrize(
    ("error", "kind", "sentence"), EXAMPLES, ids=[type(error).__name__ for error, *_ in EXAMPLES]
)


@every_example
def test_a_row_of_the_table(error: BaseException, kind: Kind, sentence: str) -> None:
    each_way = [error]
    # Ray sends no others, with their context none of its own, and a worker's disk is not the run's.
    if isinstance(error, Exception) and not (
        kind in (Kind.OUTSIDE, Kind.DISK) or str(error).startswith(DIED)
    ):
        each_way.append(wrapped(error))
    for each in each_way:
        found = kind_of(each)
        assert found is kind and found.sentence(each).startswith(sentence)
        assert "Marlowe" not in found.sentence(each)
    assert (kind.drawing.value, kind.otherwise.value, kind.loss) == VERDICTS[kind]
    assert is_own_failure(error) == (VERDICTS[kind][0] == "fail")


def test_every_row_has_an_example_and_a_lost_machine_is_found_behind_another_error() -> None:
    assert set(Kind) == {kind for _, kind, _ in EXAMPLES} == VERDICTS.keys()
    for error, kind, _ in EXAMPLES:
        outer = RuntimeError("Ray Data's")
        outer.__context__ = error
        expected = kind if kind in (Kind.LOST, Kind.MEMORY) else Kind.UNKNOWN
        assert kind_of(outer) is expected, error


def test_an_error_that_nobody_knows_is_a_failure_of_its_own() -> None:
    unknown = type("NewInTheNextRelease", (Exception,), {})("the actor died; CUDA error 214")
    assert kind_of(unknown) is Kind.UNKNOWN and is_own_failure(unknown)


# What becomes of a run


PLANS: list[Plan] = []


@pytest.fixture
def sessions(
    settings: Callable[..., dict[str, Any]], sequences: dict[str, Any], tmp_path: Path
) -> Iterator[Callable[[], Session[Any]]]:
    """Makes the attempts at a run that is charged."""
    if not PLANS:
        PLANS.append(make_plan(parse_config(settings(**sequences))))
    [plan] = PLANS
    cost, unit = Budget(plan.cost.epsilon, plan.cost.delta), ("record", "add_or_remove_one")
    with (
        closing(Ledger.create_or_open(f"sqlite:///{tmp_path}/ledger.db")) as ledger,
        closing(ReleaseFolder(str(tmp_path / "out"))) as folder,
    ):
        ledger.create_dataset("notes", cost, *unit)
        ledger.reserve("notes", {"run": (plan.dp_event, cost)}, *unit)
        first = Session(plan, folder, ledger, "run", "", lambda progress: None, build_engine)
        numbers = iter("0123456789")
        yield lambda: replace(first, attempt_id=next(numbers) * 32)


@every_example
@pytest.mark.parametrize("drawing", [True, False])
def test_what_becomes_of_a_run_and_of_what_it_had_begun(
    sessions: Callable[[], Session[Any]],
    error: BaseException,
    kind: Kind,
    sentence: str,
    drawing: bool,
) -> None:
    """The next attempt, or the next command, draws what was not drawn, unless it has failed."""
    faults = [error]

    def raises() -> dict[str, Any]:
        if faults:
            raise faults.pop()
        return {}

    def release(session: Session[Any]) -> Release:
        if not drawing:
            raises()
        session.publish_once("counts", raises)
        return Release([], {})

    verdict = VERDICTS[kind][0 if drawing else 1]
    attempts = iter([sessions(), sessions()])
    if verdict != "repeat":
        with pytest.raises(DprayError) as ended:
            release_with_repeats(attempts, release)
        assert sentence in str(ended.value) and "Marlowe" not in str(ended.value)
        of_ours = ended.value is error
        assert of_ours == isinstance(error, DprayError)
        failed = verdict == "fail" and drawing and not of_ours
        assert isinstance(ended.value, RunFailed) == failed
        if not of_ours:
            assert isinstance(ended.value, Resumable) == (verdict == "resume")
            assert ("never repeated" in str(ended.value)) == failed
    if verdict == "fail" and drawing:
        name = sentence if kind is Kind.UNKNOWN else type(error).__name__
        with pytest.raises(RunFailed, match=f"failed with {name}.*never repeated"):
            release_with_repeats(attempts, release)
        return
    session, _ = release_with_repeats(attempts, release)
    assert session.published("counts") == {} and not [*session.ledger.failed("run")]
    starts = session.ledger.counts("run")["starts"]
    assert starts == (2 if drawing else 1), "begun once an attempt, and charged once"
    lost = [VERDICTS[kind][2]] if verdict == "repeat" and VERDICTS[kind][2] else []
    assert [*session.losses().values()] == lost


def test_what_was_lost_too_often_ends_the_command_at_once(
    sessions: Callable[[], Session[Any]],
) -> None:
    """Its work was repeated as often as a command may."""
    lost = LostTooOften(DeviceLost("a device is gone"))
    attempts = iter([sessions(), sessions()])

    def raises(session: Session[Any]) -> Release:
        raise lost

    with pytest.raises(Resumable, match=r"^a device is gone \(3 times\)"):
        release_with_repeats(attempts, raises)
    session = next(attempts)
    assert kind_of(lost) is Kind.DEVICE_LOST
    assert [*session.losses().values()] == [Kind.DEVICE_LOST.loss]


@every_example
def test_a_mechanism_that_pays_for_its_repeats_fails_only_where_nothing_else_is_known(
    sessions: Callable[[], Session[Any]], error: BaseException, kind: Kind, sentence: str
) -> None:
    def raises() -> dict[str, Any]:
        raise error

    session = sessions()
    goes_on = VERDICTS[kind][:2] == ("fail", "resume") or kind is Kind.MEMORY
    to_resume = goes_on and not isinstance(error, DprayError)
    with pytest.raises(
        Resumable if to_resume else type(error), match=sentence if to_resume else ""
    ):
        session.publish_once("model", raises, pays_for_repeats=True)
    if VERDICTS[kind][0] == "fail" and VERDICTS[kind][1] != "resume":
        with pytest.raises(RunFailed, match="never repeated"):
            session.publish_once("model", dict, pays_for_repeats=True)
    else:
        assert session.publish_once("model", dict, pays_for_repeats=True) == {}

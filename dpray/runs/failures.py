"""Attempts at a run's release: what was interrupted or lost before it published is repeated.

What is published is kept. The table `dpray.workers.failures.Kind` says what an error does to the
rest: another attempt begins, the same command goes on later, or the mechanisms that the attempt had
begun have failed and are never run again. Every error that ends a run tells whether the run is
charged, and how it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from enum import Enum
from pathlib import Path

from dpray.config.config import Config
from dpray.io.files import DISK_FULL, disk_is_full, read_json
from dpray.runs.plan import Plan
from dpray.runs.session import Release, Session
from dpray.types import (
    BudgetRefused,
    DprayError,
    InputError,
    LedgerConflict,
    LedgerUnavailable,
    Resumable,
    RunFailed,
)
from dpray.workers.failures import FAIL, REPEAT, Kind, LostTooOften, class_name, kind_of


def release_with_repeats(
    sessions: Iterator[Session[Plan]], release: Callable[[Session[Plan]], Release]
) -> tuple[Session[Plan], Release]:
    """Return the first session that finishes, and its release. Each session is one attempt;
    any error but one to repeat ends the run."""
    for number, session in enumerate(sessions, start=1):
        with closing(session):
            try:
                with session.opened():
                    session.check_records()
                    session.measure_labels()
                    return session, release(session)
            except BaseException as error:
                if (ended := _end_of_run(session, number, error)) is not None:
                    ended.resume_hint = session.resume_hint
                    if ended is error:
                        raise
                    raise ended from error
    raise AssertionError("runtime.max_attempts is at least 1")


def _end_of_run(session: Session[Plan], number: int, error: BaseException) -> DprayError | None:
    """Return the error that ends the run after an attempt failed with `error`, as the table says;
    None if another attempt makes it good."""
    if isinstance(error, LedgerConflict) and session.ledger.counts(session.run_id)["committed"]:
        return RunFailed(
            "output.path: another copy of this folder finished the run, and its release is the one "
            "that was paid for"
        )
    if isinstance(error, DprayError):
        return error
    kind, attempts = kind_of(error), session.config.runtime.max_attempts
    then, sentence = kind.drawing, kind.sentence(error)
    if then is FAIL:
        try:
            failed = _record_failures(session, error)
        except LedgerUnavailable as unavailable:
            return Resumable(
                f"the run stopped: {sentence}; {unavailable}, so the next command first records "
                "that what was being drawn has failed: it is never repeated"
            )
        if failed:
            return RunFailed(
                f"the run stopped: {sentence}; what was being drawn ({failed[0]}, {len(failed)} in "
                "all) is never repeated, so this run cannot be finished"
            )
        then = kind.otherwise
    elif then is REPEAT:
        session.note_loss(session.attempt_id, error)
    if then is REPEAT and number < attempts and not isinstance(error, LostTooOften):
        return None
    if then is FAIL:
        return DprayError(
            f"the run stopped: {sentence}; nothing that was not finished was released"
        )
    return Resumable(f"{sentence} ({attempts} times)" if then is REPEAT else sentence)


def _record_failures(session: Session[Plan], error: BaseException) -> list[str]:
    """Record as failed what this attempt had begun and not published when `error` ended it. Return
    the units of the run that have failed. While the ledger gives no answer, they are noted."""
    session.folder.give_room()  # the ledger may be on the same full disk
    reason = class_name(error)
    try:
        session.fail_unfinished(session.attempt_id, reason)
        return [unit for unit, _ in session.ledger.failed(session.run_id)]
    except LedgerUnavailable:
        session.note_failure(session.attempt_id, reason)
        raise


class OtherPlan(InputError):
    """The folder holds a run of another plan: nothing is charged for this one."""


class Charged(Enum):
    NO = "nothing was charged"
    YES = "the run is charged"
    UNDER_WAY = (
        "the charge was under way: the same command asks the ledger whether the run is charged, "
        "and charges nothing twice"
    )
    UNKNOWN = (
        "run.json in output.path cannot be read, so the run may be charged: `dpray ledger show` "
        "lists the charges"
    )


@contextmanager
def explain_charge(config: Config | None) -> Iterator[None]:
    """Append to each error whether the run is charged and how it goes on. For a charged run, an
    interruption and an unavailable ledger become `Resumable`; a full disk always does. Before the
    configuration is read, when nothing can be charged, pass None."""
    try:
        yield
    except BaseException as error:
        charged = Charged.NO
        if config is not None and not isinstance(error, OtherPlan):
            charged = _charged(Path(config.output.path) / "run.json")
        ended = _resumable(error, charged)
        ended.charge_status = sentence = _sentence(ended, charged)  # type: ignore[attr-defined]
        if not isinstance(ended, DprayError):
            ended.add_note(sentence)  # others know no `charge_status`
            raise
        # Without its cause, a library's error that may quote a text: Python shows both.
        raise ended from None


def _charged(file: Path) -> Charged:
    """Return the charge of a run, as its `run.json` states it."""
    if not file.exists():
        return Charged.NO
    try:
        run: dict[str, object] = read_json(file)
    except InputError:
        return Charged.UNKNOWN
    if run.get("not_private") or run.get("state") == "planned":
        return Charged.NO
    return Charged.UNDER_WAY if run.get("state") == "charging" else Charged.YES


def _resumable(error: BaseException, charged: Charged) -> BaseException:
    """Return the error as a `Resumable` if it is one for this run."""
    if isinstance(error, Resumable | RunFailed):
        return error
    if disk_is_full(error):
        return Resumable(DISK_FULL)
    if charged in (Charged.YES, Charged.UNDER_WAY):
        # `ray job stop` sends SIGTERM, which Ray makes a SystemExit of.
        if (kind := kind_of(error)) is Kind.INTERRUPTED:
            return Resumable(kind.sentence(error))
        if isinstance(error, LedgerUnavailable):
            resumable = Resumable(str(error))
            resumable.resume_hint = error.resume_hint
            return resumable
    return error


def _sentence(error: BaseException, charged: Charged) -> str:
    words = charged.value
    if charged is Charged.NO and isinstance(error, Resumable):
        return f"{words}; the same command begins again"
    if charged is not Charged.YES:
        return words
    if isinstance(error, RunFailed):
        return f"{words}, and its charge stays spent"
    resume_hint = getattr(error, "resume_hint", DprayError.resume_hint)
    if isinstance(error, BudgetRefused):
        return f"{words}, and what was refused is not: with room for it, {resume_hint}"
    first = "once that is fixed, " if isinstance(error, InputError) else ""
    return f"{words}: {first}{resume_hint}"

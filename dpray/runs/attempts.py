"""Attempts at a run's release: what was interrupted or lost before it published is repeated.

What is published is kept. `dpray.workers.cluster.reason_to_repeat` has the short list of losses
after which another attempt begins. Any other error of an attempt is a failure of the mechanisms
that it had begun, which are never run again; without any, the same command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from dpray.engines.base import EngineError
from dpray.io.files import disk_is_full
from dpray.runs.session import Release, Session
from dpray.runs.standing import DISK_FULL
from dpray.types import (
    DprayError,
    LedgerConflict,
    LedgerUnavailable,
    Resumable,
    RunFailed,
    first_line,
    is_interruption,
)
from dpray.workers import cluster
from dpray.workers.failures import WorkerError


def release_with_repeats(
    sessions: Iterator[Session[Any]], release: Callable[[Session[Any]], Release]
) -> tuple[Session[Any], Release]:
    """Return the first session that comes to its end, and its release. Each session is one attempt;
    any error but a loss ends the run."""
    for number, session in enumerate(sessions, start=1):
        with closing(session):
            try:
                session.folder.recover(_committed(session))
                session.record_failures()
                session.folder.take_room()
                session.check_records()
                session.measure_labels()
                return session, release(session)
            except BaseException as error:
                if (ended := _end_of_run(session, number, error)) is not None:
                    ended.resume_hint = session.resume_hint
                    if ended is error:
                        raise
                    raise ended from error
            finally:
                session.folder.give_room()
    raise AssertionError("runtime.max_attempts is at least 1")


def _end_of_run(session: Session[Any], number: int, error: BaseException) -> DprayError | None:
    """Return the error that ends the run after an attempt failed with `error`; None for a loss that
    another attempt makes good."""
    # `ray job stop` sends SIGTERM, which Ray makes a SystemExit of.
    if is_interruption(error):
        return Resumable("interrupted")
    if isinstance(error, LedgerConflict) and session.ledger.counts(session.run_id)["committed"]:
        return RunFailed(
            "output.path: another copy of this folder finished the run, and its release is the one "
            "that was paid for"
        )
    if isinstance(error, DprayError):
        return error
    last = error.last if isinstance(error, cluster.LostTooOften) else error
    why = cluster.reason_to_repeat(last)
    if why is None:
        try:
            failed = _record_failures(session, error)
        except LedgerUnavailable as unavailable:
            return Resumable(
                f"{_what_stopped(error)}; {unavailable}, so the next command first records that "
                "what was being drawn has failed: it is never repeated"
            )
        if failed:
            return RunFailed(
                f"{_what_stopped(error)}; what was being drawn ({failed[0]}, {len(failed)} in all) "
                "is never repeated, so this run cannot be finished"
            )
        if not isinstance(error, EngineError):
            return _ended_between_draws(error)
        why = str(error)
    else:
        session.note_loss(session.attempt_id, last)
    attempts = session.config.runtime.max_attempts
    if number == attempts or isinstance(error, cluster.LostTooOften):
        return Resumable(f"{why} ({attempts} times)")
    return None


def _ended_between_draws(error: BaseException) -> DprayError:
    """Return the error of a run that stopped while nothing was being drawn: it can go on."""
    if disk_is_full(error):
        return Resumable(DISK_FULL)
    if cluster.ended_for_memory(error):
        return Resumable(f"{_what_stopped(error)}, and nothing was being drawn")
    return DprayError(f"{_what_stopped(error)}; nothing that was not finished was released")


def _committed(session: Session[Any]) -> Callable[[str], bool]:
    if session.config.not_private:
        return lambda sha: True
    shas = {sha for _, (_, sha) in session.ledger.published(session.run_id)}
    return shas.__contains__


def _record_failures(session: Session[Any], error: BaseException) -> list[str]:
    """Record as failed what this attempt had begun and not published when `error` ended it. Return
    the units of the run that have failed. While the ledger gives no answer, they are noted.

    Where Ray ended a process for want of memory, these are what workers had under way just then,
    and not what was lost before with another one: how much memory a batch needs depends on its
    private rows.
    """
    session.folder.give_room()  # the ledger may be on the same full disk
    ended = cluster.find_error(error, cluster.EndedForMemory)
    reason = cluster.class_name(error) if ended is None else "OutOfMemoryError"
    begun_by = {session.attempt_id} if ended is None else {*ended.worker_ids} - {""}
    try:
        session.fail_unfinished(begun_by, reason)
        return [unit for unit, _ in session.ledger.failed(session.run_id)]
    except LedgerUnavailable:
        for each in sorted(begun_by):
            session.note_failure(each, reason)
        raise


def _what_stopped(error: BaseException) -> str:
    """Describe an error of dpray's own code or of a library without its words."""
    if cluster.ended_for_memory(error):
        return "Ray ended a process of the run because its machine was low on memory"
    if disk_is_full(error):
        return f"the run stopped: {DISK_FULL}"
    if isinstance(error, EngineError):
        return f"the run stopped: {error}"
    worker = cluster.find_error(error, WorkerError)
    # Ray Data adds lines of its own to the name.
    return f"the run stopped: {first_line(worker) if worker else cluster.class_name(error)}"

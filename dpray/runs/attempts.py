"""Attempts at a run's release: what was lost with a machine or an engine is repeated.

What is published is kept. What was lost with its machine, by an interruption or because a model
failed is repeated or dropped as `privacy.lost_batches` says (a training pays for what it repeats).
A mechanism that raised itself, or for which the memory did not suffice, is never run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

from dpray.io.files import disk_is_full
from dpray.runs.session import Release, Session
from dpray.runs.standing import DISK_FULL
from dpray.types import DprayError, LedgerConflict, Resumable, RunFailed, first_line
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


def _end_of_run(session: Session[Any], number: int, error: BaseException) -> DprayError | None:
    """Return the error that ends the run after an attempt failed with `error`; None for a loss that
    another attempt makes good."""
    # `ray job stop` sends SIGTERM, which Ray makes a SystemExit of.
    if not isinstance(error, Exception):
        return Resumable("interrupted")
    if disk_is_full(error):
        return Resumable(DISK_FULL)
    if isinstance(error, LedgerConflict) and session.ledger.counts(session.run_id)["committed"]:
        return RunFailed(
            "output.path: another copy of this folder finished the run, and its release is the one "
            "that was paid for"
        )
    if isinstance(error, DprayError):
        return error
    if cluster.ended_for_memory(error):
        return _ended_for_memory(session, error)
    last = error.last if isinstance(error, cluster.LostTooOften) else error
    if (why := cluster.reason_to_repeat(last)) is None:
        return _stopped(session, error)
    attempts = session.config.runtime.max_attempts
    if number == attempts or isinstance(error, cluster.LostTooOften):
        return Resumable(f"{why} ({attempts} times)")
    return None


def _committed(session: Session[Any]) -> Callable[[str], bool]:
    if session.config.not_private:
        return lambda sha: True
    shas = {sha for _, (_, sha) in session.ledger.published(session.run_id)}
    return shas.__contains__


def _ended_for_memory(session: Session[Any], error: Exception) -> DprayError:
    """Record as failed the units that workers had under way when Ray ended a process for want of
    memory, and not those that were lost before that. Return the error that stops the run."""
    what = "Ray ended a process of the run because its machine was low on memory"
    ledger, run_id = session.ledger, session.run_id
    ended = cluster.find_error(error, cluster.EndedForMemory)
    at_work = frozenset() if ended is None else ended.worker_ids
    for unit, attempt in list(ledger.unfinished(run_id)):
        # How much memory a batch needs depends on its private rows.
        if attempt in at_work:
            ledger.fail(run_id, unit, attempt, "OutOfMemoryError")
    failed = [unit for unit, _ in ledger.failed(run_id)]
    if not failed:
        return Resumable(f"{what}, and nothing was being drawn")
    return RunFailed(
        f"{what}; what was being drawn ({failed[0]}, {len(failed)} in all) cannot be repeated, "
        "so this run cannot be finished"
    )


def _stopped(session: Session[Any], error: Exception) -> DprayError:
    """Return the error of a run that code of dpray's own or of a library's stopped."""
    worker = cluster.find_error(error, WorkerError)
    # Ray Data adds lines of its own to the name.
    name = first_line(worker) if worker else type(error).__name__
    why = f"the run stopped: {name}; nothing that was not finished was released"
    with suppress(DprayError):
        if session.ledger.counts(session.run_id)["failed"]:
            return RunFailed(f"{why}, and this run cannot be finished")
    return DprayError(why)

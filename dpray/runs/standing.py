"""Every error that ends a run tells whether the run is charged, and how it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from dpray.config.config import Config
from dpray.io.files import disk_is_full, read_json
from dpray.types import (
    BudgetRefused,
    DprayError,
    InputError,
    LedgerUnavailable,
    Resumable,
    RunFailed,
)

DISK_FULL = "output.path: no space is left on its disk, or on the ledger's; make room"


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
def telling_charge(config: Config | None) -> Iterator[None]:
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
        ended.standing = sentence = _sentence(ended, charged)  # type: ignore[attr-defined]
        if not isinstance(ended, DprayError):
            ended.add_note(sentence)  # others know no `standing`
            raise
        # Without its cause, a library's error that may quote a text: Python shows both.
        raise ended from None


def _charged(file: Path) -> Charged:
    """Return the charge of a run, as its `run.json` states it."""
    if not file.exists():
        return Charged.NO
    try:
        run: dict[str, Any] = read_json(file)
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
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return Resumable("interrupted")
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
    first = "fix that, then " if isinstance(error, InputError) else ""
    return f"{words}: {first}{resume_hint}"

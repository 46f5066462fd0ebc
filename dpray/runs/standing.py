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

RESUME_HINT = "the same command goes on from there, at no further cost"

DISK_FULL = "output.path: no space is left on its disk, or on the ledger's; make room"


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


class Standing:
    """The charge of a run, as its `run.json` states it. The runner corrects `is_other_plan`,
    `is_same_plan` and `resume_hint` if going on is not for free."""

    def __init__(self, config: Config | None) -> None:
        """Take the run's configuration; None as long as it is not read."""
        self._file = None if config is None else Path(config.output.path) / "run.json"
        self.resume_hint = RESUME_HINT
        self.is_other_plan = False
        """The folder holds a run of another plan: nothing is charged for this one."""
        self.is_same_plan = False
        """The folder holds a run of this plan."""

    @contextmanager
    def said(self) -> Iterator[None]:
        """Raise each error again with a sentence on the charge behind its message. For a run that
        is charged, an interruption and a ledger that cannot be used now become `Resumable`; a full
        disk always does."""
        try:
            yield
        except BaseException as error:
            charged = self._charged()
            ended = _resumable(error, charged)
            ended.standing = sentence = self._sentence(ended, charged)  # type: ignore[attr-defined]
            if not isinstance(ended, DprayError):
                ended.add_note(sentence)  # others know no `standing`
                raise
            # Without its cause, a library's error that may quote a text: Python shows both.
            raise ended from None

    def _charged(self) -> Charged:
        if self._file is None or self.is_other_plan or not self._file.exists():
            return Charged.NO
        try:
            run: dict[str, Any] = read_json(self._file)
        except InputError:
            return Charged.UNKNOWN
        if run.get("not_private") or run.get("state") == "planned":
            return Charged.NO
        return Charged.UNDER_WAY if run.get("state") == "charging" else Charged.YES

    def _sentence(self, error: BaseException, charged: Charged) -> str:
        words = charged.value
        if charged is Charged.NO and isinstance(error, Resumable):
            return f"{words}; the same command begins again"
        if charged is not Charged.YES:
            return words
        if isinstance(error, RunFailed):
            return f"{words}, and its charge stays spent"
        if isinstance(error, BudgetRefused):
            return f"{words}, and what was refused is not: with room for it, {self.resume_hint}"
        if not self.is_same_plan and isinstance(error, InputError):
            return (
                "nothing more was charged; the run in output.path is charged, and goes on with its "
                "own configuration and data"
            )
        mended = "with that mended, " if isinstance(error, InputError) else ""
        return f"{words}: {mended}{self.resume_hint}"


def _resumable(error: BaseException, charged: Charged) -> BaseException:
    """Return the error as a `Resumable` if it is one for this run."""
    if isinstance(error, Resumable):
        return error
    if disk_is_full(error):
        return Resumable(DISK_FULL)
    if charged in (Charged.YES, Charged.UNDER_WAY):
        # `ray job stop` sends SIGTERM, which Ray makes a SystemExit of.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return Resumable("interrupted")
        if isinstance(error, LedgerUnavailable):
            return Resumable(str(error))
    return error

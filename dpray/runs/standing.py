"""Every error that ends a run says whether the run is charged, and how it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from dpray.config.config import Config
from dpray.io.files import disk_is_full, read_json
from dpray.types import BudgetRefused, DprayError, InputError, Resumable, RunFailed

RESUME_HINT = "the same command goes on from there, at no further cost"

DISK_FULL = "output.path: no space is left on its disk, or on the ledger's; make room"


class Charged(Enum):
    NO = "nothing was charged"
    YES = "the run is charged"
    UNKNOWN = (
        "the ledger did not say whether the run is charged: the same command asks it, and charges "
        "nothing twice"
    )


class Standing:
    """A `Standing` knows from `run.json` and the ledger whether a run is charged. The runner sets
    `may_be_charged` before it charges, and `resume_hint` if going on is not for free."""

    def __init__(self, config: Config | None) -> None:
        # None as long as it is not read.
        self._config = config
        self.may_be_charged = config is not None and self._file(config).exists()
        self.resume_hint = RESUME_HINT
        self.is_same_plan = False
        """It is True once the runner knows that the run in the folder is of this plan."""

    @contextmanager
    def said(self) -> Iterator[None]:
        """Raise each error again with a sentence on the charge behind its message. For a run that
        is charged, an interruption and a ledger that cannot be used now become `Resumable`; a full
        disk always does."""
        try:
            yield
        except BaseException as error:
            charged = self._charged(error)
            ended = _resumable(error, charged)
            ended.standing = sentence = self._sentence(ended, charged)  # type: ignore[attr-defined]
            if not isinstance(ended, DprayError):
                ended.add_note(sentence)  # others know no `standing`
                raise
            # Without its cause, a library's error that may quote a text: Python shows both.
            raise ended from None

    def _charged(self, error: BaseException) -> Charged:
        from dpray.ledger.errors import LedgerUnavailable
        from dpray.ledger.ledger import Ledger

        if not self.may_be_charged or self._config is None:
            return Charged.NO
        try:
            run: dict[str, Any] = read_json(self._file(self._config))
        except InputError:
            # A run began here: without its run.json nobody knows how far it came.
            return Charged.UNKNOWN if self._file(self._config).exists() else Charged.NO
        if run.get("not_private"):
            return Charged.NO
        if run.get("state") != "planned":
            return Charged.YES
        # It may have been stopped between the charge and the note in run.json.
        if isinstance(error, LedgerUnavailable):
            return Charged.UNKNOWN
        try:
            with closing(Ledger.open(self._config.privacy.ledger)) as ledger:
                held = ledger.is_reserved(str(run.get("run_id")))
        except DprayError:  # a ledger that is missing may have been moved
            return Charged.UNKNOWN
        return Charged.YES if held else Charged.NO

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

    @staticmethod
    def _file(config: Config) -> Path:
        return Path(config.output.path) / "run.json"


def _resumable(error: BaseException, charged: Charged) -> BaseException:
    """Return the error as a `Resumable` if it is one for this run."""
    from dpray.ledger.errors import LedgerUnavailable

    if isinstance(error, Resumable):
        return error
    if disk_is_full(error):
        return Resumable(DISK_FULL)
    if charged is Charged.YES:
        # `ray job stop` sends SIGTERM, which Ray makes a SystemExit of.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return Resumable("interrupted")
        if isinstance(error, LedgerUnavailable):
            return Resumable(str(error))
    return error

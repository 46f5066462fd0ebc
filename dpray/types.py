"""Values common to all layers: prompts, budgets, errors and their messages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

Json = dict[str, Any]
"""A JSON object."""

ReadOnlyJson = Mapping[str, Any]
"""A JSON object that its reader does not change."""


def in_parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most `size`."""
    left = iter(items)
    while part := list(islice(left, size)):
        yield part


class DprayError(Exception):
    """An error that a person can act on. The command line ends with its `exit_code`.

    The message goes to terminals and logs. It names a key, a row number or a path, and never holds
    the text of a record.
    """

    exit_code = 1

    charge_status = ""
    """For an error that ended a run: whether the run is charged, and how to continue."""

    resume_hint = "the same command goes on from there, at no further cost"
    """For an error that ended a charged run: how to continue, and the cost."""

    def __str__(self) -> str:
        message = self._message()
        return f"{message}; {self.charge_status}" if self.charge_status else message

    def _message(self) -> str:
        return super().__str__()


class InputError(DprayError):
    """Input or configuration is bad: the message names the key or the row number."""

    exit_code = 2


class BudgetRefused(DprayError):
    """The ledger refuses a charge, and charges nothing of it."""

    exit_code = 3

    ledger = "URL"

    def __init__(
        self,
        dataset: str,
        asked: Budget,
        spent: Budget,
        left: Budget,
        detail: str = "",
        needed: Budget | None = None,
    ) -> None:
        self.dataset, self.asked, self.spent, self.left = dataset, asked, spent, left
        self.detail, self.needed = detail, needed
        super().__init__(dataset, asked, spent, left, detail, needed)

    def _message(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        way_on = ""
        if self.needed is not None:
            command = ledger_command("raise", self.ledger, self.dataset, self.needed)
            way_on = (
                f"; a larger budget is a weaker guarantee for all releases, the earlier ones too: "
                f"{command} --reason TEXT"
            )
        return (
            f"budget of '{self.dataset}' refused: asked {self.asked}, spent {self.spent}, "
            f"left {self.left}{detail}{way_on}"
        )


class Resumable(DprayError):
    """The run finished in part; the same command resumes it."""

    exit_code = 4


class RunFailed(DprayError):
    """The run cannot be finished: a mechanism failed, or was lost and may not be repeated."""


class LedgerError(DprayError):
    """The ledger cannot be read or written. A charge that may have been made stays charged."""


class LedgerUnavailable(LedgerError):
    """The database fails now; the same operation may succeed later."""


class LedgerFull(LedgerUnavailable, Resumable):
    """No space is left on the disk of the ledger."""


class LedgerConflict(LedgerError):
    """The ledger already has this charge key or unit of work, with other content."""


class AlreadyPublished(LedgerConflict):
    """Another attempt has published this unit of work, and a charge pays for one output of each."""


class MissingLedger(InputError):
    """There is no ledger at the URL."""


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) pair under add-or-remove-one-unit differential privacy."""

    epsilon: float
    delta: float

    def __str__(self) -> str:
        return f"(eps {self.epsilon:.6g}, delta {self.delta:.3g})"


DATASET_NAME = re.compile(r"(?=.*[^ ])[A-Za-z0-9._ -]{1,200}")
"""The ledger's name of a data set. Without other letters: two names that look the same would be two
budgets."""

DATASET_RULE = (
    "the name of a data set has 1 to 200 letters (A to Z), digits, blanks, dots, hyphens and "
    "underscores"
)


def ledger_command(name: str, ledger: str, dataset: str, budget: Budget) -> str:
    """Return the command line of `dpray ledger create` or `raise`, for a message."""
    places = f"--ledger {shlex.quote(ledger)} --dataset {shlex.quote(dataset)}"
    epsilon, delta = (repr(float(x)).removesuffix(".0") for x in (budget.epsilon, budget.delta))
    return f"dpray ledger {name} {places} --epsilon {epsilon} --delta {delta}"


@dataclass(frozen=True)
class Prompt:
    """A user turn and the beginning of the answer, with a public system turn before both if it is
    not "". `repr` shows none: two may hold private text.

    Engines apply the model's chat template if it has one; otherwise the prompt is `system`, `user`
    and `prefix`, with blank lines between them and the model's bos token before.
    """

    user: str = field(repr=False)
    prefix: str = field(default="", repr=False)
    system: str = field(default="", repr=False)


WARNING = "warning"


@dataclass(frozen=True)
class Progress:
    """The progress of the present activity, in public quantities. There is no total if it would
    reveal the number of records."""

    activity: str
    completed: int = 0
    total: int | None = None
    detail: str = ""
    tokens_per_second: float | None = None

    @property
    def is_warning(self) -> bool:
        """Return whether this is no activity, but a warning, whose words are the `detail`."""
        return self.activity.rpartition(": ")[2] == WARNING  # a chain's has its method's name


OnProgress = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """Show nothing."""


def valid_unicode(text: str) -> str:
    """Replace lone surrogates by question marks. JSON and models' answers may hold them, but
    tokenizers, files and databases refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")


CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
"""Control characters for the brackets of a regular expression: C0 without tab and line feed,
delete, C1, and lone surrogates."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the part of an error that proposes the nearest of the names, "" without a near one."""
    plain = {each.strip().lower().replace("-", "_"): each for each in names}
    near = get_close_matches(name.strip().lower().replace("-", "_"), plain, n=1)
    return f" (did you mean '{plain[near[0]]}'?)" if near else ""


def is_interruption(error: BaseException) -> bool:
    """Return whether this ends the work from outside. Nothing else does, not even what is no
    `Exception`: a library in Rust raises that when it panics, as a tokenizer may at a text."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

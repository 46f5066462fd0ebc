"""The errors of a ledger."""

from __future__ import annotations

from dpray.types import DprayError, InputError, Resumable


class LedgerError(DprayError):
    """The ledger cannot be read or written now; whatever may have been charged stays charged."""


class LedgerUnavailable(LedgerError):
    """The database fails now; later the same operation may succeed."""


class LedgerFull(LedgerUnavailable, Resumable):
    """No space is left on the disk of the ledger."""


class LedgerConflict(LedgerError):
    """The ledger has the key already, for something else."""


class AlreadyPublished(LedgerConflict):
    """Another attempt has published this unit: a charge pays for one release of each."""


class MissingLedger(InputError):
    """There is no ledger at the URL."""


def broken_chain(dataset: str) -> LedgerError:
    return LedgerError(
        f"the ledger's entries of '{dataset}' are not as they were written: nothing more is "
        "charged to it (see `dpray ledger verify`)"
    )

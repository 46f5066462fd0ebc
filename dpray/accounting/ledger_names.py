"""Names of data sets, and the files that each one has been charged for.

One set of records has one budget. Its name is the same however it is written, and a file that was
charged to one data set is refused under the name of another. The ledger knows a file by a digest of
all of its bytes under a key of its own: a copy that is edited, sorted, converted or cut in parts is
another file to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import sqlalchemy as sa

from dpray.accounting.hash_chain import Chain, now
from dpray.accounting.ledger_schema import datasets, entries
from dpray.types import InputError

_NAME = re.compile(r"[A-Za-z0-9._ -]{1,200}")


def stored_name(connection: sa.Connection, name: str) -> str | None:
    """Return the name in the ledger of the data set that `name` means: case and the number of
    blanks make no other data set. None where the ledger has no such data set.

    Raises `InputError` where an older ledger has several such names, and none equals `name`.
    """
    made = sa.select(entries.c.dataset).where(entries.c.kind == "create")
    known = set(connection.execute(sa.union(sa.select(datasets.c.name), made)).scalars())
    if name in known:
        return name
    alike = sorted(other for other in known if _folded(other) == _folded(name))
    if len(alike) > 1:
        raise InputError(f"the ledger has {', '.join(map(repr, alike))}: write one as it is there")
    return alike[0] if alike else None


def new_name(name: str) -> str:
    """Return the name as the ledger will have it, without needless blanks. Raises `InputError` for
    one that is no plain name."""
    if not (_NAME.fullmatch(name) and name.strip()):
        raise InputError(
            "the name of a data set has 1 to 200 letters (A to Z), digits, blanks, dots, hyphens "
            "and underscores"
        )
    return _single_spaced(name)


def bind(connection: sa.Connection, chain: Chain, digests: Iterable[str]) -> None:
    """Note that the files with these digests, some hundreds at most, belong to the chain's data
    set. Raises `InputError` for a file of another data set: no second budget pays for its
    records."""
    query = sa.select(entries.c.key, entries.c.dataset).where(
        entries.c.kind == "data", entries.c.key.in_(digests := list(digests))
    )
    owners = {row.key: row.dataset for row in connection.execute(query)}
    for digest in digests:
        if digest not in owners:
            chain.append("data", digest, {}, at=now())
        elif owners[digest] != chain.dataset:
            raise InputError(
                f"privacy.dataset: the ledger knows this data, or a file of it, as "
                f"'{owners[digest]}': it has one budget, whatever name a run gives it"
            )


def _folded(name: str) -> str:
    return _single_spaced(name).casefold()


def _single_spaced(name: str) -> str:
    return " ".join(name.split())

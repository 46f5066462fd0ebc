"""`verify` and `show` read the ledger from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from dpray.accounting.hash_chain import Chain, Entry
from dpray.accounting.ledger_account import Account, check_price, read_account, stated_charge
from dpray.accounting.ledger_queries import all_entries, count, counted_entries, dataset_names
from dpray.accounting.ledger_store import datasets
from dpray.types import DprayError


def problems(connection: sa.Connection) -> Iterator[str]:
    """Return what `Ledger.verify` does."""
    ends = {row.name: row for row in connection.execute(sa.select(datasets))}
    for name, rows in groupby(all_entries(connection), key=lambda entry: entry.dataset):
        end = ends.pop(name, None)
        chain = Chain(name)
        yield from _dataset_problems(chain, rows)
        if end is None:
            yield f"data set '{name}': its own row is missing"
        elif (end.length, end.head, end.reservations) != chain.end:
            yield (
                f"data set '{name}': its chain has {chain.length} entries of {end.length}, "
                f"{chain.reservations} reservations of {end.reservations}, or ends in another "
                "entry than was written"
            )
    for name in ends:
        yield f"data set '{name}': all of its entries are missing"


def summaries(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return for each data set `dataset`, `budget`, `privacy_unit`, `neighboring_relation`,
    `composition`, `order`, `spent`, `left`, and `entries`: one for each reservation, with what it
    asked for and how many of its batches were started, published and failed."""
    return [_summary(connection, name) for name in dataset_names(connection)]


def _summary(connection: sa.Connection, name: str) -> dict[str, Any]:
    account = read_account(connection, name)
    if account is None:
        return {"dataset": name, "entries": []}
    return {
        "dataset": name,
        **account.terms(),
        "spent": vars(account.spent),
        "left": vars(account.left),
        "entries": [
            {
                "key": entry.key,
                "at": entry.at,
                **vars(stated_charge(entry.payload).reserved),
                "event": entry.values()["event"],
                "batches": count(connection, entry.key),
            }
            for entry in counted_entries(connection, name)[1:]
        ],
    }


def _dataset_problems(chain: Chain, rows: Iterator[Entry]) -> Iterator[str]:
    """Walk one chain; memory grows with the runs, not with their batches."""
    counted: list[Entry] = []
    open_runs: set[str] = set()
    for entry in rows:
        yield from chain.faults(entry)
        if entry.kind in ("create", "reserve"):
            counted.append(entry)
        elif entry.kind != "data" and entry.key not in open_runs:
            yield (
                f"data set '{chain.dataset}', entry {entry.seq}: '{entry.kind}' without an open "
                "reservation"
            )
        if entry.kind == "reserve":
            open_runs.add(entry.key)
        elif entry.kind == "commit":
            open_runs.discard(entry.key)
    yield from _account_problems(chain.dataset, counted)


def _account_problems(dataset: str, counted: list[Entry]) -> Iterator[str]:
    try:
        account = Account.replay(counted)
    except (DprayError, ValueError, KeyError, TypeError) as error:
        yield f"data set '{dataset}': its charges cannot be read ({type(error).__name__})"
        return
    for entry in counted[1:]:
        where = f"data set '{dataset}', reservation '{entry.key}'"
        values = entry.values()
        for term in ("privacy_unit", "neighboring_relation"):
            if values.get(term) != getattr(account, term):
                yield f"{where}: its {term} is not the budget's"
        try:
            charge = stated_charge(entry.payload)
            check_price(charge.event, charge.reserved)
        except (DprayError, ValueError) as error:
            yield f"{where}: {error}"
    if account.overspent:
        yield f"data set '{dataset}': spent {account.spent} of {account.budget}"

"""The ledger as a run sees it, and the ledger of a run that charges nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from dpray.accounting.events import Event
from dpray.accounting.hash_chain import Entry
from dpray.accounting.ledger_account import Account, Reservation
from dpray.types import Budget


class RunLedger(Protocol):
    """The operations of `Ledger` that runs, trainings and decoders use, each described there."""

    def reserve(
        self,
        dataset: str,
        charges: Mapping[str, tuple[Event, Budget]],
        privacy_unit: str,
        neighboring_relation: str,
        files: Iterable[bytes] = (),
    ) -> list[Reservation]: ...

    def account(self, dataset: str) -> Account | None: ...

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None: ...

    def publish_many(
        self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]
    ) -> int: ...

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool: ...

    def commit(self, key: str) -> bool: ...

    def last_commit(self, keys: Iterable[str]) -> Entry: ...

    def counts(self, key: str) -> dict[str, int]: ...

    def published(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]: ...

    def failed(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]: ...

    def started(self, key: str) -> Iterator[tuple[str, str]]: ...

    def unfinished(self, key: str) -> Iterator[tuple[str, str]]: ...


class NullLedger:
    """A `RunLedger` that keeps nothing. A run without noise claims nothing, so it is charged
    nothing."""

    def reserve(self, *arguments: Any, **named: Any) -> NoReturn:
        raise ValueError("a run that is not private is charged nothing")

    def account(self, dataset: str) -> Account | None:
        return None

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        pass

    def publish_many(self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        return 0

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        return False

    def commit(self, key: str) -> bool:
        return False

    def last_commit(self, keys: Iterable[str]) -> NoReturn:
        raise ValueError("a run that is not private has no commit")

    def counts(self, key: str) -> dict[str, int]:
        return dict.fromkeys(("started", "starts", "published", "failed", "committed"), 0)

    def published(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        return iter(())

    def failed(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        return iter(())

    def started(self, key: str) -> Iterator[tuple[str, str]]:
        return iter(())

    def unfinished(self, key: str) -> Iterator[tuple[str, str]]:
        return iter(())

"""The ledger as a detached Ray actor that a whole cluster charges through.

`Accountant` is a plain class and only delegates; `AccountantClient` has the ledger's methods and
can be sent to other actors and tasks. The actor keeps nothing that the ledger does not hold, so a
killed one is simply started again over the same ledger: every operation is idempotent by its key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

import dpray
from dpray.accounting.events import Event
from dpray.accounting.hash_chain import Entry
from dpray.accounting.ledger import Ledger
from dpray.accounting.ledger_account import Account, Reservation
from dpray.accounting.ledger_batches import PAGE, BatchListings, Listing, Place
from dpray.accounting.ledger_url import parse_url
from dpray.types import Budget, DprayError

NAMESPACE = "dpray"


@dataclass(frozen=True)
class Refusal:
    """An error of ours on its way to the caller. It travels as a value: Ray would wrap a raised
    one, log it, and fail to rebuild a class whose constructor takes more than a message."""

    kind: type[DprayError]
    args: tuple[Any, ...]
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: DprayError) -> Refusal:
        return cls(type(error), error.args, dict(vars(error)))

    def error(self) -> DprayError:
        error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        vars(error).update(self.fields)
        return error


class Accountant:
    """The actor's class: one ledger, one call at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ledger: Ledger | None = None

    def call(self, operation: str, *arguments: Any) -> Any:
        """What `Ledger.operation(*arguments)` answers, or the `Refusal` it met with."""
        try:
            # Not in the constructor: an actor that fails there leaves its name to a dead one.
            self._ledger = self._ledger or Ledger.open(self._url)
            return getattr(self._ledger, operation)(*arguments)
        except DprayError as error:
            return Refusal.of(error)


class AccountantClient(BatchListings):
    """The ledger's operations, carried out by the accountant actor. Each is described at `Ledger`,
    and raises what it raises there."""

    def __init__(self, url: str) -> None:
        # Absolute, because the actor has another working directory.
        self._url = parse_url(url).render_as_string(hide_password=False)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._actor = _start_actor(self._url, self._node_id)

    def create_dataset(
        self,
        name: str,
        budget: Budget,
        privacy_unit: str,
        neighboring_relation: str,
        composition: str = "basic",
        order: float | None = None,
    ) -> None:
        terms = (budget, privacy_unit, neighboring_relation, composition, order)
        self._call("create_dataset", name, *terms)

    def account(self, dataset: str) -> Account | None:
        account: Account | None = self._call("account", dataset)
        return account

    def reserve(
        self,
        dataset: str,
        key: str,
        event: Event,
        budget_asked: Budget,
        privacy_unit: str,
        neighboring_relation: str,
        files: Iterable[bytes] = (),
    ) -> Reservation:
        charge = (event, budget_asked, privacy_unit, neighboring_relation, list(files))
        reservation: Reservation = self._call("reserve", dataset, key, *charge)
        return reservation

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        self._call("begin", key, attempt_id, list(units))

    def publish(self, key: str, unit: str, attempt_id: str, sha256: str) -> bool:
        return bool(self._call("publish", key, unit, attempt_id, sha256))

    def publish_many(self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        return int(self._call("publish_many", key, attempt_id, list(releases)))

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        return bool(self._call("fail", key, unit, attempt_id, reason_class_name))

    def commit(self, key: str) -> bool:
        return bool(self._call("commit", key))

    def last_commit(self, keys: Iterable[str]) -> Entry:
        entry: Entry = self._call("last_commit", list(keys))
        return entry

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        entries: list[Entry] = self._call("page", listing, key, after, limit)
        return entries

    def counts(self, key: str) -> dict[str, int]:
        counts: dict[str, int] = self._call("counts", key)
        return counts

    def kill(self) -> None:
        """End the actor; the ledger stays, and the next call starts another actor."""
        ray.kill(self._actor)

    def _call(self, operation: str, *arguments: Any) -> Any:
        answer: Any
        try:
            answer = ray.get(self._actor.call.remote(operation, *arguments))
        except (RayActorError, OutOfMemoryError):
            # It may have written before it died. Asking again is safe: the ledger knows the key.
            self._actor = _start_actor(self._url, self._node_id)
            answer = ray.get(self._actor.call.remote(operation, *arguments))
        if isinstance(answer, Refusal):
            raise answer.error()
        return answer


def get_accountant(url: str) -> AccountantClient:
    """The accountant of the ledger at `url`: one actor for each ledger in the cluster, started if
    it is not running. The ledger itself has to be there: the first call says so if it is not."""
    return AccountantClient(url)


@retry(
    retry=retry_if_exception_type(RayActorError),
    stop=stop_after_attempt(10),
    wait=wait_exponential(multiplier=0.1, max=2),
    reraise=True,
)
def _start_actor(url: str, node_id: str) -> ActorHandle[Accountant]:
    """A living actor. For a moment after a death the name still leads to the dead one."""
    options: dict[str, Any] = {}
    if url.startswith("sqlite"):
        # The file is on the node that asked for the accountant, and on no other.
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor: Any = (
        ray.remote(Accountant)
        .options(
            name=actor_name(url),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_task_retries=0,
            num_cpus=0,
            **options,
        )
        .remote(url)
    )
    ray.get(actor.__ray_ready__.remote())
    living: ActorHandle[Accountant] = actor
    return living


def actor_name(url: str) -> str:
    """A name that hides the URL, which may hold a password, and that another version of dpray does
    not share: a detached actor outlives the program that started it."""
    return "accountant-" + hashlib.sha256(f"{dpray.__version__} {url}".encode()).hexdigest()[:20]

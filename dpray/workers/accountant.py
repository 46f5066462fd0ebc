"""A detached Ray actor holds the ledger, and a whole cluster charges through it.

The actor keeps nothing that the ledger does not hold, so a killed one is simply started again over
the same ledger: every operation is idempotent by its key.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from time import monotonic
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from dpray.ledger.ledger import Ledger
from dpray.ledger.url import parse_url
from dpray.types import BudgetRefused, DprayError
from dpray.version import __version__
from dpray.workers.metrics import Record, on_ray, show_budget

NAMESPACE = "dpray"

Ends = dict[str, tuple[int, str]]
"""It is what `Ledger.ends` returns."""

CONCURRENT_CALLS = 128
"""The actor has so many threads. Those that write at the same time share a transaction."""

SHOW_SECONDS = 1.0
"""A data set's budget is shown this often at most while charges are made."""

SHOW_SHARE = 0.05
"""Showing budgets takes this share of the time at most."""


class Accountant:
    """An `Accountant` is the actor: it delegates to its one ledger, and shows the budgets on the
    metrics page of its node."""

    def __init__(self, url: str, record: Record = on_ray) -> None:
        self._url, self._record = url, record
        self._ledger: Ledger | None = None
        self._opening = threading.Lock()
        self._next_show: dict[str, float] = {}

    def call(self, operation: str, *arguments: Any, **named: Any) -> tuple[Any, Ends]:
        """Return what `Ledger.operation(*arguments)` answers, or the DprayError that it raises (as
        a value, because Ray would wrap and log a raised one), and the ends of the chains that were
        seen, for the accountant after this one."""
        try:
            # Not in the constructor: an actor that fails there leaves its name to a dead one.
            with self._opening:
                ledger = self._ledger or self._open()
            answer = getattr(ledger, operation)(*arguments, **named)
        except DprayError as error:
            if isinstance(error, BudgetRefused):
                self.refused(error.dataset)
            return error, {}
        if operation in ("reserve", "account"):  # a run asks for the account when it is finished
            self._show_soon(ledger, arguments[0], at_once=operation == "account")
        return answer, ledger.ends()

    def refused(self, dataset: str) -> None:
        """Count a charge that the budget refused."""
        self._record("dpray_refusals", 1, {"dataset": dataset})

    def _open(self) -> Ledger:
        self._ledger = Ledger.open(self._url)
        for dataset in self._ledger.names():
            self._show(self._ledger, dataset)
        return self._ledger

    def _show_soon(self, ledger: Ledger, dataset: str, at_once: bool) -> None:
        """Show a data set's budget, unless it was shown a moment ago: that reads all its charges,
        and hundreds may be made in a second."""
        now = monotonic()
        if at_once or now >= self._next_show.get(dataset, -math.inf):
            self._next_show[dataset] = math.inf  # no other thread shows it meanwhile
            try:
                self._show(ledger, dataset)
            finally:
                pause = max(SHOW_SECONDS, (monotonic() - now) / SHOW_SHARE)
                self._next_show[dataset] = monotonic() + pause

    def _show(self, ledger: Ledger, dataset: str) -> None:
        """Show the budgets of a data set and of its ancestors, on which it draws."""
        with suppress(DprayError):  # what was asked for is done, and the next call shows it
            name: str | None = dataset
            while name is not None and (account := ledger.account(name)) is not None:
                committed = ledger.committed(account.dataset)
                show_budget(self._record, account.dataset, account.budget, account.spent, committed)
                name = account.parent


def _by_actor(method: Callable[..., Any]) -> Any:
    """Return the ledger's method as one that the actor carries out; its types are the ledger's."""

    @wraps(method)
    def call(client: AccountantClient, *arguments: Any, **named: Any) -> Any:
        plain = {name: _sendable(value) for name, value in named.items()}
        return client.call(method.__name__, *map(_sendable, arguments), **plain)

    return call


def _sendable(value: Any) -> Any:
    """Return a list for an iterable, which may be a generator; anything else as it is."""
    unsent = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    return list(value) if unsent else value


class AccountantClient(Ledger):
    """An `AccountantClient` is the ledger at `url` for a run, and can be sent to other actors: the
    accountant, one actor per ledger in the cluster, carries out its operations. It is started if it
    is not running. The ledger has to exist: the first call raises `MissingLedger` if it does not.
    """

    def __init__(self, url: str) -> None:
        # Absolute, because the actor has another working directory.
        self._url = parse_url(url).render_as_string(hide_password=False)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._actor = _start_actor(self._url, self._node_id)
        self._ends: Ends = {}

    account = _by_actor(Ledger.account)
    reserve = _by_actor(Ledger.reserve)
    begin = _by_actor(Ledger.begin)
    publish_many = _by_actor(Ledger.publish_many)
    fail = _by_actor(Ledger.fail)
    commit = _by_actor(Ledger.commit)
    last_commit = _by_actor(Ledger.last_commit)
    page = _by_actor(Ledger.page)
    counts = _by_actor(Ledger.counts)

    def close(self) -> None:
        """Leave the actor running: it serves every run on the ledger."""

    def count_refusal(self, dataset: str) -> None:
        ray.get(self._actor.refused.remote(dataset))

    def call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        answer: Any
        ends: Ends
        try:
            answer, ends = ray.get(self._actor.call.remote(operation, *arguments, **named))
        except (RayActorError, OutOfMemoryError):
            # It may have written before it died. A second call is safe: the ledger knows the key.
            self._actor = _start_actor(self._url, self._node_id)
            # The ledger may have been put back meanwhile; a new accountant would not know.
            ray.get(self._actor.call.remote("expect", self._ends))
            answer, ends = ray.get(self._actor.call.remote(operation, *arguments, **named))
        if isinstance(answer, DprayError):
            raise answer
        self._ends |= ends
        return answer


def count_refusal(url: str, dataset: str) -> None:
    """Have the accountant count a charge that the driver saw refused. Nothing but monitoring
    depends on it, so that an error of Ray's is passed over."""
    with suppress(RayError):
        AccountantClient(url).count_refusal(dataset)


@retry(
    retry=retry_if_exception_type(RayActorError),
    stop=stop_after_attempt(10),
    wait=wait_exponential(multiplier=0.1, max=2),
    reraise=True,
)
def _start_actor(url: str, node_id: str) -> ActorHandle[Accountant]:
    """Return a living actor. For a moment after a death the name still leads to the dead one."""
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
            max_concurrency=CONCURRENT_CALLS,
            num_cpus=0,
            **options,
        )
        .remote(url)
    )
    ray.get(actor.__ray_ready__.remote())
    living: ActorHandle[Accountant] = actor
    return living


def actor_name(url: str) -> str:
    """Return a name that hides the URL, which may hold a password, and that another version of
    dpray does not share: a detached actor outlives the program that started it."""
    return "accountant-" + hashlib.sha256(f"{__version__} {url}".encode()).hexdigest()[:20]

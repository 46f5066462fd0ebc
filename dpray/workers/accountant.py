"""A detached Ray actor keeps the ledger open, and a whole cluster charges through it.

The actor keeps nothing that the ledger does not hold, so a killed one is simply started again over
the same ledger: every operation is idempotent by its key.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import sqlalchemy as sa
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from dpray.ledger.ledger import Heads, Ledger, RunLedger, Write
from dpray.ledger.store import parse_url
from dpray.types import DprayError, Json, Resumable
from dpray.version import __version__

P = ParamSpec("P")
T = TypeVar("T")

NAMESPACE = "dpray"

CONCURRENT_CALLS = 128
"""The number of the actor's threads: as many calls wait at the same time."""

HEAD = "node:__internal_head__"
"""The resource that Ray gives to a cluster's head, and to no other node: 1 of it."""

GONE = (RayActorError, OutOfMemoryError)
"""Ray raises these for an actor that is gone, the second if its memory monitor ended it."""


class Accountant:
    """The actor carries out what waits in its queue in one transaction, and reads the ledger.

    A `DprayError` is returned as a value, because Ray would wrap and log a raised one.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._ledger: Ledger | None = None
        self._opening = threading.Lock()
        self._waiting: SimpleQueue[tuple[Write, Future[object]]] = SimpleQueue()
        threading.Thread(target=self._write_queue, daemon=True).start()

    def write(
        self, operation: Callable[..., object], *arguments: object, **options: object
    ) -> tuple[object, Heads]:
        """Return the operation's answer and the heads of the chains that were seen, for the
        accountant after this one."""
        try:
            ledger = self._open()
        except DprayError as error:
            return error, {}
        answer: Future[object] = Future()
        self._waiting.put((Write(operation, arguments, options), answer))
        return answer.result(), ledger.chain_heads()

    def read(
        self,
        query: Callable[Concatenate[sa.Connection, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T | DprayError:
        """Return what `Ledger.read` returns."""
        try:
            return self._open().read(query, *arguments, **options)
        except DprayError as error:
            return error

    def require_heads(self, heads: Heads) -> None:
        """Do as `Ledger.require_heads`."""
        self._open().require_heads(heads)

    def _write_queue(self) -> None:
        """Write all that waits, again and again."""
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            try:
                ledger = self._open()
                answers = ledger.write_together([operation for operation, _ in batch])
            except Exception as error:
                for _, answer in batch:
                    answer.set_exception(error)
            else:
                for (_, waiting), answer in zip(batch, answers, strict=True):
                    waiting.set_result(answer)

    def _open(self) -> Ledger:
        # Not in the constructor: an actor that fails there leaves its name to a dead one.
        with self._opening:
            if self._ledger is None:
                self._ledger = Ledger.open(self._url)
            return self._ledger


class AccountantClient(RunLedger):
    """The ledger at `url` for a run. It can be sent to other actors: the accountant, one actor per
    ledger in the cluster, carries out its operations, and is started if it is not running. The
    ledger has to exist: the first call raises `MissingLedger` if it does not."""

    def __init__(self, url: str) -> None:
        # Absolute, because the actor has another working directory.
        self._url = parse_url(url).render_as_string(hide_password=False)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._actor = while_lost(_start_actor, self._url, self._node_id)
        self._heads: Heads = {}

    def write(self, operation: Callable[..., T], *arguments: object, **options: object) -> T:
        answer: T | DprayError
        answer, heads = self._call("write", operation, *arguments, **options)
        if isinstance(answer, DprayError):
            raise answer
        self._heads |= heads
        return answer

    def read(self, query: Callable[..., T], *arguments: object, **options: object) -> T:
        answer: T | DprayError = self._call("read", query, *arguments, **options)
        if isinstance(answer, DprayError):
            raise answer
        return answer

    def close(self) -> None:
        """Leave the actor running: it serves every run on the ledger."""

    def _call(self, method: str, *arguments: object, **options: object) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments, **options))
        except GONE:
            return while_lost(self._call_another, method, *arguments, **options)

    def _call_another(self, method: str, *arguments: object, **options: object) -> Any:
        """Repeat a call with a new accountant. The last one may have written before it died, and a
        second call is safe: the ledger knows the key."""
        self._actor = _start_actor(self._url, self._node_id)
        # The ledger may have been put back meanwhile; a new accountant would not know.
        ray.get(self._actor.require_heads.remote(self._heads))
        return ray.get(getattr(self._actor, method).remote(*arguments, **options))


def while_lost(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call `function`, and again for some seconds while it fails because the accountant is lost.
    Raises Resumable after that."""
    retrying = Retrying(
        retry=retry_if_exception_type(GONE),
        stop=stop_after_attempt(10),
        wait=wait_exponential(multiplier=0.1, max=2),
        reraise=True,
    )
    try:
        return retrying(function, *arguments, **options)
    except GONE as error:
        raise Resumable("the ledger's accountant on Ray was lost again and again") from error


def _start_actor(url: str, node_id: str) -> ActorHandle[Accountant]:
    """Return a living actor. For a moment after a death the name still leads to the dead one."""
    actor: Any = (
        ray.remote(Accountant)
        .options(
            name=actor_name(url, node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=CONCURRENT_CALLS,
            num_cpus=0,
            **place_of(url, node_id),
        )
        .remote(url)
    )
    ray.get(actor.__ray_ready__.remote())
    living: ActorHandle[Accountant] = actor
    return living


def place_of(url: str, node_id: str) -> Json:
    """Return Ray's options for the accountant's node. A file is on the node that asked for the
    accountant, and on no other. Only the head has a database's password."""
    if _is_file(url):
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
    return {"resources": {HEAD: 0.001}}


def actor_name(url: str, node_id: str) -> str:
    """Return a name that hides the URL, which may hold a password, and that another version of
    dpray does not share: a detached actor outlives the program that started it. Nor do two nodes
    share it for a file: the same path is another file there, with other budgets."""
    place = f"{node_id} " if _is_file(url) else ""
    return "accountant-" + hashlib.sha256(f"{__version__} {place}{url}".encode()).hexdigest()[:20]


def _is_file(url: str) -> bool:
    return url.startswith("sqlite")

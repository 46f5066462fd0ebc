"""A gateway authenticates, limits, counts, and answers errors in OpenAI's format.

It is a plain ASGI application that knows no Ray, so that tests run it without a cluster; in a
cluster `applications.Ingress` is the actor around it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from dpray.serving.access import ANYBODY, Keys, cache_salt, is_loopback
from dpray.serving.admission import Admission
from dpray.serving.bodies import bounded, check_headers, json_object
from dpray.serving.coordinator import RENEWAL_SECONDS, Coordinator, Shared
from dpray.serving.errors import INTERNAL, ApiError, model_not_found
from dpray.serving.metrics import CONTENT_TYPE, Families, GatewayMetrics, merged_page
from dpray.serving.settings import ServeConfig


@dataclass(frozen=True)
class Caller:
    """Who sent a request, as the endpoints see it."""

    name: str
    salt: str = field(repr=False)
    """It is that of the caller's cache."""
    held: AsyncExitStack
    """It keeps its contexts open until the answer is sent."""


Endpoint = Callable[[dict[str, Any], Caller], Awaitable[Response]]
"""It answers a request's JSON object."""
Ready = Callable[[], Awaitable[Mapping[str, int]]]
"""It returns, for each deployment, how many running replicas it has."""
Translate = Callable[[Exception], ApiError | None]
"""It returns the API error for an exception that the endpoints raise."""

HEALTH, METRICS, MODELS = "/health", "/metrics", "/v1/models"
_LOST_CLIENT = 499
logger = logging.getLogger("dpray.serving")


class Gateway:
    """`endpoints` answer POST requests, by path; `models` are OpenAI's model cards.

    Without a `coordinator` this gateway is the only one.
    """

    def __init__(
        self,
        config: ServeConfig,
        endpoints: Mapping[str, Endpoint],
        models: Sequence[Mapping[str, Any]],
        ready: Ready,
        translate: Translate = lambda error: None,
        coordinator: Shared | None = None,
    ) -> None:
        self._config, self._ready, self._translate = config, ready, translate
        self._models = {str(model["id"]): dict(model) for model in models}
        self._keys = Keys(config.keys) if config.auth == "keys" else None
        self._name = secrets.token_hex(4)
        self._coordinator = coordinator or Coordinator(config.limits)
        self._admission = Admission(self._name, self._coordinator)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._metrics = GatewayMetrics()
        self._posts = frozenset(endpoints)
        self._router = Router(
            [
                Route(HEALTH, self._health),
                Route(METRICS, self._metrics_page),
                Route(MODELS, self._model_list),
                Route(MODELS + "/{model:path}", self._model_card),
                *(
                    Route(path, self._post(answer), methods=["POST"])
                    for path, answer in endpoints.items()
                ),
            ],
            redirect_slashes=False,
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        answer, route = _Answer(send), self._route(scope["path"])
        started, status = monotonic(), _LOST_CLIENT
        try:
            await self._guarded(scope, receive, answer)
            status = answer.status or _LOST_CLIENT
        except ClientDisconnect:
            pass
        except Exception as error:
            failure = self._api_error(error, route)
            status = failure.status
            await answer.fail(failure, scope, receive)
        finally:
            self._metrics.answered(route, status, monotonic() - started)

    def _route(self, path: str) -> str:
        if path in self._posts or path in (HEALTH, METRICS, MODELS):
            return path
        return MODELS + "/{model}" if path.startswith(MODELS + "/") else "other"

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's router raises for an unknown path where there is an app, and answers in plain
        # text where there is none.
        scope["app"] = self
        if scope["path"] == HEALTH:
            await self._router(scope, receive, send)
            return
        request = Request(scope)
        caller = self._caller(request)
        limits = self._config.limits
        async with AsyncExitStack() as held:
            if scope["method"] == "POST":
                check_headers(request, limits.max_request_bytes)
                await held.enter_async_context(self._admission.place(caller))
                salt = cache_salt(self._admission.secret, caller)
                scope["dpray.caller"] = Caller(caller, salt, held)
                receive = bounded(receive, limits.max_request_bytes)
            try:
                async with asyncio.timeout(limits.request_timeout_seconds):
                    await self._router(scope, receive, send)
            except TimeoutError:
                raise ApiError(504, "the request took too long", "timeout") from None

    def _caller(self, request: Request) -> str:
        if self._keys is not None:
            return self._keys.caller(request.headers.get("authorization", ""))
        # Serve binds its port by its own settings, which a file for `serve deploy` does not change
        # where Serve already runs: check the caller's address too.
        if not is_loopback(request.scope.get("client")):
            raise ApiError(403, "only callers on this machine are served", "not_local")
        return ANYBODY

    def _api_error(self, error: Exception, route: str) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, HTTPException):
            message = "no such method here" if error.status_code == 405 else "no such path here"
            return ApiError(error.status_code, message, "not_found")
        failure = self._translate(error) or INTERNAL
        if failure.status >= 500:
            # Its class only: the text of an error may quote the request.
            logger.error("%s: %s, answered %d", route, type(error).__name__, failure.status)
        return failure

    async def _health(self, request: Request) -> Response:
        ready = await self._ready()
        state = {name: "ready" if is_ready else "not ready" for name, is_ready in ready.items()}
        status, code = ("ok", 200) if ready and all(ready.values()) else ("not ready", 503)
        return JSONResponse({"status": status, "deployments": state}, code)

    async def _metrics_page(self, request: Request) -> Response:
        return Response(merged_page(await self._publish()), media_type=CONTENT_TYPE)

    async def _publish(self) -> Mapping[str, Families]:
        families = self._metrics.families(self._admission.in_flight)
        return await self._coordinator.publish(self._name, families)

    @asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        renewals = asyncio.create_task(self._renew())
        yield
        renewals.cancel()

    async def _renew(self) -> None:
        """Renew the leases of this gateway's requests and metrics, and what it knows of the models'
        replicas, for as long as it lives."""
        while True:
            self._admission.report()
            with suppress(Exception):
                async with asyncio.timeout(RENEWAL_SECONDS):
                    await self._publish()
                    # The places of a model are those of its replicas that run.
                    await self._ready()
            await asyncio.sleep(RENEWAL_SECONDS)

    async def _model_list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self._models.values())})

    async def _model_card(self, request: Request) -> Response:
        card = self._models.get(request.path_params["model"])
        if card is None:
            raise model_not_found(list(self._models))
        return JSONResponse(card)

    def _post(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body, caller = await request.body(), request.scope["dpray.caller"]
            async with self._turns[caller.name]:
                # The bodies of a key are read one at a time, and those of others in between.
                await asyncio.sleep(0)
                value = json_object(body, self._config.limits.max_request_entries)
            return await endpoint(value, caller)

        return answer


class _Answer:
    """Sends as ASGI's `send`, and keeps track of how much of the answer was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self._streams_events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {name.lower(): value for name, value in message.get("headers", [])}
            kind = headers.get(b"content-type", b"")
            self._streams_events = kind.startswith(b"text/event-stream")
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Send the error as the answer, or as the last event of a stream that has begun."""
        if self.status is None:
            await error.response(scope, receive, self._send)
            return
        last = error.event if self._streams_events else b""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

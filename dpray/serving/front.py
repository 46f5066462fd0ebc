"""Ray Serve's own HTTP proxy, and how dpray has it answer.

Every request reaches a gateway through this proxy. If the gateway dies, or none has room, the
proxy answers for itself: with a plain 500, or with a 503 that tells no time to wait. `FrontAnswers`
turns these answers into what the guard says of a lost replica, so that clients try again.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpray.serving.errors import ApiError

FRONT_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "dpray.serving.front:front_middlewares",
    # Serve looks every second whether its proxy lives, without which nobody is served; otherwise
    # every ten. It ends one that does not answer three times in a row: a flood may take so long.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Serve's controller and proxy read it when they start. It comes from the job that starts Serve, or
from the machine."""
_PREFIX = "/v1/"


def front_middlewares() -> list[Middleware]:
    return [Middleware(FrontAnswers)]


class FrontAnswers:
    """An ASGI middleware that replaces failures which no gateway has written."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_PREFIX):
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def pass_on(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = not _is_failure_of_the_proxy(message)
            if has_begun:
                await send(message)

        await self._app(scope, receive, pass_on)
        if not has_begun:
            message = "the request was lost or found no room; send it again"
            lost = ApiError(503, message, "overloaded", headers={"Retry-After": "1"})
            await lost.response(scope, receive, send)


def _is_failure_of_the_proxy(message: Message) -> bool:
    """Return whether Serve's proxy itself begins this answer: a gateway's errors are JSON."""
    if message["status"] < 500:
        return False
    headers = {name.lower(): value for name, value in message.get("headers", [])}
    return not headers.get(b"content-type", b"").startswith(b"application/json")

"""`FrontAnswers` replaces the failures that Ray Serve's own HTTP proxy answers.

Every request reaches a gateway through this proxy. If the gateway dies, or if none has room, the
proxy itself answers with a plain 500, or with a 503 without `Retry-After`. `FrontAnswers` makes an
error in OpenAI's format of both, so that clients try again.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpray.serving.errors import ApiError

FRONT_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "dpray.serving.front:front_middlewares",
    # Nobody is served without a proxy: Serve checks every second whether it lives, not every ten.
    # It ends a proxy that misses three checks in a row, so a check has time for a flood to pass.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Serve's controller and proxy read these variables when they start. The job that starts Serve sets
them, or the machine does."""
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

"""Errors have OpenAI's format: `{"error": {message, type, param, code}}`.

Their messages are dpray's own: a request's words or an exception's text may hold a prompt.

Every request reaches a gateway through Ray Serve's own HTTP proxy. If the gateway dies, or if none
has room, the proxy itself answers with a plain 500, or with a 503 without `Retry-After`.
`FrontAnswers` turns both into OpenAI's format, so that clients try again.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CONTEXT = re.compile(r"maximum (?:context|model) length|max_model_len|longer than the maximum")
_CAUSES = {
    # Their own words, not the caller's, which may stand between them.
    "logit_bias": ("logit_bias", "has a token that the model does not have"),
    "prompt cannot be empty": ("prompt", "is empty, or has no token"),
    "at least one prompt": ("prompt", "is empty, or has no token"),
    "template": (
        "messages",
        "are not what the model's chat template takes, or it has none: then send a prompt to "
        "/v1/completions",
    ),
}
"""Words in a message of the model's server lead to the key that is wrong, and to the reason."""
logger = logging.getLogger("dpray.serving")


class ApiError(Exception):
    """Carries an HTTP status and a message that holds none of the caller's words."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, other)
        shown = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": shown}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)

    @property
    def event(self) -> bytes:
        """Return the error as a server-sent event, for a stream that has begun."""
        return f"data: {json.dumps(self.body)}\n\n".encode()


def api_error(error: Exception) -> ApiError:
    """Return the API error for any exception. The log gets the class of one that is the server's
    fault, and never its text."""
    found = error if isinstance(error, ApiError) else _refusal(error) or _failure(error)
    if found.status >= 500:
        logger.error("%s, answered %d", type(error).__name__, found.status)
    return found


def reraise(request: Request, error: Exception) -> None:
    """Handle an application's exception: pass it on to the guard."""
    raise error


def _refusal(error: Exception) -> ApiError | None:
    """Return the API error for a request that is wrong."""
    # vLLM's errors by their names, and Ray's by their shape: naming the classes imports vLLM.
    if isinstance(error, RequestValidationError) or "VLLMClientError" in _names(error):
        parameter = getattr(error, "parameter", None)
        if found := _cause(f"{parameter} {error}"):
            return found
        message = "the values of the keys are not valid together"
        return ApiError(400, message, "invalid_value", parameter)
    if isinstance(error, HTTPException):
        message = "no such method here" if error.status_code == 405 else "no such path here"
        return ApiError(error.status_code, message, "not_found")
    status = getattr(error, "status_code", None)
    if status == 404:
        return ApiError(404, "no such model here", "model_not_found", "model")
    if isinstance(status, int) and 400 <= status < 500:
        if _CONTEXT.search(str(getattr(error, "message", ""))):
            message = "the prompt and max_tokens are longer than the model's context"
            return ApiError(status, message, "context_length_exceeded")
        message = "the model does not take this request"
        found = _cause(str(getattr(error, "message", "")))
        return found or ApiError(status, message, "invalid_value")
    return None


def _cause(said: str) -> ApiError | None:
    """Return a 400 that names the key which the model's server finds wrong."""
    for words, (key, why) in _CAUSES.items():
        if words in said:
            return ApiError(400, f"{key}: {why}", "invalid_value", key)
    return None


def _failure(error: Exception) -> ApiError:
    """Return the API error for a model that does not answer: a 503 may succeed when retried."""
    retry = {"Retry-After": "1"}
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took too long", "timeout")
    if isinstance(error, BackPressureError):
        return ApiError(503, "too many requests are waiting", "overloaded", headers=retry)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return ApiError(503, "the model is not ready", "not_ready", headers=retry)
    is_dead = "EngineDeadError" in _names(error)
    is_lost = isinstance(error, RayError) and not isinstance(error, RayTaskError)
    if is_dead or is_lost or isinstance(error, RayActorError):
        message = "the model's replica was lost and is being replaced"
        return ApiError(503, message, "replica_lost", headers=retry)
    return ApiError(500, "the server failed on this request", "internal_error")


def _names(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


FRONT_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "dpray.serving.errors:front_middlewares",
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

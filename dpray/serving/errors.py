"""Errors have OpenAI's format: `{"error": {message, type, param, code}}`.

Their messages are dpray's own: a request's words or an exception's text may hold a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


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
    def body(self) -> dict[str, Any]:
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


def unavailable(message: str, code: str) -> ApiError:
    """Make a 503, after which another try may succeed."""
    return ApiError(503, message, code, headers={"Retry-After": "1"})


def model_not_found(models: list[str]) -> ApiError:
    return ApiError(
        404, f"no such model here; there is {', '.join(models)}", "model_not_found", "model"
    )


INTERNAL = ApiError(500, "the server failed on this request", "internal_error")

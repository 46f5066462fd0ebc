"""Errors of Ray, Serve and vLLM become API errors without their texts, which may hold a prompt."""

from __future__ import annotations

import re

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from dpray.serving.errors import ApiError, unavailable

_CONTEXT = re.compile(r"maximum (?:context|model) length|max_model_len|longer than the maximum")


def api_error(error: Exception) -> ApiError | None:
    """Return the API error for a known error, None for any other, which is an internal error."""
    if isinstance(error, BackPressureError):
        return unavailable("too many requests are waiting", "overloaded")
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return unavailable("the model is not ready", "not_ready")
    if "EngineDeadError" in {kind.__name__ for kind in type(error).__mro__}:
        return unavailable("the model's engine was lost and is being restarted", "replica_lost")
    if isinstance(error, RayActorError) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    ):
        return unavailable("the model's replica was lost and is being replaced", "replica_lost")
    # Ray's OpenAIHTTPException, by its shape: naming it would import vLLM.
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        if _CONTEXT.search(str(getattr(error, "message", ""))):
            message = "the prompt and max_tokens are longer than the model's context"
            return ApiError(status, message, "context_length_exceeded")
        return ApiError(status, "the model does not take this request", "invalid_value")
    return None

"""A client for OpenAI-compatible endpoints, which may answer with anything, and their errors as
dpray's, without a word of a request or an answer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import openai

from dpray.config.sections import Endpoint
from dpray.engines.base import EndpointBusy, EngineError

LARGEST_ANSWER = 16 << 20
"""The most bytes of an answer, far more than any text of `max_tokens` tokens takes."""

UNPACKED_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Each of these unpacks a chunk to a thousand times its size at most; others, or several one after
the other, unpack a few KB to GBs."""

HINTS = {
    401: "{section}.api_key is not the endpoint's",
    403: "{section}.api_key may not do this",
    404: "no such {section}.model, or no such path: most values of {section}.base_url end in /v1",
}


class AnswerRefused(openai.OpenAIError):
    """The endpoint's answer is too large, or packed in a way that is not read. The client does not
    ask again after it."""


class _BoundedClient(openai.DefaultHttpxClient):
    """An HTTP client for an endpoint that may answer with anything. It follows no redirect: the
    prompts, and on the same host the key, would go to an address that nobody configured. An answer
    has `seconds` in all after its headers: a timeout of HTTP libraries begins again with each
    byte."""

    def __init__(self, seconds: float) -> None:
        super().__init__(timeout=seconds, follow_redirects=False)
        self._seconds = seconds

    def send(self, request: Any, **options: Any) -> Any:
        options["stream"] = True
        response = super().send(request, **options)
        try:
            content = self._read(response)
        finally:
            response.close()
        unpacked = [(k, v) for k, v in response.headers.items() if k != "content-encoding"]
        return type(response)(
            response.status_code, headers=unpacked, content=content, request=request
        )

    def _read(self, response: Any) -> bytes:
        if response.headers.get("content-encoding", "").lower() not in UNPACKED_ENCODINGS:
            raise AnswerRefused
        end, content = monotonic() + self._seconds, bytearray()
        for part in response.iter_bytes():
            content += part
            if len(content) > LARGEST_ANSWER:
                raise AnswerRefused
            if monotonic() > end:
                raise openai.APITimeoutError(request=response.request)
        return bytes(content)


def client_of(endpoint: Endpoint, *, as_environment_says: bool = True) -> openai.OpenAI:
    """Return a client of the endpoint. It tries a request `attempts` times in all, after rate
    limits, server errors, timeouts and lost connections. `api_key` None: the client's usual
    variable, or none. Only the endpoint of the language model is `as_environment_says`: another one
    may be somebody else's, who would get that key and the organization's name."""
    # They log requests, the first with their bodies, at level DEBUG.
    for name in ("openai", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    usual = os.environ.get("OPENAI_API_KEY", "none") if as_environment_says else "none"
    client = openai.OpenAI(
        api_key=endpoint.api_key or usual,  # a local server wants no key
        base_url=endpoint.base_url,
        timeout=endpoint.timeout,
        max_retries=endpoint.attempts - 1,
        http_client=_BoundedClient(endpoint.timeout),
    )
    if not as_environment_says:
        client.organization = client.project = None
        client._custom_headers = {}
    return client


@contextmanager
def endpoint_errors(model: str, section: str) -> Iterator[None]:
    """Raise EngineError for an error of the client, EndpointBusy for one that may pass; `section`
    is that of the keys which the message names."""
    try:
        yield
    except openai.APIStatusError as error:
        # Too many requests, or an error of the server: the configuration is not to blame.
        may_pass = error.status_code == 429 or error.status_code >= 500
        kind = EndpointBusy if may_pass else EngineError
        raise kind(f"{model}: {_why(error, section)}") from None
    except AnswerRefused:
        why = f"has more than {LARGEST_ANSWER:,} bytes, or is packed in a way that is not read"
        raise EngineError(f"{model}: the endpoint's answer {why}") from None
    except openai.OpenAIError as error:
        nobody = type(error.__cause__).__name__ == "ConnectError"
        lost = isinstance(error, openai.APIConnectionError) and not nobody
        hint = f": nothing answers at {section}.base_url" if nobody else ""
        what = f"no answer from the endpoint ({type(error).__name__}){hint}"
        raise (EndpointBusy if lost else EngineError)(f"{model}: {what}") from None
    except (ValueError, RecursionError):  # also of 5,000 digits, and of 100,000 brackets
        raise EngineError(f"{model}: the endpoint's answer has no valid JSON") from None


def _why(error: openai.APIStatusError, section: str) -> str:
    """Return what the endpoint's error means, with its code and parameter and without its words."""
    status = error.status_code
    code = shown_code(error.code) or shown_code(error.type)
    names = ("code", code), ("param", shown_code(error.param))
    words = [f"{name} {value}" for name, value in names if value and value != str(status)]
    named = f" ({', '.join(words)})" if words else ""
    hint = f": {HINTS[status].format(section=section)}" if status in HINTS else ""
    if 300 <= status < 400:
        hint = " (redirects are not followed)"
    return f"the endpoint answered with HTTP status {status}{named}{hint}"


def shown_code(name: object) -> str:
    """Return a name that the endpoint gives, "" for anything else."""
    is_name = isinstance(name, str) and re.fullmatch(r"[\w.\[\]-]{1,64}", name, re.ASCII)
    return str(name) if is_name else ""

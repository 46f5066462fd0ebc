"""An OpenAI-compatible API generates texts; it has no logits for lockstep decoding."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import openai

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Completion,
    EngineError,
    OnCompletion,
    Prompt,
    Prompts,
    Sampling,
    Samplings,
)

_MISSING = object()

LARGEST_ANSWER = 16 << 20
"""The most bytes of an answer, far more than any text of `max_tokens` tokens takes."""

UNPACKED_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Each of these unpacks a chunk to a thousand times its size at most; others, or several one after
the other, unpack a few KB to GBs."""


class AnswerRefused(openai.OpenAIError):
    """The endpoint's answer is too large, or packed in a way that is not read. The client does not
    ask again after it."""


class _BoundedClient(openai.DefaultHttpxClient):
    """An HTTP client for an endpoint that may answer with anything. It follows no redirect: the
    prompts, and on the same host the key, would go to an address that nobody configured. An answer
    has `seconds` in all after its headers: a timeout of HTTP libraries begins anew with each
    byte."""

    def __init__(self, seconds: float) -> None:
        super().__init__(timeout=seconds, follow_redirects=False)
        self._seconds = seconds

    def send(self, request: Any, **options: Any) -> Any:
        options["stream"] = True
        response: Any = super().send(request, **options)
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


class OpenAIEngine:
    """A `TextGenerator` that calls an endpoint through the `openai` client.

    `api` "chat" sends `Prompt.user` as the user message; a non-empty `prefix` follows as the
    beginning of the assistant's message, which vLLM continues (the two extra body fields) and other
    servers take as an example. "completions" sends `user`, a blank line and `prefix`. The client
    itself tries a request `attempts` times in all, after rate limits, server errors, timeouts and
    lost connections. An answer without content, or one that a content filter ended, is an empty
    text. A server that ignores `max_tokens` is not corrected: there is no tokenizer here. `top_k`
    is no parameter of the API: it is sent in the body only if it is set. `api_key` None: the
    client's usual variable, or none.
    """

    def __init__(self, config: EngineConfig) -> None:
        # They log requests, the first with their bodies, at level DEBUG.
        for name in ("openai", "httpx", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._config = config

    def close(self) -> None:
        """Do nothing: the engine holds nothing between calls."""

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        """Generate as the protocol says. After the first error no new call begins; those in flight
        end and are handed to `on_completion`, because they are paid for."""
        calls = list(enumerate(zip(prompts, samplings, strict=True)))
        stopping, one_at_a_time = threading.Event(), threading.Lock()

        def completed(call: tuple[int, tuple[Prompt, Sampling]]) -> Completion | None:
            i, (prompt, sampling) = call
            if stopping.is_set():
                return None
            try:
                completion = self._ask(client, prompt, sampling)
                if on_completion is not None:
                    with one_at_a_time:
                        on_completion(i, completion)
            except BaseException:
                stopping.set()
                raise
            return completion

        with self._client() as client, ThreadPoolExecutor(self._config.max_in_flight) as pool:
            found = list(pool.map(completed, calls))
        return [completion for completion in found if completion is not None]

    def _client(self) -> openai.OpenAI:
        options: dict[str, Any] = self._config.model_dump(include={"base_url", "timeout"})
        # A local server wants no key.
        key = self._config.api_key or os.environ.get("OPENAI_API_KEY", "none")
        http_client = _BoundedClient(self._config.timeout)
        retries = self._config.attempts - 1
        return openai.OpenAI(api_key=key, max_retries=retries, http_client=http_client, **options)

    def _ask(self, client: openai.OpenAI, prompt: Prompt, sampling: Sampling) -> Completion:
        """Ask once. Raises EngineError, whose message quotes neither the prompt nor the answer."""
        model = self._config.model
        try:
            return self._completion(self._answer(client, prompt, sampling))
        except openai.APIStatusError as error:
            status = error.status_code
            hint = " (redirects are not followed)" if 300 <= status < 400 else ""
            why = f"the endpoint answered with HTTP status {status}{hint}"
            raise EngineError(f"{model}: {why}") from None
        except AnswerRefused:
            why = f"has more than {LARGEST_ANSWER:,} bytes, or is packed in a way that is not read"
            raise EngineError(f"{model}: the endpoint's answer {why}") from None
        except openai.OpenAIError as error:
            name = type(error).__name__
            raise EngineError(f"{model}: no answer from the endpoint ({name})") from None
        except (ValueError, RecursionError):  # also of 5,000 digits, and of 100,000 brackets
            raise EngineError(f"{model}: the endpoint's answer has no valid JSON") from None

    def _answer(self, client: openai.OpenAI, prompt: Prompt, sampling: Sampling) -> Any:
        body: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k else {}
        common: dict[str, Any] = {
            "model": self._config.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
        }
        if self._config.api == "completions":
            text = f"{prompt.user}\n\n{prompt.prefix}"
            return client.completions.create(prompt=text, extra_body=body, **common)
        messages: list[Any] = [{"role": "user", "content": prompt.user}]
        if prompt.prefix:
            messages.append({"role": "assistant", "content": prompt.prefix})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return client.chat.completions.create(messages=messages, extra_body=body, **common)

    def _completion(self, answer: Any) -> Completion:
        """Read an answer of which the client has checked nothing: any attribute may be missing."""
        try:
            choice = answer.choices[0]
            written = choice.text if self._config.api == "completions" else choice.message.content
        except (AttributeError, LookupError, TypeError):
            written = choice = _MISSING
        if not (written is None or isinstance(written, str)):
            raise EngineError(f"{self._config.model}: the endpoint's answer has no text")
        reason, usage = getattr(choice, "finish_reason", None), getattr(answer, "usage", None)
        return Completion(
            "" if written is None or reason == "content_filter" else written,
            _count(getattr(usage, "prompt_tokens", None)),
            _count(getattr(usage, "completion_tokens", None)),
        )


def _count(tokens: Any) -> int:
    """Return a number of tokens, 0 for anything else."""
    return tokens if type(tokens) is int and 0 <= tokens < 2**31 else 0

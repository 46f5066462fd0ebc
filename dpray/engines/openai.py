"""An OpenAI-compatible API generates texts; it has no logits for lockstep decoding."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_any,
    stop_when_event_set,
    wait_random_exponential,
)

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


class _Malformed(Exception):
    """An answer breaks the API's contract: no JSON, no choices, or no text in its place."""


# A timeout is an APIConnectionError; every status from 500 on is an InternalServerError.
_TRANSIENT = (
    openai.APIConnectionError,
    openai.RateLimitError,
    openai.InternalServerError,
    _Malformed,
)

_MISSING = object()


class OpenAIEngine:
    """Is a `TextGenerator` that goes through the `openai` client.

    `api` "chat" sends `Prompt.user` as the user message; a non-empty `prefix` follows as the
    beginning of the assistant's message, which vLLM continues (the two extra body fields) and other
    servers take as an example. "completions" sends `user`, a blank line and `prefix`. After rate
    limits, server errors, timeouts, lost connections and malformed answers a request is tried
    `attempts` times in all, with growing random pauses of at most `max_pause` seconds. An answer
    without content, or one that a content filter ended, is an empty text. A server that ignores
    `max_tokens` is not corrected: there is no tokenizer here. `top_k` is no parameter of the API:
    it is sent in the body only where set. `api_key` None: the client's usual variable, or none.
    """

    def __init__(self, config: EngineConfig, *, max_pause: float = 30.0) -> None:
        # They log requests, the first with their bodies, at level DEBUG.
        for name in ("openai", "httpx", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._config, self._max_pause = config, max_pause

    def close(self) -> None:
        """Do nothing: the engine holds nothing between calls."""

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        """Generate as the protocol says. After the first error no new call begins; those in flight
        end and are handed to `on_completion`, because they are paid for."""
        stopping = threading.Event()
        work = self._generate(prompts, samplings, on_completion, stopping)
        # In a thread of its own: the caller's may be running an event loop already.
        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(asyncio.run, work).result()
            finally:
                stopping.set()

    async def _generate(
        self,
        prompts: Prompts,
        samplings: Samplings,
        on_completion: OnCompletion | None,
        stopping: threading.Event,
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        errors: list[Exception] = []
        waiting = iter(list(enumerate(zip(prompts, samplings, strict=True))))

        async def work(client: openai.AsyncOpenAI) -> None:
            for i, (prompt, sampling) in waiting:
                try:
                    completions[i] = await self._retried(client, prompt, sampling, stopping)
                    if on_completion is not None:
                        on_completion(i, completions[i])
                except Exception as error:
                    errors.append(error)
                    stopping.set()
                if stopping.is_set():
                    return

        async with self._client() as client:
            workers = min(self._config.max_in_flight, len(prompts))
            await asyncio.gather(*(work(client) for _ in range(workers)))
        if errors:
            raise errors[0]
        return [completions[i] for i in range(len(prompts))]

    def _client(self) -> openai.AsyncOpenAI:
        options: dict[str, Any] = self._config.model_dump(include={"base_url", "timeout"})
        try:
            return openai.AsyncOpenAI(api_key=self._config.api_key, max_retries=0, **options)
        except openai.OpenAIError:  # no key anywhere: a local server wants none
            return openai.AsyncOpenAI(api_key="none", max_retries=0, **options)

    async def _retried(
        self,
        client: openai.AsyncOpenAI,
        prompt: Prompt,
        sampling: Sampling,
        stopping: threading.Event,
    ) -> Completion:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TRANSIENT),
            wait=wait_random_exponential(multiplier=0.5, max=self._max_pause),
            stop=stop_any(stop_after_attempt(self._config.attempts), stop_when_event_set(stopping)),
            reraise=True,
        )
        try:
            return await retrying(self._ask, client, prompt, sampling)
        except openai.APIStatusError as error:  # its message may quote the prompt
            raise EngineError(
                f"{self._config.model}: the endpoint answered with HTTP status {error.status_code}"
            ) from None
        except openai.OpenAIError as error:
            raise EngineError(
                f"{self._config.model}: no answer from the endpoint ({type(error).__name__})"
            ) from None
        except _Malformed as error:
            raise EngineError(f"{self._config.model}: the endpoint's answer has {error}") from None

    async def _ask(
        self, client: openai.AsyncOpenAI, prompt: Prompt, sampling: Sampling
    ) -> Completion:
        body: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k else {}
        common: dict[str, Any] = {
            "model": self._config.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
        }
        answer: Any
        try:
            if self._config.api == "completions":
                text = f"{prompt.user}\n\n{prompt.prefix}"
                answer = await client.completions.create(prompt=text, extra_body=body, **common)
            else:
                messages: list[Any] = [{"role": "user", "content": prompt.user}]
                if prompt.prefix:
                    messages.append({"role": "assistant", "content": prompt.prefix})
                    body |= {"continue_final_message": True, "add_generation_prompt": False}
                answer = await client.chat.completions.create(
                    messages=messages, extra_body=body, **common
                )
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise _Malformed("no valid JSON") from None
        return self._completion(answer)

    def _completion(self, answer: Any) -> Completion:
        """Read an answer of which the client has checked nothing: any attribute may be missing."""
        choices = getattr(answer, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise _Malformed("no choices")
        if self._config.api == "completions":
            written = getattr(choices[0], "text", _MISSING)
        else:
            written = getattr(getattr(choices[0], "message", None), "content", _MISSING)
        if not (written is None or isinstance(written, str)):
            raise _Malformed("no text in its first choice")
        reason = getattr(choices[0], "finish_reason", None)
        usage = getattr(answer, "usage", None)
        return Completion(
            "" if written is None or reason == "content_filter" else written,
            getattr(usage, "prompt_tokens", None) or 0,
            getattr(usage, "completion_tokens", None) or 0,
            "length" if reason == "length" else "stop",
        )

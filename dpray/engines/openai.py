"""An OpenAI-compatible API generates texts; it has no logits for lockstep decoding."""

from __future__ import annotations

import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import openai

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Completion,
    EndpointBusy,
    EngineError,
    OnCompletion,
    Prompt,
    Prompts,
    Sampling,
    Samplings,
)
from dpray.engines.text import cut_at_stop

_MISSING = object()

LARGEST_ANSWER = 16 << 20
"""The most bytes of an answer, far more than any text of `max_tokens` tokens takes."""

UNPACKED_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Each of these unpacks a chunk to a thousand times its size at most; others, or several one after
the other, unpack a few KB to GBs."""


LEFT_OUT = ("max_tokens", "continue_final_message", "add_generation_prompt", "top_p", "stop",
            "temperature")  # fmt: skip
"""Parameters that some models do not know. They are asked again without: `max_tokens` has a newer
name, and texts are cut at `stop` here. Without temperature or top_p a model takes its own."""

UNKNOWN = re.compile(
    "unsupported|unknown|unrecogni[sz]ed|forbidden|not (be )?(support|permit|allow)|cannot both"
)

FILTERED = ("content_filter", "content_policy_violation")
"""With these codes an endpoint answers a prompt that its content filter refuses."""

HINTS = {
    401: "engine.api_key is not the endpoint's",
    403: "engine.api_key may not do this",
    404: "no such engine.model, or no such path: most values of engine.base_url end in /v1",
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

    `api` "chat" sends `Prompt.user` as the user message, after a `system` message if there is one;
    a non-empty `prefix` follows as the beginning of the assistant's message, which vLLM continues
    (the two extra body fields) and other servers take as an example. "completions" sends them with
    blank lines between them. The client
    itself tries a request `attempts` times in all, after rate limits, server errors, timeouts and
    lost connections, and again without a parameter of `LEFT_OUT` that the model does not know. An
    answer without content, or one that a content filter ended, is an empty text. A server that
    ignores `max_tokens` is not corrected: there is no tokenizer here. `top_k` is no parameter of
    the API: it is sent in the body only if it is set. `api_key` None: the client's usual variable,
    or none.
    """

    def __init__(self, config: EngineConfig) -> None:
        # They log requests, the first with their bodies, at level DEBUG.
        for name in ("openai", "httpx", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._config = config
        self.left_out: set[str] = set()
        """The parameters that the model does not know."""

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
        model, without = self._config.model, frozenset(self.left_out)
        try:
            return self._completion(self._answer(client, prompt, sampling, without), sampling)
        except openai.APIStatusError as error:
            if error.code in FILTERED:
                return Completion("", 0, 0, finish_reason="content_filter")
            unknown = _unknown_parameter(error)
            if unknown is None or unknown in without:
                kind = EndpointBusy if _may_pass(error.status_code) else EngineError
                raise kind(f"{model}: {_why(error)}") from None
        except AnswerRefused:
            why = f"has more than {LARGEST_ANSWER:,} bytes, or is packed in a way that is not read"
            raise EngineError(f"{model}: the endpoint's answer {why}") from None
        except openai.OpenAIError as error:
            nobody = type(error.__cause__).__name__ == "ConnectError"
            lost = isinstance(error, openai.APIConnectionError) and not nobody
            hint = ": nothing answers at engine.base_url" if nobody else ""
            what = f"no answer from the endpoint ({type(error).__name__}){hint}"
            raise (EndpointBusy if lost else EngineError)(f"{model}: {what}") from None
        except (ValueError, RecursionError):  # also of 5,000 digits, and of 100,000 brackets
            raise EngineError(f"{model}: the endpoint's answer has no valid JSON") from None
        self.left_out.add(unknown)
        return self._ask(client, prompt, sampling)

    def _answer(
        self, client: openai.OpenAI, prompt: Prompt, sampling: Sampling, without: frozenset[str]
    ) -> object:
        body: dict[str, object] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if self._config.api == "chat" and prompt.prefix:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if "max_tokens" in without:
            body["max_completion_tokens"] = sampling.max_tokens
        sent = {key: value for key, value in body.items() if key not in without}
        if self._config.api == "completions":
            system = prompt.system and f"{prompt.system}\n\n"
            text = f"{system}{prompt.user}\n\n{prompt.prefix}"
            return client.completions.create(model=self._config.model, prompt=text, extra_body=sent)
        messages: list[Any] = [{"role": "user", "content": prompt.user}]
        if prompt.system:
            messages.insert(0, {"role": "system", "content": prompt.system})
        if prompt.prefix:
            messages.append({"role": "assistant", "content": prompt.prefix})
        return client.chat.completions.create(
            model=self._config.model, messages=messages, extra_body=sent
        )

    def _completion(self, answer: Any, sampling: Sampling) -> Completion:
        """Read an answer of which the client has checked nothing: any attribute may be missing."""
        try:
            choice = answer.choices[0]
            written = choice.text if self._config.api == "completions" else choice.message.content
        except (AttributeError, LookupError, TypeError):
            written = choice = _MISSING
        if isinstance(written, list):
            written = _text_of_parts(written)
        if not (written is None or isinstance(written, str)):
            why = "has no text; most values of engine.base_url end in /v1, and no stream is read"
            raise EngineError(f"{self._config.model}: the endpoint's answer {why}")
        reason, usage = getattr(choice, "finish_reason", None), getattr(answer, "usage", None)
        text = "" if written is None or reason == "content_filter" else written
        stopped = cut_at_stop(text, sampling.stop)
        return Completion(
            text if stopped is None else stopped,
            _count(getattr(usage, "prompt_tokens", None)),
            _count(getattr(usage, "completion_tokens", None)),
            _shown(reason),
        )


def _may_pass(status: int) -> bool:
    """Return whether the same call may succeed later: too many requests, or an error of the server.
    The configuration is not to blame for these."""
    return status == 429 or status >= 500


def _unknown_parameter(error: openai.APIStatusError) -> str | None:
    """Return the parameter of `LEFT_OUT` that the model does not know, by the endpoint's error."""
    said = str(error.body)
    if error.status_code not in (400, 422) or not UNKNOWN.search(said.lower()):
        return None
    if isinstance(error.param, str) and error.param:
        return next((name for name in LEFT_OUT if name == error.param), None)
    # The error may quote the prompt: a word of it is no name of a parameter.
    named = (name for name in LEFT_OUT if "_" in name or re.search(f"['\"`]{name}['\"`]", said))
    return next((name for name in named if name in said), None)


def _why(error: openai.APIStatusError) -> str:
    """Return what the endpoint's error means, with its code and parameter and without its words."""
    status = error.status_code
    names = ("code", _shown(error.code) or _shown(error.type)), ("param", _shown(error.param))
    words = [f"{name} {value}" for name, value in names if value and value != str(status)]
    named = f" ({', '.join(words)})" if words else ""
    hint = f": {HINTS[status]}" if status in HINTS else ""
    if 300 <= status < 400:
        hint = " (redirects are not followed)"
    return f"the endpoint answered with HTTP status {status}{named}{hint}"


def _shown(name: Any) -> str:
    """Return a name that the endpoint gives, "" for anything else."""
    is_name = isinstance(name, str) and re.fullmatch(r"[\w.\[\]-]{1,64}", name, re.ASCII)
    return str(name) if is_name else ""


def _text_of_parts(parts: list[object]) -> object:
    """Return the text of a list of parts, without those that are a model's thoughts."""
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) else None
        for part in parts
        if not (isinstance(part, dict) and "thinking" in part)
    ]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else _MISSING


def _count(tokens: object) -> int:
    """Return a number of tokens, 0 for anything else."""
    return tokens if type(tokens) is int and 0 <= tokens < 2**31 else 0

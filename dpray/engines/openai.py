"""An OpenAI-compatible API generates texts; it has no logits for lockstep decoding."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
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
from dpray.engines.endpoint import client_of, endpoint_errors, shown_code
from dpray.engines.text import cut_at_stop

_MISSING = object()


LEFT_OUT = ("max_tokens", "continue_final_message", "add_generation_prompt", "top_p", "stop",
            "temperature")  # fmt: skip
"""Parameters that some models do not know. They are asked again without: `max_tokens` has a newer
name, and texts are cut at `stop` here. Without temperature or top_p a model takes its own."""

UNKNOWN = re.compile(
    "unsupported|unknown|unrecogni[sz]ed|forbidden|not (be )?(support|permit|allow)|cannot both"
)

FILTERED = ("content_filter", "content_policy_violation")
"""With these codes an endpoint answers a prompt that its content filter refuses."""


class OpenAIEngine:
    """A `TextGenerator` that calls an endpoint through the `openai` client.

    `api` "chat" sends `Prompt.user` as the user message, after a `system` message if there is one;
    a non-empty `prefix` follows as the beginning of the assistant's message, which vLLM continues
    (the two extra body fields) and other servers take as an example; an answer that begins with it
    again is read from there on. "completions" sends them with blank lines between them. A request
    is sent again without a parameter of `LEFT_OUT` that the model does not know. An answer without
    content, or one that a content filter ended, is an empty text. A server that
    ignores `max_tokens` is not corrected: there is no tokenizer here. `top_k` is no parameter of
    the API: it is sent in the body only if it is set.
    """

    def __init__(self, config: EngineConfig) -> None:
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

        with (
            client_of(self._config) as client,
            ThreadPoolExecutor(self._config.max_in_flight) as pool,
        ):
            found = list(pool.map(completed, calls))
        return [completion for completion in found if completion is not None]

    def _ask(self, client: openai.OpenAI, prompt: Prompt, sampling: Sampling) -> Completion:
        """Ask once. Raises EngineError, whose message quotes neither the prompt nor the answer."""
        without = frozenset(self.left_out)
        with endpoint_errors(self._config.model, "engine"):
            try:
                answer = self._answer(client, prompt, sampling, without)
                return self._completion(answer, sampling, prompt.prefix)
            except openai.APIStatusError as error:
                if error.code in FILTERED:
                    return Completion("", 0, 0, finish_reason="content_filter")
                unknown = _unknown_parameter(error)
                if unknown is None or unknown in without:
                    raise
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

    def _completion(self, answer: Any, sampling: Sampling, prefix: str) -> Completion:
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
        if prefix and text.lstrip().startswith(prefix):
            text = text.lstrip().removeprefix(prefix)
        stopped = cut_at_stop(text, sampling.stop)
        return Completion(
            text if stopped is None else stopped,
            _token_count(getattr(usage, "prompt_tokens", None)),
            _token_count(getattr(usage, "completion_tokens", None)),
            shown_code(reason),
        )


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


def _text_of_parts(parts: list[object]) -> object:
    """Return the text of a list of parts, without those that are a model's thoughts."""
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) else None
        for part in parts
        if not (isinstance(part, dict) and "thinking" in part)
    ]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else _MISSING


def _token_count(tokens: object) -> int:
    """Return a number of tokens, 0 for anything else."""
    return tokens if type(tokens) is int and 0 <= tokens < 2**31 else 0

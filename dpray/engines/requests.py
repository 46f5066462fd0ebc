"""Calls of a language model have names, and are repeated after an empty answer or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpray.engines.base import Completion, Engine, PlainPrompt, Sampling, TextGenerator
from dpray.engines.sentences import whole_sentences
from dpray.types import InputError, Prompt, Resumable

MOST_EMPTY = 20
"""After so many empty answers in a row a model is not asked for more: each one costs a call."""

TRIES = 3
"""A model is asked so often for a first text before the charge."""

_OPENED = r"<(think|thinking|thought|reasoning)>|\[THINK\]|◁think▷"
_CLOSED = r"</(think|thinking|thought|reasoning)>|\[/THINK\]|◁/think▷"
_THOUGHTS = re.compile(f"({_OPENED}).*?({_CLOSED})", re.DOTALL)


@dataclass(frozen=True)
class Request:
    """One call of the language model. A resumed run makes the same call under the same id, so that
    a finished one is paid for once."""

    request_id: str
    prompt: Prompt
    sampling: Sampling


def try_request(engine: TextGenerator, asked: Request) -> None:
    """Make one call as the run makes them, before its charge. A local model only has to have room
    for it. Raises InputError and EngineError for a model that cannot be asked like this, Resumable
    for one that writes nothing."""
    prompt, sampling = asked.prompt, asked.sampling
    if isinstance(engine, Engine):
        length, context = len(engine.encode(prompt)), engine.context_length
        if length + sampling.max_tokens > context:
            raise InputError(
                f"method.max_tokens: {sampling.max_tokens} and a prompt of {length} tokens are "
                f"more than the context of the model, {context} tokens"
            )
        return
    for _ in range(TRIES):
        [answer] = engine.generate([prompt], [sampling], lambda place, done: None)
        if written(answer, asked):
            return
    raise no_text(TRIES, answer.finish_reason)


def no_text(answers: int, finish_reason: str) -> Resumable:
    """Return the error for a model that writes nothing."""
    why = f" (finish_reason {finish_reason})" if finish_reason else ""
    return Resumable(
        f"engine.model: {answers} empty answers in a row{why}: a larger method.max_tokens, a model "
        "that does not think first or another method.template may help"
    )


def written(done: Completion, asked: Request) -> str:
    """Return the text of an answer: without the thoughts that a model writes first, "" for thoughts
    without an end, and without the sentence that `max_tokens` cut. What a schema has formed stays
    as it is, and what continues a plain text is no thought."""
    if asked.sampling.schema is not None:
        return done.text
    answer = done.text if isinstance(asked.prompt, PlainPrompt) else without_thoughts(done.text)
    return whole_sentences(answer) if done.finish_reason == "length" else answer


def without_thoughts(answer: str) -> str:
    """Return the text after a model's thoughts, "" if these have no end."""
    # Some chat templates open the thoughts, so that an answer only closes them.
    # Behind the last closing there is no thought with an end: each opening would be sought one.
    end = max((each.end() for each in re.finditer(_CLOSED, answer)), default=0)
    text = re.split(_CLOSED, _THOUGHTS.sub("", answer[:end]) + answer[end:])[-1]
    return "" if re.search(_OPENED, text) or not text.strip() else text


Ask = Callable[[Sequence[Request]], list[str]]
"""Returns the texts in the order of the requests, "" if the model wrote nothing."""


def ask_until_accepted(
    ask: Ask,
    request: Callable[[int, int], Request],
    number: int,
    max_retries: int,
    refused: Callable[[int, str], bool],
    on_asking: Callable[[int], None] = lambda number: None,
) -> list[str]:
    """Return the answers to `request(i, attempt)`, i below `number`, attempts from 0.

    If `refused(i, answer)`, the request is repeated, at most `max_retries` times; after that the
    answer is "", never the prompt. `on_asking` gets the number of requests of each round.
    """
    texts = [""] * number
    missing = list(range(number))
    for attempt in range(1 + max_retries):
        if not missing:
            break
        on_asking(len(missing))
        requests = [request(i, attempt) for i in missing]
        for i, asked, answer in zip(missing, requests, ask(requests), strict=True):
            # A text of a schema is whole as it is: neither its blanks nor its words are cut.
            has_schema = asked.sampling.schema is not None
            text = answer if has_schema else cleaned(answer, asked.sampling.max_tokens)
            texts[i] = "" if refused(i, text) else text
        missing = [i for i in missing if not texts[i]]
    return texts


def cleaned(answer: str, max_tokens: int) -> str:
    """Return the text without white space around it, cut to `max_tokens` words: a word has a token
    at least, so a longer text comes from a server that ignores max_tokens."""
    text = answer.strip()
    words = text.split(maxsplit=max_tokens)
    if len(words) > max_tokens:
        text = text[: -len(words[-1])].rstrip()
    return text

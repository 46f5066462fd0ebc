"""Calls of a language model have names, and are repeated after an empty answer or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpray.engines.base import Sampling
from dpray.types import Prompt


@dataclass(frozen=True)
class Request:
    """One call of the language model. A resumed run makes the same call under the same id, so that
    a finished one is paid for once."""

    request_id: str
    prompt: Prompt
    sampling: Sampling


Ask = Callable[[Sequence[Request]], list[str]]
"""Returns the texts in the order of the requests, "" if the model wrote nothing."""


def answered(
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

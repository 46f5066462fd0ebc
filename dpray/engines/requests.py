"""Calls of a language model by name: each asked once, and again where its answer is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpray.engines.base import Sampling
from dpray.types import Prompt


@dataclass(frozen=True)
class Request:
    """One call of the language model. The id names it for good: a resumed run asks the same prompt
    under the same id, so that a finished call is paid for once."""

    request_id: str
    prompt: Prompt
    sampling: Sampling


Ask = Callable[[Sequence[Request]], list[str]]
"""Texts in the order of the requests; "" where the model wrote nothing."""


def answered(
    ask: Ask,
    request: Callable[[int, int], Request],
    number: int,
    max_retries: int,
    refused: Callable[[str], bool],
    on_asking: Callable[[int], None] = lambda number: None,
) -> list[str]:
    """The answers to `request(i, attempt)`, i below `number`, attempts from 0.

    One that is empty or refused is asked for again, `max_retries` times, and is "" after that: the
    prompt never takes its place. `on_asking` gets the number of requests of each round.
    """
    texts = [""] * number
    missing = list(range(number))
    for attempt in range(1 + max_retries):
        if not missing:
            break
        on_asking(len(missing))
        requests = [request(i, attempt) for i in missing]
        for i, asked, answer in zip(missing, requests, ask(requests), strict=True):
            text = cleaned(answer, asked.sampling.max_tokens)
            texts[i] = "" if refused(text) else text
        missing = [i for i in missing if not texts[i]]
    return texts


def cleaned(answer: str, max_tokens: int) -> str:
    """The text without white space around it. A word has a token at least: what is longer comes
    from a server that ignores max_tokens, and is cut."""
    text = answer.strip()
    words = text.split(maxsplit=max_tokens)
    if len(words) > max_tokens:
        text = text[: -len(words[-1])].rstrip()
    return text

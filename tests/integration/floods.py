"""One key floods `dpray serve` while another one's client sends one request after the other."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty
from time import monotonic
from typing import Any

import httpx
import numpy as np

TIMEOUT = 600


def sequences(model: str, prompts: int, n: int, tokens: int) -> bytes:
    """A request for `prompts` times `n` answers of `tokens` tokens each."""
    texts = [f"Note {number}:" for number in range(prompts)]
    body = {"prompt": texts, "n": n, "max_tokens": tokens, "ignore_eos": True, "temperature": 1}
    return json.dumps({"model": model} | body).encode()


def wrong_biases(model: str, entries: int) -> bytes:
    biases = {f"w{number}": "x" for number in range(entries)}
    body = {"model": model, "prompt": "a", "logit_bias": biases}
    return json.dumps(body, separators=(",", ":")).encode()


async def _flood(url: str, key: str, body: bytes, at_once: int, statuses: Any) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT, limits=limits) as client:

        async def send() -> None:
            answer = await client.post(f"{url}/completions", content=body)
            statuses.put(answer.status_code)

        statuses.put(0)
        while True:
            await asyncio.gather(*(send() for _ in range(at_once)), return_exceptions=True)


def _run(*arguments: Any) -> None:
    asyncio.run(_flood(*arguments))


@contextmanager
def flooding(url: str, key: str, body: bytes, at_once: int) -> Iterator[Callable[[], Counter[int]]]:
    """Send `body` `at_once` times together, and again when all are answered, from a process of its
    own. Yields a function that counts the statuses of the answers up to its call."""
    spawn = multiprocessing.get_context("spawn")
    answers: Any = spawn.Queue()
    process = spawn.Process(target=_run, args=(url, key, body, at_once, answers), daemon=True)
    process.start()
    statuses: Counter[int] = Counter()

    def answered() -> Counter[int]:
        # `qsize` also counts what a process that has ended never wrote: no `get` may wait for it.
        with suppress(Empty):
            for _ in range(answers.qsize()):
                statuses[answers.get(timeout=0.2)] += 1
        return statuses

    try:
        answers.get(timeout=TIMEOUT)  # it begins
        yield answered
    finally:
        process.terminate()
        process.join()
        statuses.update(rest_of(answers))


def rest_of(notes: Any) -> Iterator[Any]:
    """Take what is still in the queue of a process that has ended."""
    with suppress(Empty):
        while True:
            yield notes.get(timeout=0.2)


def seconds_of_answers(ask: Callable[[], object], seconds: float, fewest: int = 1) -> list[float]:
    """Call `ask` for so long and so often at least; return the seconds that each call took."""
    took: list[float] = []
    end = monotonic() + seconds
    while monotonic() < end or len(took) < fewest:
        began = monotonic()
        ask()
        took.append(monotonic() - began)
    return took


def p99(took: Sequence[float]) -> float:
    return float(np.percentile(took, 99))

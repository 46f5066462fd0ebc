"""A client of `openai` that sends requests at a low rate, each on a new connection, and notes what
became of them."""

from __future__ import annotations

import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import httpx
import numpy as np
import openai

PATIENCE = 60.0
"""Seconds until it gives up."""
PAUSE = 0.2
"""Seconds between two requests of a kind."""
ADDRESS = "127.0.0.2"
"""Its own: a proxy limits the requests of an address."""


class Noted:
    """The seconds that answered requests took, and how often others failed, by their status."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.failed: Counter[str] = Counter()

    @property
    def figures(self) -> dict[str, Any]:
        """All requests count: one that failed has taken the seconds until it did."""
        took = self.took or [0.0]
        percentiles = {f"p{q}": float(np.percentile(took, q)) for q in (50, 99)}
        named = {"requests": len(self.took), "failed": dict(self.failed)}
        return named | percentiles | {"slowest": max(took)}


def good_client(url: str, key: str, tls: ssl.SSLContext | None) -> openai.OpenAI:
    transport = httpx.HTTPTransport(
        verify=tls or False,
        local_address=ADDRESS,
        limits=httpx.Limits(max_keepalive_connections=0),
    )
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        timeout=PATIENCE,
        http_client=httpx.Client(transport=transport),
    )


def asks(client: openai.OpenAI, llm: str, embedder: str) -> dict[str, Callable[[], object]]:
    """Return two requests by name: a chat of 12 tokens and an embedding of one text."""

    def chat() -> object:
        return client.chat.completions.create(
            model=llm,
            messages=[{"role": "user", "content": "The old bridge"}],
            max_tokens=12,
            extra_body={"ignore_eos": True},
        )

    def embed() -> object:
        return client.embeddings.create(model=embedder, input="The old bridge")

    return {"chat": chat, "embedding": embed}


@contextmanager
def asking(asks: dict[str, Callable[[], object]]) -> Iterator[dict[str, Noted]]:
    """Send requests of each kind one after the other, each kind on a thread of its own."""
    noted = {kind: Noted() for kind in asks}
    stop = threading.Event()

    def go_on(ask: Callable[[], object], into: Noted) -> None:
        while not stop.wait(PAUSE):
            began = monotonic()
            try:
                ask()
            except openai.APIStatusError as error:
                into.failed[str(error.status_code)] += 1
            except openai.APITimeoutError:
                into.failed["no answer"] += 1
            except openai.APIConnectionError:
                into.failed["connection"] += 1
            into.took.append(monotonic() - began)

    threads = [threading.Thread(target=go_on, args=(asks[k], noted[k])) for k in asks]
    for each in threads:
        each.start()
    try:
        yield noted
    finally:
        stop.set()
        for each in threads:
            each.join()

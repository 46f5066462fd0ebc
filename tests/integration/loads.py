"""Loads that one process puts on `dpray serve` until it is ended, each a coroutine.

They are clients of another key than the good client's, or of none. `aiohttp` sends them, so that
one core is enough for hundreds of clients.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.integration.floods import rest_of

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
PATIENCE = 600
"""Seconds until a client of the load gives up."""
DRIP = 0.5
"""Seconds between two bytes of a slow sender."""
LARGEST = 1_000_000
"""Bytes of a body at the limit, as `serve.limits.max_request_bytes`."""


@dataclass(frozen=True)
class Target:
    """An endpoint, the key that the load has, and the models' names."""

    port: int
    key: str
    llm: str
    embedder: str
    certificate: str | None = None
    """The file that a proxy's certificate is checked with; None: no TLS."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.certificate) if self.certificate else None

    @property
    def url(self) -> str:
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{self.port}"


Note = Callable[[str], None]
"""It takes what became of a request or a connection."""
Load = Callable[[Target, Note, int], Awaitable[None]]
"""It runs until it is cancelled. Its last argument is the number of clients or connections."""


def chat_body(target: Target, tokens: int, text: str = "The old bridge") -> bytes:
    message = {"role": "user", "content": text}
    body = {"messages": [message], "max_tokens": tokens, "ignore_eos": True}
    return json.dumps({"model": target.llm} | body).encode()


def embedding_body(target: Target, texts: int) -> bytes:
    inputs = [f"Note {number}: the old bridge was closed today." for number in range(texts)]
    return json.dumps({"model": target.embedder, "input": inputs}).encode()


async def polite_clients(target: Target, note: Note, count: int) -> None:
    """Chat, each one request after the other; a refused one waits as it is told."""
    await _posting(target, note, count, [(CHAT, chat_body(target, 64))], waits=True)


async def rude_clients(target: Target, note: Note, count: int) -> None:
    """Chat, each one request after the other; a refused one comes again at once."""
    await _posting(target, note, count, [(CHAT, chat_body(target, 64))])


async def embedding_clients(target: Target, note: Note, count: int) -> None:
    """Embed as many texts in a request as a key may send; 10,000 in a round of 80 clients."""
    await _posting(target, note, count, [(EMBEDDINGS, embedding_body(target, 125))], waits=True)


async def large_bodies(target: Target, note: Note, count: int) -> None:
    """Send bodies of the largest size, one byte more, and twenty times as many bytes."""
    frame = len(chat_body(target, 16, ""))
    sizes = (LARGEST, LARGEST + 1, 20 * LARGEST)
    bodies = [(CHAT, chat_body(target, 16, "x" * (size - frame))) for size in sizes]
    await _posting(target, note, count, bodies)


async def _posting(
    target: Target, note: Note, count: int, bodies: list[tuple[str, bytes]], waits: bool = False
) -> None:
    headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0, ssl=target.tls or True)
    patience = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(
        target.url, headers=headers, connector=connector, timeout=patience
    ) as session:

        async def client(number: int) -> None:
            while True:
                path, body = bodies[number % len(bodies)]
                number += 1
                pause = 0.0
                try:
                    async with session.post(path, data=body) as answer:
                        await answer.read()
                        note(str(answer.status))
                        pause = float(answer.headers.get("Retry-After", 0)) if waits else 0.0
                except (aiohttp.ClientError, OSError) as error:
                    note(type(error).__name__)
                    pause = 1.0
                await asyncio.sleep(pause)

        await asyncio.gather(*(client(number) for number in range(count)))


async def slow_senders(target: Target, note: Note, count: int) -> None:
    """Send a request with a valid key, and its body byte by byte."""
    body = chat_body(target, 16, "x" * 10_000)
    await _dripping(target, note, count, _head(target.key, len(body)), body, target.tls)


async def slow_strangers(target: Target, note: Note, count: int) -> None:
    """Send a request with a wrong key, and its body byte by byte."""
    body = chat_body(target, 16, "x" * 10_000)
    await _dripping(target, note, count, _head("wrong", len(body)), body, target.tls)


async def half_open(target: Target, note: Note, count: int) -> None:
    """Send half of the first message, and then nothing: of a TLS handshake, or of the headers."""
    half = b"\x16\x03\x01\x02\x00\x01" if target.certificate else _head(target.key, 100)[:60]
    await _dripping(target, note, count, half, b"", None)


def _head(key: str, length: int) -> bytes:
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Authorization: Bearer {key}",
        f"Content-Length: {length}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _dripping(
    target: Target, note: Note, count: int, head: bytes, body: bytes, tls: ssl.SSLContext | None
) -> None:
    """Keep `count` connections, from ten addresses, that send `head` at once and `body` byte by
    byte; one that the server closes is opened again."""
    opening = asyncio.Semaphore(50)

    async def drip(writer: asyncio.StreamWriter) -> None:
        for place in range(len(body)):
            await asyncio.sleep(DRIP)
            writer.write(body[place : place + 1])
            await writer.drain()

    async def connection(number: int) -> None:
        address = (f"127.0.0.{10 + number % 10}", 0)
        while True:
            try:
                async with opening, asyncio.timeout(30):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", target.port, ssl=tls, local_addr=address
                    )
                note("opened")
            except (OSError, TimeoutError) as error:
                note(type(error).__name__)
                await asyncio.sleep(1)
                continue
            try:
                writer.write(head)
                dripping = asyncio.create_task(drip(writer))
                with suppress(OSError):
                    first = await reader.read(12)
                    note(first.decode("latin-1").removeprefix("HTTP/1.1 ") or "closed")
                dripping.cancel()
                await asyncio.gather(dripping, return_exceptions=True)
            finally:
                writer.transport.abort()

    await asyncio.gather(*(connection(number) for number in range(count)))


def _run(load: Load, target: Target, notes: Any, count: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    notes.put("")
    with suppress(KeyboardInterrupt):
        asyncio.run(_noting(load, target, notes, count))


async def _noting(load: Load, target: Target, notes: Any, count: int) -> None:
    counted: Counter[str] = Counter()
    # A connection that the server resets while it is closed here is no news.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    running = asyncio.ensure_future(load(target, lambda what: counted.update([what]), count))
    while not running.done():
        await asyncio.wait([running], timeout=0.5)
        notes.put(dict(counted))
        counted.clear()
    running.result()


@contextmanager
def loading(load: Load, target: Target, count: int) -> Iterator[Counter[str]]:
    """Run a load in a process of its own; the counter is whole when the context has ended."""
    spawn = multiprocessing.get_context("spawn")
    notes: Any = spawn.Queue()
    process = spawn.Process(target=_run, args=(load, target, notes, count), daemon=True)
    process.start()
    counted: Counter[str] = Counter()
    try:
        notes.get(timeout=PATIENCE)  # it begins
        yield counted
    finally:
        process.terminate()
        process.join()
        for note in rest_of(notes):
            counted.update(note)

"""An endpoint that answers with anything: a huge answer, one without an end, a redirect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep
from typing import Any

import pyarrow as pa
import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import Completion, EngineError, Prompt, Sampling
from dpray.engines.endpoint import LARGEST_ANSWER
from dpray.engines.openai import OpenAIEngine
from tests.engines.api_server import chat, running

Answer = Callable[[BaseHTTPRequestHandler], None]
MIB = 1 << 20
SAID = chat(message={"role": "assistant", "content": "Hello"}).encode()


class Server(ThreadingHTTPServer):
    """Answers every request by `answer`, and keeps the requests."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.asked: list[tuple[str, str | None]] = []
        self.sent = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"]))
        with suppress(BrokenPipeError, ConnectionResetError):
            self.server.answer(self)

    def begin(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send_all(self, parts: Iterator[bytes]) -> None:
        for part in parts:
            self.wfile.write(part)
            self.server.sent += len(part)


def serving(answer: Answer) -> AbstractContextManager[Server]:
    return running(Server(answer))


def ask(server: Server, **options: Any) -> Completion:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    config = EngineConfig(kind="openai", model="m", base_url=url, api_key="secret-key", **options)
    [completion] = OpenAIEngine(config).generate([Prompt("Marlowe")], [Sampling(5)])
    return completion


def refused(server: Server, why: str, **options: Any) -> None:
    with pytest.raises(EngineError, match=why) as error:
        ask(server, **options)
    said = str(error.value)
    assert said.isprintable() and "Marlowe" not in said and "secret" not in said
    shown = error.value.__cause__ or (
        None if error.value.__suppress_context__ else error.value.__context__
    )
    assert shown is None


def body(content: bytes, **headers: str) -> Answer:
    def answer(handler: Any) -> None:
        handler.begin(Content_Length=str(len(content)), **headers)
        handler.send_all(iter([content]))

    return answer


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status: int) -> None:
    """The prompts would go to an address that nobody configured, on the same host with the key."""
    with serving(body(SAID)) as other:
        places = ("http://localhost:{}/v1/x", "http://127.0.0.1:{}/v1/x", "//localhost:{}/x")
        for place in places:
            elsewhere = place.format(other.server_port)

            def answer(handler: Any, elsewhere: str = elsewhere) -> None:
                handler.begin(status, Location=elsewhere, Content_Length="0")

            with serving(answer) as server:
                refused(server, rf"^m: the endpoint answered with HTTP status {status} \(redirect")
                assert len(server.asked) == 1
        assert other.asked == []


def endless(handler: Any) -> None:
    handler.begin()
    handler.send_all(b"a" * MIB for _ in range(200))


def chunked(handler: Any) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.begin(Transfer_Encoding="chunked")
    handler.send_all(b"100000\r\n" + b"a" * MIB + b"\r\n" for _ in range(200))


@pytest.mark.parametrize(("answer", "attempts"), [(endless, 1), (chunked, 3)])
def test_an_answer_of_200_mb_is_not_read(answer: Answer, attempts: int) -> None:
    with serving(answer) as server:
        refused(server, r"^m: the endpoint's answer has more than 16,777,216", attempts=attempts)
        assert len(server.asked) == 1 and server.sent < 2 * LARGEST_ANSWER


def test_an_error_of_200_mb_is_not_read() -> None:
    def answer(handler: Any) -> None:
        handler.begin(500)
        handler.send_all(b"a" * MIB for _ in range(200))

    with serving(answer) as server:
        refused(server, r"^m: the endpoint's answer has more than")
        assert server.sent < 2 * LARGEST_ANSWER


def packed(content: bytes) -> bytes:
    made: bytes = pa.compress(content, codec="gzip", asbytes=True)
    return made


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return packed(b"[" + b" " * 200 * MIB)


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "gzip, gzip"])
def test_a_packed_answer_is_bounded_too(encoding: str, bomb: bytes) -> None:
    content = packed(bomb) if encoding == "gzip, gzip" else bomb
    with serving(body(content, Content_Encoding=encoding)) as server:
        refused(server, r"^m: the endpoint's answer has more than|packed in a way")


def test_a_packed_answer_is_read() -> None:
    with serving(body(packed(SAID), Content_Encoding="gzip")) as server:
        assert ask(server).text == "Hello"


def test_an_answer_that_trickles_ends_with_the_timeout() -> None:
    def answer(handler: Any) -> None:
        handler.begin()
        for _ in range(600):
            handler.send_all(iter([b" "]))
            sleep(0.05)

    with serving(answer) as server:
        began = monotonic()
        refused(server, r"^m: no answer from the endpoint \(APITimeoutError\)", timeout=0.5)
        assert monotonic() - began < 15


JSON = {"Content_Type": "application/json"}

PAGES = [
    (b"<!doctype html><title>Marlowe</title>", {"Content_Type": "text/html"}),
    (b"\xff\xfe\0Marlowe", {"Content_Type": "application/json; charset=utf-99"}),
    *(
        (content, JSON)
        for content in (
            b"<html>Marlowe secret</html>",
            b"",
            b"\xff",
            b"null",
            b"[]",
            b'{"choices": [{"mess',
            b"[" * 100_000,
            b'{"choices": 9' + b"9" * 5000 + b"}",
            b'{"choices": {"0": "Marlowe"}}',
            b'{"choices": "Marlowe"}',
            b'{"choices": [NaN]}',
            b'{"choices": []}',
            b'{"choices": [{"index": 0}]}',
            b'{"choices": [{"message": {"content": ["Marlowe"]}}]}',
            b'{"choices": [{"message": {"content": NaN}}]}',
            b'{"choices": [{"message": {"content": 7}}]}',
            b'{"error": {"message": "Marlowe"}}',
        )
    ),
]


@pytest.mark.parametrize(("content", "headers"), PAGES, ids=range(len(PAGES)))
def test_another_page_than_an_answer(content: bytes, headers: dict[str, str]) -> None:
    with serving(body(content, **headers)) as server:
        refused(server, r"^m: (the endpoint's answer has no |no answer from the endpoint)")
        assert len(server.asked) == 1


COUNTS = ["Marlowe", [1], {"a": 1}, -7, 1e308, 10**400, None, float("nan")]


@pytest.mark.parametrize("tokens", COUNTS, ids=str)
def test_what_is_no_number_of_tokens_counts_as_none(tokens: Any) -> None:
    usage = {"prompt_tokens": tokens, "completion_tokens": tokens, "total_tokens": tokens}
    with serving(body(json.dumps(json.loads(SAID) | {"usage": usage}).encode())) as server:
        assert ask(server) == Completion("Hello", 0, 0)


def test_of_more_answers_than_asked_the_first_one_counts() -> None:
    answer = json.loads(SAID)
    wrong = {"index": 7, "message": {"content": "Marlowe"}}
    answer["choices"] = answer["choices"] + [wrong] * 50
    with serving(body(json.dumps(answer).encode())) as server:
        assert ask(server).text == "Hello"

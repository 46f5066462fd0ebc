"""A small server that speaks the OpenAI API and can misbehave."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import numpy as np

S = TypeVar("S", bound=ThreadingHTTPServer)

SLOW = "slow"


def chat(**choice: Any) -> str:
    """The body of a chat answer with one choice."""
    answer: dict[str, Any] = {"id": "1", "object": "x", "created": 0, "model": "m"}
    return json.dumps(answer | {"choices": [{"index": 0, "finish_reason": "stop"} | choice]})


class Server(ThreadingHTTPServer):
    """Answers with the prompt's words in reverse; first with `faults`: a status, 0 to hang up
    without an answer, `SLOW` to answer late (3 s), or the body of the answer. A request with a
    parameter in `refuses` gets that status and body. After `answers_left` good answers it fails for
    good. Calls for embeddings get the vectors of `embed`, in reverse."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[int | str] = []
        self.refuses: dict[str, tuple[int, str]] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.embed: Callable[[list[str]], np.ndarray] | None = None
        self.headers: dict[str, str] = {}
        self.answers_left = 10**9
        self.answered = 0
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.headers = {name.lower(): value for name, value in self.headers.items()}
            self.server.requests.append((self.path, body))
            fault = self.server.faults.pop(0) if self.server.faults else None
            if fault is None and self.server.answered == self.server.answers_left:
                fault = 500
            self.server.answered += fault is None
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        threading.Event().wait(0.02)
        # Before the answer: with it the client may begin its next call.
        with self.server.lock:
            self.server.in_flight -= 1
        self._answer(body, fault)

    def _answer(self, body: dict[str, Any], fault: int | str | None) -> None:
        for name, (status, said) in self.server.refuses.items():
            if name in body:
                self._send(status, said.encode())
                return
        if fault == 0:
            self.close_connection = True
            return
        if fault == SLOW:
            threading.Event().wait(3)
            fault = None
        if isinstance(fault, str):
            self._send(200, fault.encode("utf-8", "surrogateescape"))
            return
        if fault is None and self.server.embed is not None and self.path.endswith("/embeddings"):
            vectors = self.server.embed(body["input"]).tolist()
            data = [{"index": i, "embedding": v, "object": "x"} for i, v in enumerate(vectors)]
            self._send(200, json.dumps({"object": "list", "data": data[::-1]}).encode())
            return
        said = (
            body["input"][0]
            if "input" in body
            else body["prompt"]
            if "prompt" in body
            else body["messages"][0]["content"]
        )
        text = " ".join(reversed(said.split()))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if self.path.endswith("chat/completions"):
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        answer: dict[str, Any] = {"id": "1", "object": "x", "created": 0, "model": "m"}
        answer |= {"choices": [choice], "usage": usage}
        if fault is not None:
            answer = {"error": {"message": f"cannot do: {said}", "type": "x"}}
        self._send(fault or 200, json.dumps(answer).encode())

    def _send(self, status: int, payload: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
            self.wfile.write(payload)


@contextlib.contextmanager
def running(server: S) -> Iterator[S]:
    """Run a server in a thread, and close it."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def running_server() -> contextlib.AbstractContextManager[Server]:
    return running(Server())

"""A hub that does not answer, or refuses a model, ends a run within seconds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest

from dpray.io.hub import PATIENCE, check_dataset, find_on_hub
from dpray.types import InputError


@contextmanager
def a_hub(status: int, error_code: str = "") -> Iterator[str]:
    """Serve `status` for every file, and yield the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            if error_code:
                self.send_header("X-Error-Code", error_code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def asked(endpoint: str, downloads: Path, key: str = "engine.model", patience: float = 30) -> str:
    return find_on_hub("owner/name", key, endpoint=endpoint, downloads=downloads, patience=patience)


def test_a_model_that_the_hub_has_keeps_its_name(tmp_path: Path) -> None:
    with a_hub(200) as endpoint:
        assert asked(endpoint, tmp_path) == "owner/name"
    with a_hub(404, "EntryNotFound") as endpoint:  # the model is there, without the file
        assert asked(endpoint, tmp_path) == "owner/name"


@pytest.mark.parametrize(
    ("status", "error_code", "words"),
    [
        (401, "RepoNotFound", "has none of this name, or hides it"),
        (403, "GatedRepo", "accepted its terms"),
        (503, "", "answers with 503"),
    ],
)
def test_a_refusal_is_said_as_what_it_is(
    tmp_path: Path, status: int, error_code: str, words: str
) -> None:
    with a_hub(status, error_code) as endpoint, pytest.raises(InputError) as caught:
        asked(endpoint, tmp_path)
    message = str(caught.value)
    assert message.startswith("engine.model: owner/name is not on this machine, and the hub ")
    assert words in message and "smollm2" in message and "local folder" in message


def test_a_hub_that_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and no more
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        before = monotonic()
        with pytest.raises(InputError, match=r"cannot be reached; give a local folder$"):
            asked(endpoint, tmp_path, "embedder.model", patience=0.2)
    # Five tries with pauses between them take more than 24 seconds.
    assert monotonic() - before < 20
    assert PATIENCE < 10


def test_a_data_set_of_a_hub() -> None:
    with a_hub(200) as endpoint:
        check_dataset("hf://owner/name#test", endpoint, 30)
    with a_hub(401, "RepoNotFound") as endpoint:
        message = "^hf://owner/name#test: the hub .* has none of this name.*give its folder$"
        with pytest.raises(InputError, match=message):
            check_dataset("hf://owner/name#test", endpoint, 30)


def test_a_copy_that_was_downloaded_before_needs_no_hub(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    model, commit = tmp_path / "models--owner--name", "0" * 40
    copy = model / "snapshots" / commit
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    assert asked(f"http://127.0.0.1:{port}", tmp_path) == str(copy)

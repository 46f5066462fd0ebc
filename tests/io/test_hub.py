"""A hub that does not answer, or refuses a model, ends a run within seconds."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest

from dpray.io.hub import PATIENCE, check_dataset, files_of_model, find_on_hub
from dpray.types import InputError

CONFIG = {"torch_dtype": "bfloat16", "vocab_size": 2**16, "max_position_embeddings": 4096}


@contextmanager
def a_hub(status: int, error_code: str = "", files: dict[str, int] | None = None) -> Iterator[str]:
    """Serve `status` for every file, and CONFIG as its content, and yield the address. `files` are
    the sizes of the files of every model."""
    content = json.dumps(CONFIG).encode()

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            if error_code:
                self.send_header("X-Error-Code", error_code)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

        def do_GET(self) -> None:
            answer = content
            if self.path.startswith("/api/models/"):
                siblings = [{"rfilename": name, "size": files[name]} for name in files or {}]
                answer = json.dumps({"id": "owner/name", "siblings": siblings}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Ask the hub at an address for a model; `tmp_path` has what was downloaded before."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def asked(endpoint: str, key: str = "engine.model", patience: float = 30) -> str:
        be_asked(monkeypatch, endpoint, patience)
        return find_on_hub("owner/name", key)

    return asked


def be_asked(monkeypatch: pytest.MonkeyPatch, endpoint: str, patience: float = 30) -> None:
    """Make a hub the one that is asked, and forget what others answered."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("dpray.io.hub.PATIENCE", patience)
    find_on_hub.cache_clear()
    check_dataset.cache_clear()
    files_of_model.cache_clear()


def test_a_model_that_the_hub_has_keeps_its_name(ask: Callable[..., str]) -> None:
    with a_hub(200) as endpoint:
        assert ask(endpoint) == "owner/name"
    with a_hub(404, "EntryNotFound") as endpoint:  # the model is there, without the file
        assert ask(endpoint) == "owner/name"


@pytest.mark.parametrize(
    ("status", "error_code", "words"),
    [
        (401, "RepoNotFound", "has none of this name, or hides it"),
        (403, "GatedRepo", "accepted its terms"),
        (503, "", "answers with 503"),
    ],
)
def test_a_refusal_is_said_as_what_it_is(
    ask: Callable[..., str], status: int, error_code: str, words: str
) -> None:
    with a_hub(status, error_code) as endpoint, pytest.raises(InputError) as caught:
        ask(endpoint)
    message = str(caught.value)
    assert message.startswith("engine.model: owner/name is not on this machine, and the hub ")
    assert words in message and "smollm2" in message and "local folder" in message


def test_a_hub_that_never_answers(ask: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and no more
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        before = monotonic()
        with pytest.raises(InputError, match=r"cannot be reached; give a local folder$"):
            ask(endpoint, "embedder.model", patience=0.2)
    # Five tries with pauses between them take more than 24 seconds.
    assert monotonic() - before < 20
    assert PATIENCE < 10


def test_a_data_set_of_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_hub(200) as endpoint:
        be_asked(monkeypatch, endpoint)
        check_dataset("hf://owner/name#test")
    with a_hub(401, "RepoNotFound") as endpoint:
        be_asked(monkeypatch, endpoint)
        message = "^hf://owner/name#test: the hub .* has none of this name.*give its folder$"
        with pytest.raises(InputError, match=message):
            check_dataset("hf://owner/name#test")


def test_a_copy_that_was_downloaded_before_needs_no_hub(
    tmp_path: Path, ask: Callable[..., str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    model, commit = tmp_path / "models--owner--name", "0" * 40
    copy = model / "snapshots" / commit
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    assert ask(f"http://127.0.0.1:{port}") == str(copy)


def test_a_hub_tells_the_sizes_of_a_model_and_its_cache_has_no_copy_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    files = {"config.json": 9, "model.safetensors": 2**30}
    with a_hub(200, files=files) as endpoint:
        be_asked(monkeypatch, endpoint)
        assert files_of_model("owner/name") == (files, CONFIG)
    assert [*tmp_path.iterdir()] == []
    for status, code in ((401, "RepoNotFound"), (200, "")):
        with a_hub(status, code) as endpoint:
            be_asked(monkeypatch, endpoint)
            assert files_of_model("owner/name") == (None if status == 401 else ({}, CONFIG))


def test_a_hub_that_never_tells_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        be_asked(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", patience=0.1)
        assert files_of_model("owner/name") is None

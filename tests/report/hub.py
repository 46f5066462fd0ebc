"""A hub of data sets on this machine, which speaks what `huggingface_hub` asks of one in an
upload."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

TOKEN = "hf_sEcReTtOkEn"
NAME = "owner/notes"


class Hub:
    """One data set, NAME, that may not be there yet. `refuse` maps the end of a path to a status;
    files whose names end with `large` are asked for by the protocol for large files."""

    def __init__(self, refuse: dict[str, int], large: str) -> None:
        self.refuse, self.large = refuse, large
        self.url = ""
        self.private: bool | None = None
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits = 0
        self.asked: list[str] = []

    def write_to(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> tuple[int, Any]:
        self.asked.append(f"{method} {path}")
        for end, status in self.refuse.items():
            if path.endswith(end):
                return status, {"error": f"for {token}"}
        if path.startswith("/lfs/"):
            self.objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        if path == "/api/validate-yaml":
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": f"unknown: {token}"}
        return self.of_owner(path, body)

    def of_owner(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == f"/api/datasets/{NAME}":
            return (404, {}) if self.private is None else (200, self.info())
        if path == "/api/repos/create":
            self.private = json.loads(body)["visibility"] == "private"
            return 200, {"url": f"{self.url}/datasets/{NAME}"}
        if path.endswith("/preupload/main"):
            return 200, {"files": [*map(self.mode, json.loads(body)["files"])]}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [*map(self.upload, json.loads(body)["objects"])]}
        assert path == f"/api/datasets/{NAME}/commit/main", path
        for line in body.splitlines():
            self.commit(**json.loads(line))
        self.commits += 1
        return 200, {"commitUrl": f"{self.url}/datasets/{NAME}/commit/1", "commitOid": "1" * 40}

    def info(self) -> dict[str, Any]:
        _, _, header = self.files.get("README.md", b"").partition(b"---\n")
        tags = (yaml.safe_load(header.partition(b"---\n")[0]) or {}).get("tags", [])
        siblings = [{"rfilename": name} for name in self.files]
        return {"id": NAME, "private": self.private, "tags": tags, "siblings": siblings}

    def mode(self, file: dict[str, Any]) -> dict[str, Any]:
        kind = "lfs" if file["path"].endswith(self.large) else "regular"
        return {"path": file["path"], "uploadMode": kind, "shouldIgnore": False}

    def upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        to = {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}
        return wanted | {"actions": to}

    def commit(self, key: str, value: dict[str, Any]) -> None:
        if key == "file":
            self.files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            self.files[value["path"]] = self.objects[value["oid"]]
        elif key == "deletedFile":
            del self.files[value["path"]]
        else:
            assert key == "header", key


@contextmanager
def serving(refuse: dict[str, int] | None = None, large: str = ".none") -> Iterator[Hub]:
    """Serve a hub, and yield it with its address."""
    hub = Hub(refuse or {}, large)

    class Answer(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, said = hub.answer(self.command, path, self.headers["Authorization"], body)
            sent = json.dumps(said).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def do_GET(self) -> None:
            self.do()

        def do_POST(self) -> None:
            self.do()

        def do_PUT(self) -> None:
            self.do()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

"""Models in a bucket, through `pyarrow.fs` from moto's S3 server. `make audit` runs it: boto3 asks
for an older python-dateutil than constraints.txt has."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSystem

import dpray
from dpray.engines.model_path import bucket_folder, resolve_model
from dpray.io.bucket import pinned
from dpray.io.files import read_json
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.types import InputError, Progress, Resumable

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

URI = "s3://models/tiny"

FETCH = f"from dpray.engines.model_path import resolve_model; print(resolve_model('{URI}'))"


@dataclass
class Server:
    log: Path
    filesystem: FileSystem

    def reads(self, file: str) -> int:
        return len(re.findall(rf'"GET /models/tiny/{file} HTTP', self.log.read_text()))

    def put(self, file: str, content: bytes) -> None:
        with self.filesystem.open_output_stream(f"models/tiny/{file}") as stream:
            stream.write(content)


@pytest.fixture
def server(tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A bucket with the tiny model, and a machine without a cache."""
    log = tmp_path / "server.log"
    with open(log, "w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        port = next(line for line in process.stdout if line.strip().isdigit()).strip()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        filesystem, _ = FileSystem.from_uri("s3://models?allow_bucket_creation=true")
        filesystem.create_dir("models")
        made = Server(log, filesystem)
        for file in Path(model_folder).iterdir():
            made.put(file.name, file.read_bytes())
        yield made
    finally:
        process.kill()
        process.wait()


def test_many_processes_of_a_machine_fetch_a_model_once(server: Server, model_folder: str) -> None:
    asking = [
        subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    [folder] = {process.communicate()[0].strip() for process in asking}
    assert server.reads("model.safetensors") == 1
    for file in Path(model_folder).iterdir():
        assert (Path(folder) / file.name).read_bytes() == file.read_bytes()
    assert [path for path in Path(folder).parent.iterdir() if ".part-" in path.name] == []


def test_a_killed_fetch_leaves_nothing_that_looks_whole(server: Server, tmp_path: Path) -> None:
    server.put("large.bin", bytes(64 << 20))
    cache = tmp_path / "cache" / "dpray"
    killed = subprocess.Popen([sys.executable, "-c", FETCH])
    while not any(cache.glob("*.part-*/*")):
        assert killed.poll() is None
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert [path.name for path in cache.glob("bucket-*") if path.name.count(".") == 0] == []
    folder = Path(resolve_model(URI))
    assert (folder / "large.bin").stat().st_size == 64 << 20
    assert {path.name for path in cache.glob("bucket-*")} == {
        folder.name,
        f"{folder.name}.lock",
    }


def test_what_keeps_a_model_from_being_read_is_said(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (
        ("s3://nowhere/tiny", "there is no such bucket"),
        ("s3://models/none", "there is no such folder in the bucket"),
    ):
        with pytest.raises(InputError, match=f"^engine.model: {name}: {said}"):
            resolve_model(name)
    url = os.environ["AWS_ENDPOINT_URL"]
    place = url.removeprefix("http://")
    assert resolve_model(f"{URI}?endpoint_override={place}&scheme=http") == resolve_model(URI)
    import requests

    requests.post(f"{url}/moto-api/reset-auth", data="0", timeout=10)  # from now on it asks
    with pytest.raises(InputError, match=f"^embedder.model: {URI}: the bucket refuses the cred"):
        pinned(URI, "embedder.model")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Resumable, match=f"^engine.model: {URI} cannot be reached"):
        resolve_model(URI)


def test_a_run_names_the_files_and_is_not_resumed_with_others(
    server: Server,
    settings: Callable[..., dict[str, Any]],
    model_folder: str,
    tmp_path: Path,
) -> None:
    config = parse_config(settings(engine__model=URI))

    def stop(progress: Progress) -> None:
        if progress.activity == "batches" and progress.completed:
            raise KeyboardInterrupt

    with pytest.raises(Resumable):
        registry.run(config, stop)
    digest = pinned(URI, "engine.model").partition("#")[2]
    run = read_json(tmp_path / "out" / "run.json")
    assert run["config"]["engine"]["model"] == f"tiny (sha256 {digest})"

    content = (Path(model_folder) / "model.safetensors").read_bytes()
    server.put("model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"began with other files of engine.model"):
        registry.run(config)
    server.put("model.safetensors", content)
    report = registry.run(config)
    assert report["public_inputs"]["model"] == f"tiny (sha256 {digest})"
    assert bucket_folder(URI, "engine.model").name == f"bucket-{digest}"


def test_a_finished_release_is_copied(
    server: Server, settings: Callable[..., dict[str, Any]], sequences: dict[str, Any]
) -> None:
    uri = "s3://models/releases/notes"
    config = parse_config(settings(**sequences, output__copy_to=uri))
    dpray.run(config)
    dpray.run(config)  # finds it there
    put = re.findall(r'"POST /models/releases/notes/(\S+)\?uploads', server.log.read_text())
    assert put[0] == "run.json" and put[-1] == "release.json" and put.count("release.json") == 1
    filesystem, root = FileSystem.from_uri(uri)
    with filesystem.open_input_stream(f"{root}/release.json") as stream:
        marker = json.loads(stream.read())
    for name, file in marker["files"].items():
        local = (Path(config.output.path) / name).read_bytes()
        with filesystem.open_input_stream(f"{root}/{name}") as stream:
            assert stream.read() == local
        assert hashlib.sha256(local).hexdigest() == file["sha256"]
    assert {*marker["files"]} >= {"run.json", "synthetic.jsonl", "privacy_report.html"}
    assert not any("private/" in name for name in marker["files"])
    other = parse_config(settings(**sequences, output__path=f"{config.output.path}-2",
                                  output__copy_to=uri))  # fmt: skip
    with pytest.raises(InputError, match=f"^output.copy_to: {uri} has the release of another run"):
        dpray.run(other)
    assert not Path(other.output.path).exists()
    nowhere = other.model_copy(
        update={"output": other.output.model_copy(update={"copy_to": "s3://nowhere/notes"})}
    )
    with pytest.raises(
        InputError, match=r"^output\.copy_to: s3://nowhere/notes: there is no such bucket"
    ):
        dpray.run(nowhere)
    assert not Path(other.output.path).exists()

"""The shipped proxy configuration under a real nginx, in front of a port of the tests' own."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from tests.integration.processes import end, free_ports, wait_for

CONFIG = Path(__file__).parents[2] / "cluster" / "proxy" / "nginx.conf"


def nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("no nginx (the Debian package nginx-light)")
    return found


@dataclass(frozen=True)
class Proxy:
    process: subprocess.Popen[bytes]
    port: int
    tls: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def peak_bytes(self) -> int:
        """The most memory its processes have had, added up."""
        return sum(peak_bytes(each.pid) for each in [self.process, *self._workers()])

    def _workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return self.tls.wrap_socket(plain, server_hostname="127.0.0.1")


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@contextmanager
def running_proxy(
    folder: Path, upstream: int, changes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Proxy]:
    """The shipped file, with only addresses, certificate and places for files replaced, and
    `changes`."""
    port = free_ports(1)[0]
    tls = certificate(folder)
    path = folder / "nginx.conf"
    path.write_text(
        configured(
            {
                "/tmp/": f"{folder}/",  # first: the others may bring it in
                "server dpray-serve:8000;": f"server 127.0.0.1:{upstream};",
                "listen 8443 ssl;": f"listen 127.0.0.1:{port} ssl;",
                "/etc/nginx/tls/": f"{folder}/",
                **changes,
            }
        )
    )
    out = folder / "nginx.err"
    with open(out, "wb") as errors:
        process = subprocess.Popen(
            [nginx(), "-p", str(folder), "-c", str(path), "-g", "daemon off;"], stderr=errors
        )
    try:
        wait_for(lambda: answers(port), process)
        yield Proxy(process, port, tls)
    finally:
        end(process)
    assert out.read_text().count("emerg") == 0, out.read_text()


def configured(changes: Mapping[str, str]) -> str:
    text = CONFIG.read_text()
    for was, becomes in changes.items():
        assert was in text, was
        text = text.replace(was, becomes)
    return text


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def certificate(folder: Path) -> ssl.SSLContext:
    """Writes tls.crt and tls.key for 127.0.0.1; returns a client's context that trusts them."""
    made = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=127.0.0.1"
    )
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt"]
    command = ["openssl", *made.split(), *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ssl.create_default_context(cafile=str(folder / "tls.crt"))


def in_one_header() -> Iterator[bytes]:
    """A request with one header of 200 MB."""
    yield b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Long: "
    yield from [b"x" * 1_000_000] * 200


def in_lines() -> Iterator[bytes]:
    """A request with 200 MB of short headers."""
    yield b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    yield from [b"X-Short: 0123456789\r\n" * 50_000] * 190


def in_the_path() -> Iterator[bytes]:
    """A request whose path has 200 MB."""
    yield b"GET /v1/"
    yield from [b"x" * 1_000_000] * 200


def flood(proxy: Proxy, request: Iterator[bytes]) -> tuple[int, bytes]:
    """Sends a request as far as the proxy takes it; the status and the rest of its answer."""
    with proxy.connect() as connection:
        with suppress(OSError):  # it hangs up on what it does not want
            for piece in request:
                connection.sendall(piece)
        answer = b""
        with suppress(OSError):
            while more := connection.recv(65536):
                answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body

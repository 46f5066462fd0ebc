"""The shipped proxy configuration under a real nginx: what it refuses, and that others are answered
meanwhile. Behind it the real guard answers, without a model."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.proxy import (
    CONFIG,
    Proxy,
    answers,
    flood,
    in_lines,
    in_one_header,
    in_the_path,
    nginx,
    peak_bytes,
    running_proxy,
)
from tests.integration.processes import end, environment, free_ports, wait_for
from tests.serving.front import CHAT, KEY, hashed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MEGABYTE = 10**6
HEADER_SECONDS = 5
SLOW = 60.0
"""Far more than the proxy's time-outs; a test that waits so long has failed."""


@dataclass(frozen=True)
class Front:
    proxy: Proxy
    upstream: subprocess.Popen[bytes]
    port: int
    """The upstream's."""

    def client(self, **more: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"} | more.pop("headers", {})
        return httpx.Client(
            base_url=self.proxy.url, verify=self.proxy.tls, headers=headers, timeout=SLOW, **more
        )

    def chat(self, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(CHAT, json=body)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    nginx()
    [port] = free_ports(1)
    command = [sys.executable, "-m", "tests.cluster.upstream", str(port), hashed(KEY)]
    upstream = subprocess.Popen(command, env=environment(), cwd=ROOT)
    try:
        wait_for(lambda: answers(port), upstream)
        with running_proxy(tmp_path_factory.mktemp("proxy"), port) as proxy:
            yield Front(proxy, upstream, port)
    finally:
        end(upstream)


def assert_openais(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


def test_nginx_takes_the_file_as_it_is_shipped(tmp_path: Path) -> None:
    # All but what a checkout cannot have: the certificate and the name of the cluster's service.
    with running_proxy(tmp_path, free_ports(1)[0]) as proxy:
        tested = subprocess.run(
            [nginx(), "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")],
            capture_output=True,
            text=True,
        )
        assert tested.returncode == 0 and "warn" not in tested.stderr, tested.stderr
        with httpx.Client(verify=proxy.tls) as client:  # nobody behind it
            answer = client.post(proxy.url + CHAT, json={})
        assert_openais(answer, 503, "not_ready")
        assert answer.headers["Retry-After"] == "5"
    wrong = tmp_path / "wrong.conf"
    wrong.write_text(CONFIG.read_text().replace("client_header_timeout", "client_header_timeuot"))
    assert subprocess.run([nginx(), "-t", "-c", str(wrong)], capture_output=True).returncode == 1


@pytest.mark.parametrize("shape", [in_one_header, in_lines, in_the_path])
def test_200_mb_of_headers_are_refused_and_others_are_answered_meanwhile(
    front: Front, shape: Callable[[], Iterator[bytes]]
) -> None:
    assert front.chat(a=1).status_code == 200
    before = peak_bytes(front.upstream.pid)
    with ThreadPoolExecutor(4) as pool:
        floods = [pool.submit(flood, front.proxy, shape()) for _ in range(3)]
        good = 0
        while good < 5 or not all(each.done() for each in floods):
            assert front.chat(a=1).status_code == 200
            good += 1
        for each in floods:
            status, body = each.result(timeout=SLOW)
            assert status == 431
            assert b'"code": "headers_too_large"' in body
    assert front.proxy.peak_bytes < 150 * MEGABYTE
    assert peak_bytes(front.upstream.pid) - before < 20 * MEGABYTE


def drip(proxy: Proxy, first: bytes, every: bytes, seconds: float) -> float:
    """Sends `first`, then `every` each second; the seconds until the proxy hangs up."""
    with proxy.connect() as connection:
        connection.sendall(first)
        started = time.monotonic()
        connection.settimeout(1.0)
        while time.monotonic() - started < seconds:
            try:
                if not connection.recv(4096):
                    break
            except TimeoutError:
                pass
            except OSError:
                break
            try:
                connection.sendall(every)
            except OSError:
                break
        return time.monotonic() - started


def test_a_slow_client_is_cut_off_and_others_are_answered_meanwhile(front: Front) -> None:
    start = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
    body = f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n".encode()
    body += b"Content-Length: 100\r\n\r\n{"
    with ThreadPoolExecutor(50) as pool:
        headers = [pool.submit(drip, front.proxy, start, b"x", SLOW) for _ in range(24)]
        nothing = [pool.submit(drip, front.proxy, b"", b"", SLOW) for _ in range(12)]
        bodies = [pool.submit(drip, front.proxy, start + body, b"", SLOW) for _ in range(12)]
        for _ in range(HEADER_SECONDS * 2):
            assert front.chat(a=1).status_code == 200
            time.sleep(0.3)
        taken = [each.result() for each in (*headers, *nothing, *bodies)]
    assert min(taken) > 0.5 * HEADER_SECONDS
    assert max(taken) < SLOW - 5, "not cut off"


def test_slow_bodies_keep_nobody_out(front: Front, tmp_path: Path) -> None:
    """Requests whose bodies never end have twice as many places as the proxy has. Those with a
    wrong key are refused at once, the others when the guard's time for a body is over."""
    few = {"limit_conn all 4096;": "limit_conn all 12;"}
    good, wrong = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
        for key in (KEY, "wrong")
    )
    with ThreadPoolExecutor(24) as pool, running_proxy(tmp_path, front.port, few) as proxy:
        narrow = replace(front, proxy=proxy)
        for head, refusal in ((wrong, "401"), (good, "408")):
            slow = [pool.submit(until_answered, proxy, head.encode()) for _ in range(24)]
            refused = {each.result(timeout=SLOW) for each in slow}
            assert refusal in refused <= {refusal, "429"}
            wait_for(lambda: narrow.chat(a=1).status_code == 200)


def until_answered(proxy: Proxy, head: bytes) -> str:
    """Sends the head, then a byte now and then; the status of the answer."""
    with proxy.connect() as connection:
        connection.sendall(head)
        connection.settimeout(0.2)
        while True:
            with suppress(TimeoutError):
                return connection.recv(4096)[9:12].decode()
            connection.sendall(b" ")


def test_a_body_may_have_a_million_bytes(front: Front) -> None:
    assert front.chat(a="x" * 990_000).status_code == 200
    assert_openais(front.chat(a="x" * MEGABYTE), 413, "request_too_large")

    def pieces() -> Iterator[bytes]:
        yield b'{"a": "'
        for _ in range(200):
            yield b"x" * 10_000
        yield b'"}'

    with front.client(headers={"Content-Type": "application/json"}) as client:
        assert_openais(client.post(CHAT, content=pieces()), 413, "request_too_large")


def test_a_stream_goes_through_as_it_comes(front: Front) -> None:
    came: list[tuple[str, float]] = []
    with front.client() as client, client.stream("POST", CHAT, json={"stream": True}) as answer:
        assert answer.status_code == 200
        came.extend((line, time.monotonic()) for line in answer.iter_lines() if line)
    assert [line for line, _ in came] == [f"data: {number}" for number in range(4)]
    assert came[-1][1] - came[0][1] > 2  # four events, a second apart


def test_only_listed_headers_reach_serve_and_the_callers_id_does(front: Front) -> None:
    sent = {
        "X-Request-ID": "0123456789abcdef",
        "serve_multiplexed_model_id": "other",
        "X-Forwarded-For": "127.0.0.1, 10.0.0.7",
        "X-Other": "x",
        "Cookie": "a=b",
    }
    with front.client(headers=sent) as client:
        answer = client.post(CHAT, json={})
        assert answer.status_code == 200
        assert set(answer.headers["x-arrived"].split(",")) == {
            "accept",
            "authorization",
            "connection",
            "content-length",
            "content-type",
            "host",
            "x-forwarded-for",
            "x-request-id",
        }
        assert answer.headers["x-arrived-id"] == "0123456789abcdef"
        assert answer.headers["x-arrived-for"] == "127.0.0.1"
        assert answer.headers.get_list("x-request-id") == ["0123456789abcdef"]
        answer = client.post(CHAT, json={}, headers={"X-Request-ID": "Marlowe has it"})
        assert answer.headers["x-arrived-id"] not in ("", "Marlowe has it")
        assert answer.headers["x-request-id"] == answer.headers["x-arrived-id"]
        assert client.post(CHAT, json={}, headers={"Authorization": "no"}).status_code == 401


def test_what_is_for_the_inside_stays_there(front: Front) -> None:
    with front.client() as client:
        for path in ("/metrics", "/-/healthz", "/-/routes", "/", "/v1", "/v1/../metrics"):
            assert_openais(client.get(path), 404, "not_found")
        assert client.get("/health").text == "success"
        assert client.get("/v1/models").status_code == 200


def test_an_address_may_have_so_many_requests_at_a_time(front: Front) -> None:
    async def many() -> Counter[int]:
        limits = httpx.Limits(max_connections=300)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=front.proxy.url, verify=front.proxy.tls, limits=limits, timeout=SLOW
        ) as client:
            asked = [client.post(CHAT, json={"wait": 8}, headers=headers) for _ in range(300)]
            got = await asyncio.gather(*asked)
        for answer in got:
            if answer.status_code == 429:
                assert_openais(answer, 429, "rate_limit_exceeded")
                assert answer.headers["Retry-After"] == "1"
        return Counter(answer.status_code for answer in got)

    counts = asyncio.run(many())
    assert set(counts) == {200, 429}
    assert counts[200] >= 256


def test_plain_http_and_old_tls_are_refused(front: Front) -> None:
    port = front.proxy.port
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 400
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((httpx.ConnectError, ssl.SSLError)):
        httpx.get(f"{front.proxy.url}/health", verify=old)

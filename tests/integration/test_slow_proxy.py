"""`dpray serve` where Serve's proxy starts slowly: Ray kills it, and starts another one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration.processes import TIMEOUT, end, environment, free_ports, ray_cluster

pytestmark = pytest.mark.slow


def test_a_proxy_that_ray_kills_for_a_slow_start_has_a_successor(
    model_folder: str, short_folder: Path, tmp_path: Path
) -> None:
    config = {
        "embedder": {"model": model_folder},
        "serve": {
            "port": free_ports(1)[0],
            "auth": "none",
            "start_timeout_seconds": TIMEOUT,
            "embedder": {},
        },
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    # The first proxy has 0.15 seconds instead of 15; each one after it has 0.15 more.
    with ray_cluster(short_folder, RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="0.05") as cluster:
        process = subprocess.Popen(
            [sys.executable, "-m", "dpray", "serve", str(path), "--json"],
            env=environment(RAY_ADDRESS=cluster.address),
            stdout=subprocess.PIPE,
            stderr=open(tmp_path / "err", "w"),  # noqa: SIM115
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (tmp_path / "err").read_text()
            assert httpx.get(json.loads(line)["health"], timeout=TIMEOUT).status_code == 200
            controllers = [log for log in cluster.logs() if log.name.startswith("controller_")]
            assert any("marking it unhealthy" in log.read_text() for log in controllers)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0
            assert cluster.workers("ProxyActor") == []
        finally:
            end(process)

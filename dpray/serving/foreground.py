"""The application is served for as long as this process lives."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from time import monotonic
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import RunTarget

from dpray.serving.applications import APPLICATION, SYSTEM_LOGS, application, http_options, running
from dpray.serving.settings import LOOPBACK, ServeFile
from dpray.types import DprayError, InputError
from dpray.workers.cluster import start_ray

_POLL_SECONDS = 0.5


class ServingFailed(DprayError):
    """The application did not start, or stopped for good."""


def serve_until_stopped(
    file: ServeFile, on_wait: Callable[[str], None], on_ready: Callable[[str], None]
) -> None:
    """Deploy, call `on_ready` with the base URL once every model is ready, and return after SIGINT
    or SIGTERM, with the application shut down. `on_wait` gets the names of what is not ready yet
    (deployments, Serve's proxy), when they change.

    Raises InputError where Serve already runs on the cluster, ServingFailed for a failed start.
    """
    stop = threading.Event()
    was_connected = ray.is_initialized()
    start_ray(file.runtime.ray_address)
    # After Ray's start, which installs a handler that aborts.
    with _stopping(stop):
        # Serve logs every step; `on_wait` reports what a person needs.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if serve.status().proxies:
            raise InputError(
                "Serve runs on this cluster already, bound as it is: hand it the output of "
                "`dpray serve CONFIG --dry-run` with `serve deploy`"
            )
        try:
            _start(file)
            target = RunTarget(application(file), APPLICATION, "/")
            serve.run_many(
                [target],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
            _wait(file, stop, on_wait)
            if not stop.is_set():
                everywhere = file.serve.host in ("0.0.0.0", "::")
                host = LOOPBACK if everywhere else file.serve.host
                on_ready(f"http://{host}:{file.serve.port}/v1")
            while not stop.wait(_POLL_SECONDS):
                pass
        finally:
            _take_down(disconnect=not was_connected)


def _start(file: ServeFile) -> None:
    """Start Serve's controller and wait for its proxy.

    Ray kills a proxy that needs more than 15 seconds to start, as it may on a busy machine, and
    starts another, which has more time. Where the first one died, `_wait` waits for its successor.
    """
    try:
        serve.start("HeadOnly", http_options(file), logging_config=SYSTEM_LOGS)
    except (RayActorError, TimeoutError):
        # The controller lives: this connects to it, and waits for nothing.
        serve.start("HeadOnly", http_options(file), logging_config=SYSTEM_LOGS)


def _wait(file: ServeFile, stop: threading.Event, on_wait: Callable[[str], None]) -> None:
    deadline = monotonic() + file.serve.start_timeout_seconds
    reported = ""
    while not stop.wait(_POLL_SECONDS):
        serves: Any = serve.status()
        found = serves.applications.get(APPLICATION)
        status = found.status if found else "NOT_STARTED"
        is_reachable = "HEALTHY" in serves.proxies.values()
        if status == "RUNNING" and is_reachable:
            return
        if found and status in ("DEPLOY_FAILED", "UNHEALTHY"):
            failed = (n for n, each in found.deployments.items() if each.status != "HEALTHY")
            raise ServingFailed(
                f"serving: {next(failed, APPLICATION)} did not start; why is in the logs of its "
                "replicas"
            )
        if monotonic() > deadline:
            raise ServingFailed(
                f"serving: not up after {file.serve.start_timeout_seconds:g} s "
                "(serve.start_timeout_seconds); does the cluster have the CPUs and GPUs for it?"
            )
        parts = {**running(serves), "Serve's proxy": is_reachable}
        waiting = ", ".join(name for name, is_up in parts.items() if not is_up)
        if waiting and waiting != reported:
            on_wait(waiting)
            reported = waiting


def _take_down(disconnect: bool) -> None:
    """End Serve, which this command started; Ray's lines stay off stdout, which is `--json`'s."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        with suppress(Exception):
            serve.shutdown()
        if disconnect:
            ray.shutdown()


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set `stop`."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The application is served for as long as this process lives."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress

from ray import serve
from ray.exceptions import RayActorError

from dpray.serving.applications import APPLICATION, SYSTEM_LOGS, application, http_options
from dpray.serving.settings import LOOPBACK, ServeFile
from dpray.types import DprayError, InputError
from dpray.workers.cluster import start_ray

_POLL_SECONDS = 0.5


class ServingFailed(DprayError):
    """The application did not start."""


def serve_until_stopped(file: ServeFile, on_ready: Callable[[str], None]) -> None:
    """Deploy, call `on_ready` with the base URL once every model is ready, and return after SIGINT
    or SIGTERM, with the application shut down.

    Raises InputError if Serve already runs on the cluster, ServingFailed for a failed start.
    """
    start_ray(file.runtime.ray_address)
    # After Ray's start, which installs a handler that aborts.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # It logs every step.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if serve.status().proxies:
        raise InputError(
            "Serve runs on this cluster already, bound as it is: hand it the output of "
            "`dpray serve CONFIG --dry-run` with `serve deploy`"
        )
    try:
        _deploy(file)
        everywhere = file.serve.host in ("0.0.0.0", "::")
        host = LOOPBACK if everywhere else file.serve.host
        on_ready(f"http://{host}:{file.serve.port}/v1")
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        # Ray's lines stay off stdout, which is `--json`'s.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), suppress(Exception):
            serve.shutdown()  # type: ignore[no-untyped-call]


def _deploy(file: ServeFile) -> None:
    """Start Serve and the application, and wait until Serve's proxy is there.

    Ray kills a proxy that needs more than 15 seconds to start, as it may on a busy machine, and
    starts another, which has more time.
    """
    try:
        serve.start("HeadOnly", http_options(file), logging_config=SYSTEM_LOGS)
    except (RayActorError, TimeoutError):
        # The controller lives: this connects to it, and waits for nothing.
        serve.start("HeadOnly", http_options(file), logging_config=SYSTEM_LOGS)
    built = application(file)
    try:
        serve.run(built, name=APPLICATION, route_prefix="/")
    except RuntimeError:
        raise ServingFailed(
            "serving: a model did not start; why is in the logs of its replicas"
        ) from None
    while "HEALTHY" not in serve.status().proxies.values():
        time.sleep(_POLL_SECONDS)

"""The Ray Serve application, and serving it until this process is stopped: Ray's own OpenAI
ingress behind the guard, an LLM and an embedder.

Serve routes, queues, scales, sheds load, checks health and exports metrics; `ray.serve.llm` has the
OpenAI endpoints and runs both models in vLLM. The replicas log nothing that can hold a prompt: no
access log, and nothing below CRITICAL, because Serve and vLLM log the errors of requests with their
text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from ray import serve
from ray.exceptions import RayActorError
from starlette.exceptions import HTTPException

from dpray.config.sections import EngineConfig
from dpray.engines.embedder import locate_embedder
from dpray.engines.model_path import resolve_model
from dpray.engines.vllm.model import DEFAULT_CONTEXT, ENVIRONMENT, vllm_options
from dpray.extras import Late
from dpray.io.settings_file import parse
from dpray.serving.errors import FRONT_ENVIRONMENT, reraise
from dpray.serving.guard import Endpoint, Guard
from dpray.serving.requests import ChatCall, CompletionCall, EmbeddingCall, Room
from dpray.serving.settings import (
    LOOPBACK,
    LimitsConfig,
    ReplicasConfig,
    ServeConfig,
    ServedEmbedder,
    ServedLLM,
    ServeFile,
)
from dpray.types import DprayError, InputError
from dpray.workers.cluster import start_ray

# Late: they import vLLM.
llm, ingress = Late("ray.serve.llm"), Late("ray.serve.llm.ingress")

APPLICATION = "dpray"
BUILDER = "dpray.serving.applications:build"
LLM, EMBEDDER = "llm", "embedder"
"""The names of the models' deployments."""
_SMALL_CACHE = 2**24
"""Bytes of an embedder's cache on a CPU. vLLM wants one, though an encoder fills none."""
_REPLICAS_SECONDS = 2.0
_POLL_SECONDS = 0.5
_GATEWAY_REQUESTS = 1024
"""The most requests in flight in a gateway. Another 1024 wait, and Serve answers any more with a
503."""
_HEALTH_SECONDS = 1.0
"""Serve checks every second whether the gateways live, which answer at once."""
_REPLICA_LOGS = {"enable_access_log": False, "log_level": "CRITICAL"}
SYSTEM_LOGS = {"enable_access_log": False, "log_level": "WARNING"}
"""Configures the logs of Serve's controller and proxy: an access log would hold callers' paths."""
_ROUTES: dict[str, Callable[[FastAPI], Any]] = {
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    "chat": lambda app: app.post("/v1/chat/completions"),
    "completions": lambda app: app.post("/v1/completions"),
    "embeddings": lambda app: app.post("/v1/embeddings"),
}
"""The methods of Ray's ingress that are served; it has others."""


def serve_config(file: ServeFile) -> dict[str, object]:
    """Make the input of `serve deploy`: the application below, with `file` as its arguments,
    without defaults and without the keys of another endpoint."""
    other_endpoint = {"api_key", "base_url", "max_in_flight"}
    others: Any = {"runtime": True, "engine": other_endpoint, "embedder": other_endpoint}
    arguments = file.model_dump(mode="json", exclude_unset=True, exclude=others)
    return {
        "proxy_location": "HeadOnly",
        "http_options": http_options(file),
        "logging_config": SYSTEM_LOGS,
        "applications": [
            {"name": APPLICATION, "route_prefix": "/", "import_path": BUILDER, "args": arguments}
        ],
    }


def http_options(file: ServeFile) -> dict[str, object]:
    return file.serve.model_dump(include={"host", "port"})


def build(args: dict[str, object]) -> serve.Application:
    """Make the application of a ServeFile's plain values. Raises InputError that names the key."""
    return application(parse(ServeFile, args))


def application(file: ServeFile) -> serve.Application:
    """Make the application that `file` describes. Raises InputError for a model that is missing."""
    models: dict[str, serve.Application] = {}
    endpoints: dict[str, Endpoint] = {}
    limits = file.serve.limits
    # vLLM reads it once, when it is imported.
    os.environ.update(ENVIRONMENT)
    if (name := file.llm_name) and file.engine and file.serve.llm:
        models[name] = _llm(file.engine, file.serve.llm, name, limits)
        room = _llm_room(file.engine, file.serve.llm)
        endpoints["/v1/chat/completions"] = Endpoint(ChatCall, name, LLM, room)
        endpoints["/v1/completions"] = Endpoint(CompletionCall, name, LLM, room)
    if (name := file.embedder_name) and file.embedder and file.serve.embedder:
        models[name] = _embedder(file.embedder.model, file.serve.embedder, name, limits)
        room = Room(file.serve.embedder.max_texts_in_flight, 1, 1)
        endpoints["/v1/embeddings"] = Endpoint(EmbeddingCall, name, EMBEDDER, room)
    return _gateway(file.serve, models, endpoints)


def _gateway(
    config: ServeConfig, models: Mapping[str, serve.Application], endpoints: dict[str, Endpoint]
) -> serve.Application:
    # All errors pass FastAPI as exceptions: its own answers quote the request.
    handlers: Any = dict.fromkeys((HTTPException, RequestValidationError), reraise)
    app = FastAPI(openapi_url=None, exception_handlers=handlers)
    app.add_middleware(Guard, config=config, endpoints=endpoints, replicas=RunningReplicas())
    # The guard ends a request first, with an error in OpenAI's format.
    patience = {"RAY_SERVE_LLM_ROUTER_HTTP_TIMEOUT": str(2 * config.limits.request_timeout_seconds)}
    deployed = serve.deployment(
        name="gateway",
        num_replicas=config.gateways,
        max_ongoing_requests=_GATEWAY_REQUESTS,
        max_queued_requests=_GATEWAY_REQUESTS,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=config.limits.request_timeout_seconds,
        logging_config=_REPLICA_LOGS,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": ENVIRONMENT | patience}},
    )(ingress.make_fastapi_ingress(ingress.OpenAiIngress, endpoint_map=_ROUTES, app=app))
    card = {"object": "model", "owned_by": "dpray", "permission": [], "metadata": {}}
    cards = {name: {"id": name, **card} for name in models}
    return deployed.bind(llm_deployments=dict(models), model_cards=cards)


class RunningReplicas:
    """Returns how many replicas of a deployment run, and asks Serve at most once in two seconds."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._until = 0.0

    async def __call__(self, deployment: str) -> int:
        if time.monotonic() >= self._until:
            self._until = time.monotonic() + _REPLICAS_SECONDS
            # Without an answer, what was known counts.
            with suppress(Exception):
                status: Any = await asyncio.to_thread(serve.status)
                for name, each in status.applications[APPLICATION].deployments.items():
                    self._known[name] = each.replica_states.get("RUNNING", 0)
        return max(1, self._known.get(deployment, 1))


def _llm_room(engine: EngineConfig, served: ServedLLM) -> Room:
    context = engine.max_model_len or DEFAULT_CONTEXT
    tokens = served.max_tokens_in_flight or engine.max_num_seqs * context
    return Room(tokens, tokens // engine.max_num_seqs, context)


def _llm(
    engine: EngineConfig, served: ServedLLM, name: str, limits: LimitsConfig
) -> serve.Application:
    """Make the deployment of `engine`, with vLLM's arguments of `dpray/engines/vllm/engine.py`.
    Lockstep decoding is not served."""
    folder = resolve_model(engine.model)
    options = vllm_options(engine, on_gpu=served.gpus_per_replica > 0) | engine.model_dump(
        include={"max_model_len", "max_num_batched_tokens"}, exclude_none=True
    )
    return _model(LLM, name, folder, options, served, limits, engine.tensor_parallel_size)


def _embedder(
    model: str, served: ServedEmbedder, name: str, limits: LimitsConfig
) -> serve.Application:
    options = {"runner": "pooling", "dtype": "float32", "enforce_eager": True}
    if not served.gpus_per_replica:
        options["kv_cache_memory_bytes"] = _SMALL_CACHE
    return _model(EMBEDDER, name, locate_embedder(model), options, served, limits)


def _model(
    deployment: str,
    name: str,
    folder: str,
    options: dict[str, Any],
    replicas: ReplicasConfig,
    limits: LimitsConfig,
    workers: int = 1,
) -> serve.Application:
    """Make Ray's deployment of a model that clients call `name`."""
    bundle = {"CPU": replicas.cpus_per_replica / workers}
    if replicas.gpus_per_replica:
        bundle["GPU"] = replicas.gpus_per_replica / workers
    # The replicas have working directories of their own.
    source = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
    config = llm.LLMConfig(
        model_loading_config={"model_id": name, "model_source": source},
        engine_kwargs=options | {"enable_log_requests": False},
        # The replica's actor shares the first bundle with the engine's worker.
        placement_group_config={"bundles": [dict(bundle) for _ in range(workers)]},
        deployment_config={
            "logging_config": _REPLICA_LOGS,
            "ray_actor_options": {"num_cpus": 0},
            **scaling(replicas, limits),
        },
        runtime_env={"env_vars": dict(ENVIRONMENT)},
    )
    model: serve.Application = llm.build_llm_deployment(
        config, override_serve_options={"name": deployment}
    )
    return model


def scaling(replicas: ReplicasConfig, limits: LimitsConfig) -> dict[str, object]:
    """Return how Serve scales, queues and ends the replicas of a model.

    A replica that is taken away first answers what it has begun: it gets as long as a request may
    take. One replica is loaded at the start even if none is to stay, so that a model that cannot
    be loaded is an error of the start.
    """
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min_replicas,
            "initial_replicas": max(1, replicas.min_replicas),
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
            "upscale_delay_s": replicas.upscale_delay_seconds,
            "downscale_delay_s": replicas.downscale_delay_seconds,
        },
        "max_ongoing_requests": replicas.max_ongoing_requests,
        "max_queued_requests": replicas.max_queued_requests,
        "graceful_shutdown_timeout_s": limits.request_timeout_seconds,
    }


class ServingFailed(DprayError):
    """The application did not start."""


def serve_until_stopped(file: ServeFile, on_ready: Callable[[str], None]) -> None:
    """Deploy, call `on_ready` with the base URL once every model is ready, and return after SIGINT
    or SIGTERM, with the application shut down.

    Raises InputError if Serve already runs on the cluster, ServingFailed for a failed start.
    """
    # Serve's controller and proxy have the environment of the job that starts them.
    start_ray(file.runtime.ray_address, FRONT_ENVIRONMENT)
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

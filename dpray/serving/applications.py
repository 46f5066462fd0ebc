"""The Ray Serve application has gateways, an LLM (`ray.serve.llm` on vLLM) and an embedder.

The actors delegate to `gateway`, `coordinator` (where there are several gateways), `embedding` and
Ray's own LLM ingress. The replicas log nothing that can hold a prompt: no access log, and nothing
below CRITICAL, because Serve and vLLM log the errors of requests with their text.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from dpray.config.sections import EngineConfig
from dpray.engines.embedder import is_packaged
from dpray.engines.model_path import resolve_model
from dpray.engines.vllm_model import DEFAULT_CONTEXT, ENVIRONMENT, vllm_options
from dpray.serving import embedding
from dpray.serving.coordinator import Answer, Coordinator, Report
from dpray.serving.costs import embedder_capacity, llm_capacity
from dpray.serving.embedding import CountingEmbedder, Embedded, EmbeddingBatch
from dpray.serving.gateway import Caller, Endpoint, Gateway
from dpray.serving.metrics import Families
from dpray.serving.places import NOTHING, Cost, FairPlaces
from dpray.serving.ray_errors import api_error
from dpray.serving.settings import ReplicasConfig, ServeConfig, ServedEmbedder, ServeFile, parse

APPLICATION = "dpray"
BUILDER = "dpray.serving.applications:build"
_READY_SECONDS = 2.0
_HEALTH_SECONDS = 1.0
"""Serve looks so often whether the gateways and the coordinator live, which answer at once."""
_ON_HEAD = {"node:__internal_head__": 0.001}
"""It is a resource that Ray gives to the head alone."""
_REPLICA_LOGS = {"enable_access_log": False, "log_level": "CRITICAL"}
SYSTEM_LOGS = {"enable_access_log": False, "log_level": "WARNING"}
"""Configures the logs of Serve's controller and proxy: an access log would hold callers' paths."""


def serve_config(file: ServeFile) -> dict[str, Any]:
    """Make the input of `serve deploy`: the application below, with `file` as its arguments,
    without defaults and without the keys of another endpoint."""
    others: Any = {"runtime": True, "engine": {"api_key", "base_url", "max_in_flight"}}
    arguments = file.model_dump(mode="json", exclude_unset=True, exclude=others)
    return {
        "proxy_location": "HeadOnly",
        "http_options": http_options(file),
        "logging_config": SYSTEM_LOGS,
        "applications": [
            {"name": APPLICATION, "route_prefix": "/", "import_path": BUILDER, "args": arguments}
        ],
    }


def http_options(file: ServeFile) -> dict[str, Any]:
    return file.serve.model_dump(include={"host", "port"})


def build(args: dict[str, Any]) -> serve.Application:
    """Make the application of a ServeFile's plain values. Raises InputError that names the key."""
    return application(parse(ServeFile, args))


def application(file: ServeFile) -> serve.Application:
    """Make the application that `file` describes. Raises InputError for a model that is missing."""
    bound: dict[str, Any] = {}
    if (name := file.llm_name) and file.engine and file.serve.llm:
        bound |= {"llm": _llm(file.engine, file.serve.llm, name), "llm_name": name}
        context = file.engine.max_model_len or DEFAULT_CONTEXT
        capacity = llm_capacity(file.engine, file.serve.llm, context, file.serve.gateways)
        bound |= {"llm_context": context, "llm_capacity": capacity}
    if (name := file.embedder_name) and file.embedder and file.serve.embedder:
        embedder = _embedder(file.embedder.model, file.serve.embedder)
        bound |= {"embedder": embedder, "embedder_name": name}
    if file.serve.gateways > 1:
        bound["coordinator"] = _coordinator(file.serve)
    gateway = serve.deployment(
        name="gateway",
        num_replicas=file.serve.gateways,
        # More than the limit, so that the gateway itself refuses a request, in OpenAI's format.
        max_ongoing_requests=4 * file.serve.limits.max_in_flight,
        health_check_period_s=_HEALTH_SECONDS,
        logging_config=_REPLICA_LOGS,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": dict(ENVIRONMENT)}},
    )(serve.ingress()(Ingress))
    return gateway.bind(file.serve, **bound)


def _coordinator(config: ServeConfig) -> serve.Application:
    deployed = serve.deployment(
        name="coordinator",
        num_replicas=1,
        # A gateway has two calls under way, and one more for each reader of the metrics.
        max_ongoing_requests=100 * config.gateways,
        health_check_period_s=_HEALTH_SECONDS,
        logging_config=_REPLICA_LOGS,
        # No machine can be lost with it alone: Serve does not outlive its head.
        ray_actor_options={"num_cpus": 0, "resources": _ON_HEAD},
    )
    return deployed(Coordinator).bind(config.limits, config.gateways)


def _embedder(model: str, served: ServedEmbedder) -> serve.Application:
    needs = {"num_cpus": served.cpus_per_replica, "num_gpus": served.gpus_per_replica}
    deployed = serve.deployment(name="embedder", ray_actor_options=needs, **_deployment(served))
    # Each replica finds a packaged embedder where its own packages are.
    place = model if is_packaged(model) else _located(model, "embedder.model")
    return deployed(EmbeddingServer).bind(place, served)


def _located(model: str, key: str) -> str:
    """Make a folder's path absolute: the replicas have working directories of their own."""
    path = Path(checked := resolve_model(model, key))
    return str(path.resolve()) if path.is_dir() else checked


def _deployment(replicas: ReplicasConfig) -> dict[str, Any]:
    """Return the options of a model's deployment."""
    scaling = {"min_replicas", "max_replicas", "target_ongoing_requests"}
    return {
        "logging_config": _REPLICA_LOGS,
        "autoscaling_config": replicas.model_dump(include=scaling),
        **replicas.model_dump(include={"max_ongoing_requests", "max_queued_requests"}),
    }


def _llm(engine: EngineConfig, served: ReplicasConfig, name: str) -> serve.Application:
    """Make Ray's deployment of `engine` and `serve.llm`: vLLM's arguments are those of
    `dpray.engines.vllm`, without lockstep decoding, which is not served."""
    # vLLM reads it once, when it is imported.
    os.environ.update(ENVIRONMENT)
    # Imported late: it needs vLLM, and an embedder alone does not.
    from ray.serve.llm import LLMConfig, build_llm_deployment

    gpus, workers = served.gpus_per_replica, engine.tensor_parallel_size
    bundle = {"CPU": served.cpus_per_replica / workers}
    if gpus:
        bundle["GPU"] = gpus / workers
    lengths = engine.model_dump(
        include={"max_model_len", "max_num_batched_tokens"}, exclude_none=True
    )
    config = LLMConfig(
        model_loading_config={
            "model_id": name,
            "model_source": _located(engine.model, "engine.model"),
        },
        engine_kwargs=vllm_options(engine, on_gpu=gpus > 0)
        | lengths
        | {"enable_log_requests": False},
        # The replica's actor shares the first bundle with the engine's worker.
        placement_group_config={"bundles": [dict(bundle) for _ in range(workers)]},
        deployment_config=_deployment(served) | {"ray_actor_options": {"num_cpus": 0}},
        runtime_env={"env_vars": dict(ENVIRONMENT)},
    )
    return build_llm_deployment(config)


class EmbeddingServer:
    """The embedder's actor delegates to `EmbeddingBatch`."""

    def __init__(self, model: str, served: ServedEmbedder) -> None:
        self._batch = EmbeddingBatch(CountingEmbedder(model))
        self._embed.set_max_batch_size(served.max_batch_size)  # type: ignore[attr-defined]
        self._embed.set_batch_wait_timeout_s(served.batch_wait_seconds)  # type: ignore[attr-defined]

    async def embed(self, texts: tuple[str, ...]) -> Embedded:
        answer = await self._embed(texts)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @serve.batch(batch_size_fn=lambda requests: sum(map(len, requests)))
    async def _embed(self, requests: list[tuple[str, ...]]) -> list[Embedded | Exception]:
        return await asyncio.to_thread(self._batch.embed, requests)

    def check_health(self) -> None:
        if not self._batch.healthy:
            raise RuntimeError("the model failed several times in a row")


class Ingress:
    """A gateway's actor delegates to `Gateway`."""

    def __init__(
        self,
        config: ServeConfig,
        llm: DeploymentHandle | None = None,
        llm_name: str = "",
        llm_context: int = DEFAULT_CONTEXT,
        llm_capacity: Cost = NOTHING,
        embedder: DeploymentHandle | None = None,
        embedder_name: str = "",
        coordinator: DeploymentHandle | None = None,
    ) -> None:
        ready, is_sole = Readiness(), len(config.keys) <= 1
        endpoints: dict[str, Endpoint] = {}
        if llm is not None:
            # Imported late: see `_llm`.
            from dpray.serving.language_model import llm_endpoints

            deployed = llm.deployment_name
            places = FairPlaces(llm_capacity, is_sole, lambda: ready.running(deployed))
            endpoints |= llm_endpoints(llm, llm_name, llm_context, places)
        if embedder is not None and (served := config.embedder) is not None:
            capacity = embedder_capacity(served, config.gateways)
            places = FairPlaces(capacity, is_sole, lambda: ready.running("embedder"))
            endpoints["/v1/embeddings"] = _embeddings(embedder, embedder_name, served, places)
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        # The same on all gateways, which do not know when the model was made.
        card = {"object": "model", "created": 0, "owned_by": "dpray"}
        cards = [{"id": name, **card} for name in (llm_name, embedder_name) if name]
        shared = None if coordinator is None else RemoteCoordinator(coordinator)
        self._gateway = Gateway(config, endpoints, cards, ready, api_error, shared)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._gateway


class RemoteCoordinator:
    """Calls the `Coordinator` behind `handle`. Raises what Serve raises when it is lost."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def exchange(self, report: Report) -> Answer:
        answer: Answer = await self._handle.exchange.remote(report)
        return answer

    async def publish(self, gateway: str, families: Families) -> Mapping[str, Families]:
        published: Mapping[str, Families] = await self._handle.publish.remote(gateway, families)
        return published


def _embeddings(
    handle: DeploymentHandle, name: str, served: ServedEmbedder, places: FairPlaces
) -> Endpoint:
    async def embeddings(body: dict[str, Any], caller: Caller) -> Response:
        async def embed(part: tuple[str, ...]) -> Embedded:
            async with places.place(caller.name, Cost(1, len(part), 0)):
                embedded: Embedded = await handle.embed.remote(part)
                return embedded

        call = embedding.parse_embedding_call(body, name, served.max_inputs)
        size = min(served.max_batch_size, places.largest.sequences)
        parts = await asyncio.gather(*map(embed, call.parts(size)))
        return JSONResponse(embedding.embedding_answer(call, parts, name))

    return embeddings


class Readiness:
    """Counts the running replicas of the application's deployments, and asks Serve's controller at
    most once in two seconds. Raises what asking raises."""

    def __init__(self, ask: Callable[[], Any] = serve.status) -> None:
        self._ask = ask
        self._known: Mapping[str, int] = {}
        self._until = 0.0
        self._asking = asyncio.Lock()

    async def __call__(self) -> Mapping[str, int]:
        async with self._asking:
            if monotonic() >= self._until:
                self._known = running(await asyncio.to_thread(self._ask))
                self._until = monotonic() + _READY_SECONDS
            return self._known

    def running(self, deployment: str) -> int:
        """Return the number of replicas by the last answer."""
        return self._known.get(deployment, 0)


def running(status: Any) -> Mapping[str, int]:
    """Return, for each of the application's deployments, the number of its running replicas by this
    answer of `serve.status`."""
    found = status.applications.get(APPLICATION)
    if found is None:
        return {APPLICATION: 0}
    return {
        name: sum(count for state, count in each.replica_states.items() if state == "RUNNING")
        for name, each in found.deployments.items()
    }

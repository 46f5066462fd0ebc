"""The Ray Serve application: a gateway, an LLM (`ray.serve.llm` on vLLM), an embedder.

The actors delegate: what they do is in `gateway`, `embedding` and Ray's own LLM ingress. The
replicas' logs are kept to what cannot hold a prompt: no access log, and of the two models' replicas
nothing below CRITICAL, because Serve and vLLM log the errors of requests with their text.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, time
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from dpray.config.sections import EngineConfig
from dpray.engines.model_path import check_model_path
from dpray.serving.embedding import (
    CountingEmbedder,
    Embedded,
    EmbeddingBatch,
    embedding_answer,
    parse_embedding_call,
)
from dpray.serving.gateway import Endpoint, Gateway
from dpray.serving.refusals import told
from dpray.serving.settings import (
    ReplicasConfig,
    ServeConfig,
    ServedEmbedder,
    ServeFile,
    parse,
)

APPLICATION = "dpray"
BUILDER = "dpray.serving.applications:build"
_READY_SECONDS = 2.0
_QUIET = {"enable_access_log": False, "log_level": "CRITICAL"}
SYSTEM_LOGS = {"enable_access_log": False, "log_level": "WARNING"}
"""Of Serve's controller and proxy: an access log would hold paths that callers wrote."""
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM logs requests when a step fails, and the names of keys that it does not know.
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}


def serve_config(file: ServeFile) -> dict[str, Any]:
    """What `serve deploy` takes: the application below, with `file` as its arguments."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": http_options(file),
        "logging_config": SYSTEM_LOGS,
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": BUILDER,
                "args": _arguments(file),
            }
        ],
    }


def http_options(file: ServeFile) -> dict[str, Any]:
    return {"host": file.serve.host, "port": file.serve.port}


def _arguments(file: ServeFile) -> dict[str, Any]:
    """`file` as plain values without its defaults, and without the key of another endpoint."""
    values = file.model_dump(mode="json", exclude_unset=True, exclude={"runtime"})
    for key in ("api_key", "base_url", "max_in_flight"):
        values.get("engine", {}).pop(key, None)
    return values


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a ServeFile's plain values, for `serve deploy`; raises InputError that
    names the wrong key."""
    return application(parse(ServeFile, args))


def application(file: ServeFile) -> serve.Application:
    """The application that `file` asks for. Raises InputError for a model that is not there."""
    bound: dict[str, Any] = {}
    if file.llm is not None:
        bound |= {"llm": _llm(file), "llm_name": file.llm_name}
    if file.served_embedder is not None:
        bound |= {"embedder": _embedder(file), "embedder_name": file.embedder_name}
    gateway = serve.deployment(
        name="gateway",
        # One, so that the limits and the metrics are of all requests.
        num_replicas=1,
        # Serve hands it more than it takes: the gateway itself refuses what is too much, in words
        # that clients understand.
        max_ongoing_requests=4 * file.serve.limits.max_in_flight,
        logging_config=_QUIET,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": dict(_ENVIRONMENT)}},
    )(serve.ingress()(Ingress))
    return gateway.bind(file.serve, **bound)


def _embedder(file: ServeFile) -> serve.Application:
    served = file.served_embedder
    assert file.embedder is not None and served is not None
    deployment = serve.deployment(
        name="embedder",
        logging_config=_QUIET,
        max_ongoing_requests=served.max_ongoing_requests,
        max_queued_requests=served.max_queued_requests,
        autoscaling_config=_autoscaling(served),
        ray_actor_options={
            "num_cpus": served.cpus_per_replica,
            "num_gpus": served.gpus_per_replica,
        },
    )(EmbeddingServer)
    return deployment.bind(_located(file.embedder.model, "embedder.model"), served)


def _located(model: str, key: str) -> str:
    """A folder's whole path: the replicas have working directories of their own."""
    path = Path(checked := check_model_path(model, key))
    return str(path.resolve()) if path.is_dir() else checked


def _autoscaling(replicas: ReplicasConfig) -> dict[str, Any]:
    return {
        "min_replicas": replicas.min_replicas,
        "max_replicas": replicas.max_replicas,
        "target_ongoing_requests": replicas.target_ongoing_requests,
    }


def _llm(file: ServeFile) -> serve.Application:
    # Before vLLM is imported, which reads it once.
    os.environ.update(_ENVIRONMENT)
    # Imported late: it needs vLLM, and an embedder alone does not.
    from ray.serve.llm import build_llm_deployment

    return build_llm_deployment(llm_config(file))


def llm_config(file: ServeFile) -> Any:
    """Ray's LLMConfig of `engine` and `serve.llm`."""
    from ray.serve.llm import LLMConfig

    assert file.engine is not None and file.llm is not None
    workers = file.engine.tensor_parallel_size
    bundle = {"CPU": file.llm.cpus_per_replica / workers}
    if file.llm.gpus_per_replica:
        bundle["GPU"] = file.llm.gpus_per_replica / workers
    return LLMConfig(
        model_loading_config={
            "model_id": file.llm_name,
            "model_source": _located(file.engine.model, "engine.model"),
        },
        engine_kwargs=_engine_arguments(file.engine, on_gpu=file.llm.gpus_per_replica > 0),
        # The replica's actor shares the first bundle with the engine's worker.
        placement_group_config={"bundles": [dict(bundle) for _ in range(workers)]},
        deployment_config={
            "max_ongoing_requests": file.llm.max_ongoing_requests,
            "max_queued_requests": file.llm.max_queued_requests,
            "autoscaling_config": _autoscaling(file.llm),
            "logging_config": _QUIET,
            "ray_actor_options": {"num_cpus": 0},
        },
        runtime_env={"env_vars": dict(_ENVIRONMENT)},
    )


def _engine_arguments(engine: EngineConfig, on_gpu: bool) -> dict[str, Any]:
    """vLLM's, as `dpray.engines.vllm` sets them, but for lockstep decoding, which is not served."""
    arguments: dict[str, Any] = {
        "dtype": "float32" if engine.dtype == "auto" and not on_gpu else engine.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "enable_log_requests": False,
    }
    if engine.max_model_len is not None:
        arguments["max_model_len"] = engine.max_model_len
    if engine.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = engine.max_num_batched_tokens
    if on_gpu:
        return arguments | {"gpu_memory_utilization": engine.gpu_memory_utilization}
    return arguments | {
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30),
    }


class EmbeddingServer:
    """The embedder's actor; all it knows is in `EmbeddingBatch`."""

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
            raise RuntimeError("the model failed several times on end")


class Ingress:
    """The gateway's actor; all it knows is in `Gateway`."""

    def __init__(
        self,
        config: ServeConfig,
        llm: DeploymentHandle | None = None,
        llm_name: str = "",
        embedder: DeploymentHandle | None = None,
        embedder_name: str = "",
    ) -> None:
        endpoints: dict[str, Endpoint] = {}
        if llm is not None:
            # Imported late: see `_llm`.
            from dpray.serving.language_model import LanguageModel

            endpoints |= LanguageModel(llm, llm_name).endpoints
        if embedder is not None and config.embedder is not None:
            endpoints["/v1/embeddings"] = _embeddings(embedder, embedder_name, config.embedder)
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        created = int(time())
        cards = [
            {"id": name, "object": "model", "created": created, "owned_by": "dpray"}
            for name in (llm_name, embedder_name)
            if name
        ]
        self._gateway = Gateway(config, endpoints, cards, Readiness(), told)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._gateway


def _embeddings(handle: DeploymentHandle, name: str, served: ServedEmbedder) -> Endpoint:
    async def embeddings(body: dict[str, Any], salt: str) -> Response:
        call = parse_embedding_call(body, name, served.max_inputs)
        parts = await asyncio.gather(
            *(handle.embed.remote(part) for part in call.parts(served.max_batch_size))
        )
        return JSONResponse(embedding_answer(call, parts, name))

    return embeddings


class Readiness:
    """Which of the application's deployments have a replica that runs; asked of Serve's controller
    by one at a time, and not for two seconds after it answered, however often somebody asks here.
    Raises what asking raises."""

    def __init__(self) -> None:
        self._known: Mapping[str, bool] = {}
        self._until = 0.0
        self._asking = asyncio.Lock()

    async def __call__(self) -> Mapping[str, bool]:
        async with self._asking:
            if monotonic() >= self._until:
                self._known = await asyncio.to_thread(running)
                self._until = monotonic() + _READY_SECONDS
            return self._known


def running() -> Mapping[str, bool]:
    """Which of the application's deployments have a replica that runs."""
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        return {APPLICATION: False}
    return {
        name: any(state == "RUNNING" and count for state, count in each.replica_states.items())
        for name, each in found.deployments.items()
    }

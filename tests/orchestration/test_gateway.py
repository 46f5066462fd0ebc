"""What stands in front of the served models, without Ray: authentication, limits, errors, metrics,
embeddings; and the files that `dpray serve` reads and writes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import typer
import yaml
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import ServeDeploySchema
from starlette.responses import JSONResponse, Response, StreamingResponse

from dpray.commands.serve import serve
from dpray.config.serve import ServeConfig, ServeFile, load_serve_config, parse
from dpray.orchestration.serving.applications import serve_config
from dpray.orchestration.serving.embedding import (
    Embedded,
    EmbeddingBatch,
    embedding_answer,
    parse_embedding_call,
)
from dpray.orchestration.serving.gateway import Endpoint, Gateway
from dpray.orchestration.serving.refusals import told
from dpray.types import InputError

ROOT = Path(__file__).parents[2]
KEY, OTHER, WORD = "key-one", "key-two", "Marlowe"
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
MODEL = "minilm"
CARDS = [{"id": MODEL, "object": "model", "created": 1, "owned_by": "dpray"}]


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


async def echo(body: dict[str, Any], salt: str) -> Response:
    return JSONResponse({"keys": sorted(body), "salt": salt})


async def always_ready() -> Mapping[str, bool]:
    return {"gateway": True}


def config(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate({"keys": [hashed(OTHER), hashed(KEY)]} | changes)


def gateway(
    answer: Endpoint = echo,
    ready: Callable[[], Awaitable[Mapping[str, bool]]] = always_ready,
    **changes: Any,
) -> Gateway:
    return Gateway(config(**changes), {CHAT: answer, EMBEDDINGS: answer}, CARDS, ready, told)


def http(
    app: Gateway, key: str | None = KEY, client: tuple[str, int] = ("127.0.0.1", 1)
) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=client), base_url="http://test", headers=headers
    )


def ask(app: Gateway, path: str = CHAT, key: str | None = KEY, **more: Any) -> httpx.Response:
    """One POST, or a GET where there is nothing to send."""

    async def send() -> httpx.Response:
        async with http(app, key, more.pop("client", ("127.0.0.1", 1))) as client:
            return await client.request("POST" if more else "GET", path, **more)

    return asyncio.run(send())


def counted(app: Gateway, route: str, status: int) -> float:
    line = f'dpray_requests_total{{route="{route}",status="{status}"}} '
    page = ask(app, "/metrics").text
    return sum(float(each.removeprefix(line)) for each in page.splitlines() if line in each)


def assert_openais(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert WORD not in answer.text


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_every_key_is_let_in(key: str) -> None:
    assert ask(gateway(), json={}, key=key).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {hashed(KEY)}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \xe9",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/nothing"])
def test_nobody_else_is(header: str | None, path: str) -> None:
    headers = {"Authorization": header.encode("latin-1")} if header is not None else {}
    answer = ask(gateway(), path, key=None, json={}, headers=headers)

    assert_openais(answer, 401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_health_needs_no_key_and_says_what_is_missing() -> None:
    async def half() -> Mapping[str, bool]:
        return {"gateway": True, "embedder": False}

    assert ask(gateway(), "/health", key=None).json()["status"] == "ok"
    answer = ask(gateway(ready=half), "/health", key=None)
    assert (answer.status_code, answer.json()["deployments"]["embedder"]) == (503, "not ready")


def test_without_keys_only_this_machine_is_served() -> None:
    app = gateway(keys=[], auth="none")

    assert ask(app, json={}, key=None).status_code == 200
    assert ask(app, "/v1/models", key="any").status_code == 200
    for far in ("10.0.0.7", "testclient"):
        assert_openais(ask(app, json={}, key=None, client=(far, 1)), 403, "not_local")


def test_models() -> None:
    app = gateway()
    assert ask(app, "/v1/models").json() == {"object": "list", "data": CARDS}
    assert ask(app, f"/v1/models/{MODEL}").json() == CARDS[0]
    assert_openais(ask(app, f"/v1/models/{WORD}"), 404, "model_not_found")


def test_paths_methods_types_and_bodies_that_are_wrong() -> None:
    app = gateway()
    as_json = {"Content-Type": "application/json"}
    assert_openais(ask(app, f"/v1/{WORD}"), 404, "not_found")
    assert_openais(ask(app, CHAT), 405, "not_found")
    assert_openais(ask(app, content=b"{}"), 415, "unsupported_media_type")
    for body in (f"[{WORD}", f'["{WORD}"]', f'"{WORD}"', "[" * 100_000, "\xff", ""):
        answer = ask(app, content=body.encode("latin-1"), headers=as_json)
        assert_openais(answer, 400, "invalid_json")


def test_a_body_may_have_so_many_bytes_and_no_more() -> None:
    app = gateway(limits={"max_request_bytes": 20})
    as_json = {"Content-Type": "application/json"}

    async def in_pieces(count: int) -> Any:
        for piece in [b"{", *[b" " * 6] * count, b"}"]:
            yield piece

    assert ask(app, content=b"{" + b" " * 18 + b"}", headers=as_json).status_code == 200
    assert_openais(
        ask(app, content=b"{" + b" " * 19 + b"}", headers=as_json), 413, "request_too_large"
    )
    # Without Content-Length: it is counted as it comes.
    assert ask(app, content=in_pieces(3), headers=as_json).status_code == 200
    assert_openais(ask(app, content=in_pieces(4), headers=as_json), 413, "request_too_large")


def test_so_many_at_once_of_a_key_and_of_all_and_places_come_back() -> None:
    async def scenario() -> list[int]:
        go = asyncio.Event()

        async def wait(body: dict[str, Any], salt: str) -> Response:
            await go.wait()
            if body:
                raise ValueError(WORD)
            return JSONResponse({})

        app = gateway(wait, limits={"max_in_flight": 3, "max_in_flight_per_key": 2})
        async with http(app) as one, http(app, OTHER) as two:
            held = [asyncio.create_task(one.post(CHAT, json={})) for _ in range(2)]
            await asyncio.sleep(0.05)
            of_a_key = await one.post(CHAT, json={})
            held.append(asyncio.create_task(two.post(CHAT, json={"fails": 1})))
            await asyncio.sleep(0.05)
            of_all = await two.post(CHAT, json={})
            for answer in (of_a_key, of_all):
                assert_openais(answer, 429, "rate_limit_exceeded")
                assert answer.headers["Retry-After"] == "1"
            # Reading takes no place.
            assert "dpray_requests_in_flight 3.0" in (await one.get("/metrics")).text
            # Nor does a caller who goes away keep one.
            held[0].cancel()
            await asyncio.sleep(0.05)
            held[0] = asyncio.create_task(one.post(CHAT, json={}))
            await asyncio.sleep(0.05)
            go.set()
            codes = [(await each).status_code for each in held]
            assert "dpray_requests_in_flight 0.0" in (await one.get("/metrics")).text
            return [*codes, (await one.post(CHAT, json={})).status_code]

    codes = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert codes == [200, 200, 500, 200]


def test_a_request_may_take_so_long() -> None:
    async def never(body: dict[str, Any], salt: str) -> Response:
        await asyncio.sleep(60)
        raise AssertionError

    app = gateway(never, limits={"request_timeout_seconds": 0.05})
    assert_openais(ask(app, json={}), 504, "timeout")


class EngineDeadError(Exception):
    """Called as vLLM's."""


class Refused(Exception):
    """Shaped as the errors of Ray's LLM ingress."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code, self.message = status_code, message


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackPressureError(num_queued_requests=3, max_queued_requests=3), 503, "overloaded"),
        (ActorDiedError(), 503, "replica_lost"),
        (RayTaskError("embed", WORD, EngineDeadError(WORD)), 503, "replica_lost"),
        (RayTaskError("embed", WORD, ValueError(WORD)), 500, "internal_error"),
        (ValueError(WORD), 500, "internal_error"),
        (Refused(400, f"maximum context length is 8, {WORD}"), 400, "context_length_exceeded"),
        (Refused(400, f"no such role: {WORD}"), 400, "invalid_value"),
        (Refused(500, WORD), 500, "internal_error"),
    ],
)
def test_errors_of_the_models_are_told_without_their_text(
    error: Exception, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(error, RayTaskError):
        error = error.as_instanceof_cause()

    async def fail(body: dict[str, Any], salt: str) -> Response:
        raise error

    app = gateway(fail)
    with caplog.at_level(logging.DEBUG):
        answer = ask(app, json={"messages": WORD})
    assert_openais(answer, status, code)
    assert (answer.headers.get("Retry-After") == "1") == (status == 503)
    assert WORD not in caplog.text
    assert counted(app, CHAT, status) == 1


def test_a_stream_goes_through_piece_by_piece_and_ends_with_the_error_that_broke_it() -> None:
    async def breaks(body: dict[str, Any], salt: str) -> Response:
        async def events() -> Any:
            for number in range(3):
                yield f'data: {{"id": "{number}", "choices": []}}\n\n'
            raise ActorDiedError()

        return StreamingResponse(events(), media_type="text/event-stream")

    app = gateway(breaks)
    answer = ask(app, json={})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert [json.loads(event).get("id") for event in events] == ["0", "1", "2", None]
    assert json.loads(events[-1])["error"]["code"] == "replica_lost"
    assert counted(app, CHAT, 503) == 1

    async def client_sees() -> None:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=KEY, http_client=http(app))
        stream = await client.chat.completions.create(model=MODEL, messages=[], stream=True)
        assert [(await anext(stream)).id for _ in range(3)] == ["0", "1", "2"]
        with pytest.raises(openai.APIError, match="replica was lost"):
            await anext(stream)

    asyncio.run(client_sees())


def test_keys_have_salts_of_their_own_that_no_caller_chooses() -> None:
    app = gateway()
    salts = [ask(app, json={"cache_salt": "x"}, key=key).json()["salt"] for key in (KEY, OTHER)]

    assert len(set(salts)) == 2
    assert ask(app, json={}).json()["salt"] == salts[0]
    assert ask(gateway(), json={}).json()["salt"] != salts[0]


def test_metrics_know_routes_and_statuses_only() -> None:
    app = gateway()
    ask(app, json={"messages": WORD})
    ask(app, f"/v1/{WORD}")
    ask(app, f"/v1/models/{WORD}")
    ask(app, json={}, key=WORD)

    assert counted(app, CHAT, 200) == counted(app, CHAT, 401) == 1
    assert counted(app, "other", 404) == counted(app, "/v1/models/{model}", 404) == 1
    page = ask(app, "/metrics")
    assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert f'dpray_request_seconds_count{{route="{CHAT}"}} 2.0' in page.text
    assert WORD not in page.text


class ByLength:
    """An embedder whose vectors are the texts' lengths; a token a character."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def embed(self, texts: list[str]) -> Any:
        if "broken" in texts:
            raise RuntimeError(WORD)
        self.calls.append(len(texts))
        return np.array([[len(text), 0.1] for text in texts], dtype=np.float32)

    def count_tokens(self, texts: list[str]) -> int:
        return sum(map(len, texts))


def test_requests_are_embedded_together_and_answered_apart() -> None:
    model = ByLength()
    batch = EmbeddingBatch(model)  # type: ignore[arg-type]

    answers = batch.embed([("a", "bb"), ("ccc",)])

    assert model.calls == [3]
    assert [answer.vectors[:, 0].tolist() for answer in answers] == [[1, 2], [3]]
    assert [answer.tokens for answer in answers] == [3, 3]
    for _ in range(3):
        assert batch.healthy
        with pytest.raises(RuntimeError):
            batch.embed([("broken",)])
    assert not batch.healthy
    batch.embed([("a",)])
    assert batch.healthy


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openais_client_reads_the_embeddings(encoding: str | None) -> None:
    batch = EmbeddingBatch(ByLength())  # type: ignore[arg-type]

    async def embeddings(body: dict[str, Any], salt: str) -> Response:
        call = parse_embedding_call(body, MODEL, max_inputs=5)
        assert call.encoding == (encoding or "base64")
        return JSONResponse(embedding_answer(call, batch.embed(call.parts(2)), MODEL))

    async def client_sees(given: str | list[str]) -> Any:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=KEY, http_client=http(gateway(embeddings))
        )
        chosen: Any = {"encoding_format": encoding} if encoding else {}
        return await client.embeddings.create(model=MODEL, input=given, **chosen)

    answer = asyncio.run(client_sees(["a", "bb", "ccc"]))
    vectors = [item.embedding for item in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(v), "<f4").tolist() for v in vectors]
    np.testing.assert_array_equal(np.float32(vectors), np.float32([[1, 0.1], [2, 0.1], [3, 0.1]]))
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.model, answer.object) == (6, MODEL, "list")
    assert len(asyncio.run(client_sees("one")).data) == 1


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"model": WORD}, "model_not_found", "model"),
        ({"model": None}, "model_not_found", "model"),
        ({"input": None}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": [WORD, 3]}, "invalid_value", "input"),
        ({"input": [[1, 2]]}, "invalid_value", "input"),
        ({"input": [WORD] * 6}, "invalid_value", "input"),
        ({"input": {"text": WORD}}, "invalid_value", "input"),
        ({"encoding_format": WORD}, "invalid_value", "encoding_format"),
        ({"encoding_format": []}, "invalid_value", "encoding_format"),
        ({"dimensions": 3}, "invalid_value", "dimensions"),
    ],
)
def test_a_wrong_embedding_request_names_its_key(
    changes: dict[str, Any], code: str, param: str
) -> None:
    async def embeddings(body: dict[str, Any], salt: str) -> Response:
        parse_embedding_call(body, MODEL, max_inputs=5)
        raise AssertionError

    answer = ask(gateway(embeddings), EMBEDDINGS, json={"model": MODEL, "input": WORD} | changes)
    assert_openais(answer, 404 if param == "model" else 400, code)
    assert answer.json()["error"]["param"] == param


def test_nothing_shows_a_text() -> None:
    call = parse_embedding_call({"model": MODEL, "input": WORD}, MODEL, 5)
    assert WORD not in repr(call) + repr(Embedded(np.zeros((1, 2), np.float32), 3))


@pytest.fixture
def tree() -> dict[str, Any]:
    return {
        "engine": {"model": "owner/model", "api_key": "secret", "max_in_flight": 3},
        "embedder": {"model": "sentence-transformers/all-MiniLM-L6-v2"},
        "serve": {"keys": [hashed(KEY)]},
    }


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("serve", {"keys": []}, "serve: keys: give the hash of a key"),
        ("serve", {"keys": [KEY]}, "serve.keys: entry 1 is not"),
        ("serve", {"keys": [hashed(KEY), "sha256:12"]}, "serve.keys: entry 2 is not"),
        ("serve", {"keys": KEY}, "serve.keys: a list"),
        ("serve", {"auth": "none"}, "serve: keys: are not asked for"),
        ("serve", {"auth": "none", "keys": [], "host": "0.0.0.0"}, "serve: host: .* 127.0.0.1"),
        ("serve", {"prot": 3}, "serve.prot: there is no such key"),
        ("serve", {"llm": None, "embedder": None}, "config: serve: nothing to serve"),
        ("serve", {"llm": {"name": "x"}, "embedder": {"name": "x"}}, "config: serve.llm.name"),
        ("serve", {"llm": {"min_replicas": 2}}, "serve.llm: max_replicas"),
        ("serve", {"llm": {"target_ongoing_requests": 99}}, "serve.llm: target_ongoing_requests"),
        ("engine", {"kind": "transformers"}, "config: engine.kind: vllm"),
        ("engine", {"tensor_parallel_size": 2}, "config: serve.llm.gpus_per_replica"),
        ("runtime", {"ray_address": "none"}, "config: runtime.ray_address"),
        ("data", {"path": "x"}, "data: there is no such key"),
    ],
)
def test_a_wrong_file_names_its_key_and_shows_no_key_of_a_caller(
    tree: dict[str, Any], section: str, changes: dict[str, Any], message: str
) -> None:
    tree[section] = tree.get(section, {}) | changes
    with pytest.raises(InputError, match=f"^{message}") as caught:
        parse(ServeFile, tree)
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_either_model_can_be_left_out(tree: dict[str, Any]) -> None:
    both = parse(ServeFile, tree)
    assert (both.llm_name, both.embedder_name) == (
        "owner/model",
        "sentence-transformers/all-MiniLM-L6-v2",
    )
    for section, off in (("engine", "llm"), ("embedder", "embedder")):
        by_section = parse(ServeFile, {k: v for k, v in tree.items() if k != section})
        by_flag = parse(ServeFile, tree | {"serve": tree["serve"] | {off: None}})
        for one in (by_section, by_flag):
            assert [bool(one.llm), bool(one.served_embedder)] == [
                off != "llm",
                off != "embedder",
            ]


def test_a_folder_is_served_under_its_name(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["engine"]["model"] = str(tmp_path)
    assert parse(ServeFile, tree).llm_name == tmp_path.name


def strict(schema: Any, tree: Any, at: str = "") -> None:
    """`schema` accepts `tree`, and every key is one of its: it lets unknown ones pass by itself."""
    loaded = schema.model_validate(tree)
    unknown = set(tree) - set(schema.model_fields)
    assert not unknown, f"{at}: {unknown}"
    for name in tree:
        inner = getattr(loaded, name)
        if hasattr(inner, "model_fields") and isinstance(tree[name], dict):
            strict(type(inner), tree[name], f"{at}.{name}")
        elif isinstance(inner, list) and inner and hasattr(inner[0], "model_fields"):
            for each, value in zip(inner, tree[name], strict=True):
                strict(type(each), value, f"{at}.{name}")


def test_the_file_for_serve_deploy_says_the_same_and_no_secret(tree: dict[str, Any]) -> None:
    file = parse(ServeFile, tree)
    made = serve_config(file)

    strict(ServeDeploySchema, made)
    assert "secret" not in json.dumps(made)
    (application,) = made["applications"]
    again = parse(ServeFile, application["args"])
    assert (again.serve, again.embedder, again.llm_name) == (
        file.serve,
        file.embedder,
        "owner/model",
    )
    with pytest.raises(AssertionError, match="applicatons"):
        strict(ServeDeploySchema, made | {"applicatons": []})
    with pytest.raises(AssertionError, match="http_options"):
        strict(ServeDeploySchema, made | {"http_options": {"hots": "x"}})


def test_the_packaged_files_are_what_the_command_takes_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    gpu = load_serve_config("jobs/serve_gpu.yaml")
    cpu = load_serve_config("jobs/serve_cpu.yaml")
    assert gpu.llm is not None and gpu.llm.gpus_per_replica >= 1 and gpu.serve.auth == "keys"
    assert cpu.llm is not None and cpu.llm.gpus_per_replica == 0 and cpu.serve.auth == "none"
    for replicas in (gpu.llm, gpu.served_embedder):
        assert replicas is not None
        AutoscalingConfig(min_replicas=replicas.min_replicas, max_replicas=replicas.max_replicas)

    serve("jobs/serve_gpu.yaml", dry_run=True)
    written = yaml.safe_load(capsys.readouterr().out)
    strict(ServeDeploySchema, written)
    assert yaml.safe_load((ROOT / "cluster" / "serve.yaml").read_text()) == written
    serve("jobs/serve_gpu.yaml", ["serve.port=8123"], dry_run=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["http_options"]["port"] == 8123


def test_the_command_refuses_a_wrong_file_with_one_line() -> None:
    app = typer.Typer()
    app.command()(serve)
    with pytest.raises(
        InputError, match=r"^serve: host: with auth: none it has to be 127\.0\.0\.1$"
    ):
        typer.main.get_command(app)(
            ["jobs/serve_cpu.yaml", "serve.host=0.0.0.0"], standalone_mode=False
        )

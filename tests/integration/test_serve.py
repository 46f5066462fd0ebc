"""`dpray serve` as an operator starts it: real Ray Serve, real vLLM, real embeddings, two gateways,
and the `openai` client. One start for the whole module; every text sent holds the marker."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from time import monotonic
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest

from dpray.config.sections import EmbedderConfig
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.engines.embedding_endpoint import PUBLIC_TEXTS, EmbeddingEndpoint
from dpray.serving.errors import FRONT_ENVIRONMENT
from tests.integration.endpoints import EMBEDDER, KEY, LLM, OTHER, WORD, Served, chat, start_serve
from tests.integration.floods import flooding, p99, seconds_of_answers, sequences, wrong_biases
from tests.integration.processes import (
    MARKER,
    TIMEOUT,
    Cluster,
    end,
    free_ports,
    ray_cluster,
    short,
    wait_for,
)
from tests.serving.front import hashed
from tests.serving.traffic import traffic

pytestmark = pytest.mark.slow

IN_FLIGHT = 12
RETRIES = TIMEOUT // 8
"""The retries of a client that waits for a replica, eight seconds before each but the first few."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """This file has a cluster to itself, whose Serve gives the first proxy three seconds to start,
    not fifteen, and each one after it three more."""
    variables = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "1"}
    with short() as folder, ray_cluster(folder, **variables) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(
    cluster: Cluster, model_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    model = Path(copytree(model_folder, folder / LLM))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = {
        "engine": {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 16,
            "kv_cache_gib": 0.1,
        },
        "embedder": {"model": EMBEDDER},
        "serve": {
            "port": free_ports(1)[0],
            "keys": [hashed(OTHER), hashed(KEY)],
            "gateways": 2,
            "limits": {"max_request_bytes": 20_000, "max_in_flight_per_key": IN_FLIGHT},
            "embedder": {"max_texts_in_flight": 200},
        },
    }
    process = start_serve(cluster, config, folder)
    try:
        assert process.stdout is not None
        wait_for(lambda: cluster.workers("ProxyActor"), process)
        [first] = cluster.workers("ProxyActor")
        first.suspend()  # it gets no further, so that Ray gives it up for its slow start
        line = process.stdout.readline()
        with suppress(psutil.NoSuchProcess):
            first.kill()
        assert line, (folder / "err").read_text()
        yield Served(process, json.loads(line), cluster)
    finally:
        if process.poll() is None:
            end(process)


def test_the_models_are_listed_and_healthy(served: Served) -> None:
    client = served.client()

    assert [model.id for model in client.models.list()] == [LLM, EMBEDDER]
    assert client.models.retrieve(EMBEDDER).id == EMBEDDER
    assert (served.said["llm"], served.said["embedder"]) == (LLM, EMBEDDER)
    assert served.get("/-/healthz", key=None).text == "success"
    assert len(served.cluster.workers("ServeReplica:dpray:gateway")) == 2


def test_a_proxy_that_ray_killed_for_a_slow_start_has_a_successor(served: Served) -> None:
    controllers = [log for log in served.cluster.logs() if log.name.startswith("controller_")]
    assert any("marking it unhealthy" in log.read_text() for log in controllers)
    wait_for(lambda: len(served.cluster.workers("ProxyActor")) == 1, served.process)


def test_a_wrong_key_is_refused_everywhere(served: Served) -> None:
    for path in ("/v1/models", "/v1/nothing"):
        assert served.get(path, key=hashed(KEY)).status_code == 401
    with pytest.raises(openai.AuthenticationError, match="valid API key"):
        chat(served.client(KEY + "x"))


def test_chat_and_completions_and_their_streams(served: Served) -> None:
    client = served.client()
    whole = chat(client)
    text = whole.choices[0].message.content
    assert (whole.usage.completion_tokens, bool(text)) == (12, True)

    parts = [{"type": "text", "text": f"{WORD} the old bridge "}]
    stream = client.chat.completions.create(
        model=LLM,
        messages=[{"role": "user", "content": parts}],
        max_tokens=12,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == text
    assert len(pieces) > 3

    arguments: dict[str, Any] = {"model": LLM, "prompt": f"{WORD} on", "max_tokens": 9}
    arguments |= {"temperature": 0, "extra_body": {"ignore_eos": True}}
    completed = client.completions.create(**arguments)
    streamed = client.completions.create(**arguments, stream=True)
    assert completed.usage is not None and completed.usage.completion_tokens == 9
    assert "".join(chunk.choices[0].text for chunk in streamed) == completed.choices[0].text


def test_embeddings_are_those_of_the_embedder_in_process(served: Served) -> None:
    client, texts = served.client(), [f"{WORD} number {n} " + "word " * n**2 for n in range(20)]
    expected = SentenceTransformerEmbedder(EMBEDDER).embed(texts)

    answer = client.embeddings.create(model=EMBEDDER, input=texts)
    floats = client.embeddings.create(model=EMBEDDER, input=texts[3], encoding_format="float")

    assert [item.index for item in answer.data] == list(range(20))
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=2e-6)
    np.testing.assert_allclose(floats.data[0].embedding, expected[3], atol=2e-6)
    assert answer.usage.total_tokens > 20 * 4

    keys = {"kind": "openai", "base_url": served.said["base_url"], "api_key": KEY}
    endpoint = EmbeddingEndpoint(EmbedderConfig(**keys, max_in_flight=2))
    endpoint.check(SentenceTransformerEmbedder(EMBEDDER).embed(PUBLIC_TEXTS))
    many = [f"{WORD} {n}" for n in range(150)]
    np.testing.assert_allclose(
        endpoint.embed(many), SentenceTransformerEmbedder(EMBEDDER).embed(many), atol=2e-6
    )


def test_wrong_requests_get_openais_errors_without_their_own_words(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model=WORD, input="x")
    with pytest.raises(openai.BadRequestError) as too_long:
        chat(client, "word " * 400)
    with pytest.raises(openai.APIStatusError) as too_large:
        client.embeddings.create(model=EMBEDDER, input=WORD * 5000)
    assert (too_long.value.code, unknown.value.code) == (
        "context_length_exceeded",
        "model_not_found",
    )
    assert too_large.value.status_code == 413

    image = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1/{WORD}"}}
    bodies: list[tuple[str, Any]] = [
        ("chat/completions", {"messages": [{"role": "user", "content": [image]}]}),
        ("completions", {"prompt": WORD, WORD: WORD, "structured_outputs": {"regex": f"({WORD}"}}),
        # Its context holds 256 tokens, its vocabulary 300 or so.
        ("completions", {"prompt": WORD, "max_tokens": 257}),
        ("completions", {"prompt": WORD, "logit_bias": {"999999": 1}}),
        ("completions", {"prompt": WORD, "stream_options": {"include_usage": True}}),
    ]
    for path, body in bodies:
        answer = served.post(f"/v1/{path}", json={"model": LLM} | body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert WORD not in answer.text
    assert served.post("/v1/completions", content=b"{" + MARKER, headers=JSON).status_code == 400
    assert served.get(f"/v1/{WORD}").status_code == 404


def test_a_gateway_that_is_killed_costs_a_retry_and_no_request(served: Served) -> None:
    def embed(client: openai.OpenAI) -> Callable[[], object]:
        return lambda: client.embeddings.create(model=EMBEDDER, input=WORD)

    client = served.client(OTHER)
    retries = client.with_options(max_retries=openai.DEFAULT_MAX_RETRIES)
    with traffic(embed(retries)) as retried, traffic(embed(client)) as tried:
        wait_for(lambda: len(tried.answered) >= 10)
        served.cluster.workers("ServeReplica:dpray:gateway")[0].kill()
        began = monotonic()
        wait_for(lambda: tried.answered_since(began) >= 30)
    assert retried.failed == []
    assert tried.outage(began) < 5, tried.failed
    assert {status for _, status in tried.failed} <= {"503"}
    wait_for(lambda: len(served.cluster.workers("ServeReplica:dpray:gateway")) == 2)


def test_a_key_that_floods_the_endpoint_does_not_starve_another(served: Served) -> None:
    """Ten times the quiet p99 is the aim; a busy machine gets more. Without
    fair places the good key waits for minutes, and with them for two answers."""
    client = served.client(OTHER)
    seconds_of_answers(lambda: chat(client), 0, fewest=10)
    limit = 30 * p99(seconds_of_answers(lambda: chat(client), 1, fewest=20))
    floods = [
        (sequences(LLM, prompts=8, n=16, tokens=200), {400}),
        (sequences(LLM, prompts=1, n=4, tokens=200), {200}),
        (wrong_biases(LLM, 1200), {400}),
    ]
    for body, expected in floods:
        url = served.said["base_url"]
        with flooding(url, KEY, body, at_once=IN_FLIGHT) as answered:
            took = seconds_of_answers(lambda: chat(client), 1, fewest=10)
            # On a busy machine the flood's own answers are still on their way. A gateway that a
            # request has just left may refuse the next one.
            wait_for(lambda: set(answered()) - {429})
        assert set(answered()) - {429} == expected
        assert max(took) < limit


def test_serves_own_proxy_has_a_successor_and_says_when_to_come_again(served: Served) -> None:
    """Clients that find no proxy try again; what the new one cannot answer yet is a 503."""
    client = served.client(OTHER, retries=RETRIES)
    [proxy] = served.cluster.workers("ProxyActor")
    assert FRONT_ENVIRONMENT.items() <= proxy.environ().items()
    proxy.kill()
    assert client.embeddings.create(model=EMBEDDER, input=WORD).data
    [successor] = served.cluster.workers("ProxyActor")
    assert FRONT_ENVIRONMENT.items() <= successor.environ().items()


@pytest.mark.parametrize(
    "names", [("embedder",), pytest.param(("embedder", "llm"), marks=pytest.mark.chaos)], ids=str
)
def test_lost_replicas_cost_a_retry_and_no_request(served: Served, names: tuple[str, ...]) -> None:
    """The only replica of a model is killed while both are in use. vLLM takes a minute to start
    anew, so that it is killed by `make chaos` alone."""
    embedder = SentenceTransformerEmbedder(EMBEDDER)
    expected = embedder.embed([f"{WORD} {n}" for n in range(20)])
    client = served.client(retries=RETRIES)
    text = chat(client, tokens=40).choices[0].message.content
    done: list[str] = []

    def embeds(n: int) -> None:
        answer = client.embeddings.create(model=EMBEDDER, input=f"{WORD} {n % 20}")
        np.testing.assert_allclose(answer.data[0].embedding, expected[n % 20], atol=2e-6)
        done.append("embedding")

    def chats(_: int) -> None:
        assert chat(client, tokens=40).choices[0].message.content == text
        done.append("chat")

    before = {name: replicas(served, name) for name in names}
    assert [len(pids) for pids in before.values()] == [1] * len(names)
    with ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(each, n) for n in range(60) for each in (embeds, chats)]
        wait_for(lambda: len(done) >= 10)
        for name in names:
            served.cluster.workers(f"ServeReplica:dpray:{name}")[0].kill()
        for task in tasks:
            task.result(timeout=TIMEOUT)
    assert len(done) == 120
    for name, pids in before.items():
        assert (after := replicas(served, name)) and after.isdisjoint(pids)


def replicas(served: Served, name: str) -> set[int]:
    return {each.pid for each in served.cluster.workers(f"ServeReplica:dpray:{name}")}


def test_it_ends_when_told_to_and_nothing_sent_was_logged(served: Served) -> None:
    served.process.send_signal(signal.SIGTERM)
    out, _ = served.process.communicate(timeout=TIMEOUT)

    assert served.process.returncode == 0
    assert served.cluster.workers("ServeReplica") == served.cluster.workers("ProxyActor") == []
    with pytest.raises(httpx.ConnectError):
        served.get("/v1/models")
    logs = served.cluster.logs()
    assert any("serve" in path.parts for path in logs)
    for path in logs:
        content = path.read_bytes()
        for secret in (MARKER, KEY.encode(), OTHER.encode()):
            assert secret not in content, path.name
    assert WORD not in out

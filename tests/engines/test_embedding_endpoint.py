"""Public texts embedded over HTTP; which texts get there is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpray.config.sections import EmbedderConfig
from dpray.engines.embedding_endpoint import PUBLIC_TEXTS, TEXTS_A_CALL, EmbeddingEndpoint
from dpray.methods import registry as methods
from dpray.methods.aug_pe import release
from dpray.methods.config import parse_config
from dpray.methods.dp_kps.algorithm import Sequences
from dpray.types import InputError, Resumable
from dpray.workers import shards
from tests.engines.api_server import Server, running_server
from tests.engines.bag_of_words import BagOfWords
from tests.engines.kept import Kept

Settings = Callable[..., dict[str, Any]]
WORDS = ["fever", "cough", "rash", "itch", "sleep", "chest pain"]


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as server:
        server.embed = BagOfWords("m").embed
        yield server


@pytest.fixture
def served(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The section `embedder`; the actors' own model gives the same vectors."""
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    return {"kind": "openai", "base_url": server.url, "attempts": 1, "max_in_flight": 2}


def endpoint(served: dict[str, object], **more: object) -> EmbeddingEndpoint:
    return EmbeddingEndpoint(EmbedderConfig(**served | more))  # type: ignore[arg-type]


def texts_sent(server: Server) -> list[str]:
    return [text for _, body in server.requests for text in body.get("input", ())]


def test_vectors_keep_the_order_and_blank_texts_have_none(
    server: Server, served: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's key goes along that is not the embedder's."""
    for name, value in {"API_KEY": "sk-x", "ORG_ID": "me", "CUSTOM_HEADERS": "x-mine: 1"}.items():
        monkeypatch.setenv(f"OPENAI_{name}", value)
    texts = [f"word{i} and {i}" for i in range(2 * TEXTS_A_CALL + 3)]
    texts[7] = " \n"
    found_ND = endpoint(served, served_name="of the endpoint").embed(texts)
    expected_ND = BagOfWords("m").embed(texts)
    expected_ND[7] = 0
    np.testing.assert_allclose(found_ND, expected_ND, atol=1e-6)
    assert found_ND.dtype == np.float32 and len(server.requests) == 3
    assert server.headers["authorization"] == "Bearer none"
    assert not {"openai-organization", "x-mine"} & server.headers.keys()
    assert server.most_in_flight <= 2 and " \n" not in texts_sent(server)
    path, body = server.requests[0]
    assert path == "/v1/embeddings" and body["model"] == "of the endpoint"
    assert endpoint(served).embed([]).shape == endpoint(served).embed([" "])[:0].shape == (0, 64)


ONE = {"index": 0, "embedding": [1.0, 0.0], "object": "x"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (401, "401.*embedder.api_key"),
        (404, "embedder.model"),
        ("[]", "no list of vectors"),
        ('{"data": [{"index": 0, "embedding": ["x"]}]}', "no list of vectors"),
        (json.dumps({"data": [ONE, ONE]}), "not one vector"),
        (json.dumps({"data": [ONE]}), "not one vector"),
        ('{"data": [{"index": 0, "embedding": [NaN]}, {"index": 1, "embedding": [1]}, '
         '{"index": 2, "embedding": [1]}]}', "not finite"),
        ("not json", "."),
    ],
)  # fmt: skip
def test_a_bad_answer_is_refused_before_the_charge_and_resumed_after_it(
    server: Server, served: dict[str, object], fault: int | str, words: str
) -> None:
    server.faults = [fault, fault]
    with pytest.raises(InputError, match=f"^embedder: .*{words}") as before:
        endpoint(served).check()
    with pytest.raises(Resumable, match=f"^embedder: .*{words}") as after:
        endpoint(served).embed([])
    assert "Marlowe" not in f"{before.value}{after.value}"


def test_a_server_that_changes_its_model_costs_no_vote(
    server: Server, served: dict[str, object]
) -> None:
    """Vectors of another length, or of other texts, end the run for now, before a mechanism."""
    like_ND = BagOfWords("m").embed(PUBLIC_TEXTS)
    assert endpoint(served).embed(["a word"], like_ND).shape == (1, 64)
    for other in (lambda texts: np.ones((len(texts), 7)), lambda texts: np.eye(len(texts), 64)):
        server.embed = other
        with pytest.raises(Resumable, match="another vector"):
            endpoint(served).embed(["a word"], like_ND)


def test_a_busy_endpoint_is_asked_later(server: Server, served: dict[str, object]) -> None:
    server.faults = [429, 500]
    for _ in range(2):
        with pytest.raises(Resumable, match=r"^embedder: .*; try again later$"):
            endpoint(served).check()


def test_vectors_of_several_lengths_are_refused(server: Server, served: dict[str, object]) -> None:
    server.embed = lambda texts: np.ones((len(texts), len(texts)))
    with pytest.raises(Resumable, match="another vector"):
        endpoint(served).embed(["a word"] * (TEXTS_A_CALL + 1))


def aug_pe(settings: Settings, served: dict[str, object]) -> Any:
    method = {
        "name": "aug_pe", "records": 7, "iterations": 2, "variations": 2, "max_tokens": 8,
        "word_var": None,
    }  # fmt: skip
    return parse_config(settings(method=method, embedder=served))


def test_aug_pe_sends_its_populations_and_no_record(
    settings: Settings,
    server: Server,
    served: dict[str, object],
    transformers_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = aug_pe(settings, served | {"api_key": "sk-hunter3"})
    seen, reported = [], release.report

    def report_of(session: Any, done: Any) -> Any:
        seen.append(done)
        return reported(session, done)

    monkeypatch.setattr(release, "report", report_of)
    report = methods.run(
        config, lambda progress: None, build=lambda section: Kept(transformers_engine)
    )
    voted = [text for vote in seen[-1] for some in vote.population.values() for text in some]
    assert len(voted) >= 2 * 7
    sent = [text for text in texts_sent(server) if text not in PUBLIC_TEXTS]
    assert sorted(sent) == sorted(text for text in voted if text.strip())
    assert not any("Marlowe" in text for text in sent)
    assert report["public_inputs"]["embedder"].endswith(", at an endpoint")
    made = (Path(config.output.path) / "run.json").read_text()
    assert server.url not in made and "sk-hunter3" not in made
    moved = served | {"base_url": "http://moved.example/v1", "served_name": "m"}
    assert methods.run(aug_pe(settings, moved), lambda progress: None) == report
    with pytest.raises(InputError, match=r"output\.path: .*embedder\.model"):
        methods.run(aug_pe(settings, served | {"model": "other"}), lambda progress: None)


def test_an_endpoint_with_another_model_costs_nothing(
    settings: Settings,
    server: Server,
    served: dict[str, object],
    transformers_engine: Any,
    tmp_path: Path,
) -> None:
    server.embed = lambda texts: np.roll(BagOfWords("m").embed(texts), 1, axis=1)
    config = aug_pe(settings, served)
    with pytest.raises(InputError, match=r"^embedder: .* another vector .*; nothing was charged$"):
        methods.run(config, lambda progress: None, build=lambda section: Kept(transformers_engine))
    assert not [*tmp_path.glob("ledger.db*")], "a charge was written"


def cut_off(*_: object) -> None:
    raise KeyboardInterrupt


def test_dp_kps_sends_its_released_terms_and_no_record(
    settings: Settings,
    server: Server,
    served: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And goes on with no other model: sequences would be drawn at other places."""
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("\n".join([*WORDS, "Marlowe"]))
    method = {
        "name": "dp_kps", "vocabulary": str(vocabulary), "estimator": "rff", "records": 4,
        "vocabulary_size": 5, "sequence_length": 2, "features": 16,
    }  # fmt: skip
    config = parse_config(settings(method=method, engine={"kind": "none"}, embedder=served))
    draw, model = Sequences.draw, server.embed
    monkeypatch.setattr(Sequences, "draw", cut_off)
    with pytest.raises(Resumable):
        methods.run(config, lambda progress: None)
    server.embed = lambda texts: np.roll(BagOfWords("m").embed(texts), 1, axis=1)
    with pytest.raises(Resumable, match=r"embedder\.model: .* another vector"):
        methods.run(config, lambda progress: None)
    server.embed = model
    monkeypatch.setattr(Sequences, "draw", draw)
    server.requests.clear()
    methods.run(config, lambda progress: None)
    sent = [text for text in texts_sent(server) if text not in PUBLIC_TEXTS]
    # The five terms that the noisy counts chose among the public ones.
    assert set(sent) < {*WORDS, "Marlowe"} and len(sent) == 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "https://embed.example/v1"}, "embedder.model: a URL; private texts go to no"),
        ({"kind": "openai"}, "^embedder.base_url: embedder.kind openai needs"),
        ({"base_url": "http://embed.example/v1"}, "^embedder.kind: .* PUBLIC texts"),
        ({"kind": "openai", "base_url": "http://a:b@embed.example/v1"}, "embedder.base_url: "),
        ({"kind": "openai", "base_url": "embed.example"}, "embedder.base_url: no URL"),
    ],
)
def test_keys_that_would_send_private_texts_are_refused(
    settings: Settings, keys: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        parse_config(settings(embedder=keys))

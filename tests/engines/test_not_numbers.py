"""A private row that is no number, in vLLM: nothing that it may have reached is sampled.

Attention multiplies what it leaves out by 0, and 0 times NaN is NaN. So a record of one batch would
move rows of other batches, by keys and values in vLLM's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, SelectorFailed, SelectorSpec, may_be_repeated
from tests.engines.tiny_model import make_model

pytestmark = pytest.mark.slow

HOT = 300
"""The embedding of this token is no number."""

FRAME = tuple(range(100, 170))
"""All prompts begin with it. It is more than two blocks of the cache."""


@pytest.fixture(scope="session")
def hot_engine(vllm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from dpray.engines.vllm import VllmEngine

    folder = make_model(tmp_path_factory.mktemp("hot"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][HOT] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = VllmEngine(
        EngineConfig(model=str(folder), max_num_seqs=16, kv_cache_gib=0.001), private_rows=True
    )
    yield engine
    engine.close()


def group(name: str, *prompts: tuple[int, ...], tokens: int = 4) -> LockstepGroup:
    spec = SelectorSpec("dpray.engines.row_variation:RowProbe", {"token": 77})
    return LockstepGroup(name, prompts, FRAME, spec, tokens)


def rows(number: int) -> list[tuple[int, ...]]:
    return [(*FRAME, *range(200 + row, 212 + row)) for row in range(number)]


@pytest.mark.parametrize("number", [2, 12], ids=["whole", "in parts"])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_batch_with_a_row_that_is_no_number_fails_and_is_not_repeated(
    hot_engine: Any, monkeypatch: pytest.MonkeyPatch, number: int, max_tokens: int
) -> None:
    step, steps = hot_engine.step, []

    def counted() -> Any:
        steps.append(1)
        return step()

    monkeypatch.setattr(hot_engine, "step", counted)
    hot_engine.llm.reset_prefix_cache()
    assert (hot_engine.rows_at_once(len(FRAME) + 16) < number + 1) is (number == 12)
    bad = (*FRAME, *range(400, 410), HOT)
    with pytest.raises(SelectorFailed, match="no numbers") as raised:
        list(hot_engine.decode_lockstep([group("a", bad, *rows(number - 1), tokens=max_tokens)]))
    assert not may_be_repeated(raised.value), "a record would choose which draws are published"
    assert len(steps) == 1 or number == 12, "at once"


@pytest.mark.parametrize("number", [2, 12], ids=["whole", "in parts"])
def test_a_batch_that_gets_the_memory_of_such_a_row_fails_too(hot_engine: Any, number: int) -> None:
    """Its own rows are numbers; what they do not look at in a block of the cache is not."""
    clean = group("b", *rows(number))
    worker = hot_engine.llm.llm_engine.model_executor.driver_worker.worker
    for value in (0.0, torch.nan):
        hot_engine.llm.reset_prefix_cache()
        for cache in worker.model_runner.kv_caches:
            cache.fill_(value)
        if value == 0.0:
            [result] = hot_engine.decode_lockstep([clean])
            assert len(result.token_ids) == 4
        else:
            with pytest.raises(SelectorFailed, match="no numbers"):
                list(hot_engine.decode_lockstep([clean]))

"""Rows that are not finite, in both engines: each counts for nothing and reaches no other row.

Attention multiplies what it leaves out by 0, and 0 times NaN is NaN. So in vLLM's cache a record of
one batch could move rows of other batches.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, SelectorSpec
from dpray.engines.transformers import TransformersEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.logits import Clip
from dpray.methods.private_prediction.mechanism import PrivateToken
from tests.engines.tiny_model import make_model, make_tokenizer

NAN, INFINITE, HALF = 300, 301, 256
"""The first values of NAN are infinite, and what follows is no number. After INFINITE, the logit of
the token HALF is +inf; rows are finite again after the next token."""

FRAME = tuple(range(100, 170))
"""All prompts begin with it. It is more than two blocks of vLLM's cache."""

SCRIPT = [77, 78, 79, 80]
ROUNDING = 2e-3

HOSTILE = {
    "NaN last": (*FRAME, *range(400, 410), NAN),
    "NaN at the beginning": (NAN, *FRAME[1:], *range(400, 410)),
    "NaN first after the frame": (*FRAME, NAN, *range(400, 440)),
    "infinite once": (*FRAME, *range(400, 410), INFINITE),
}


def hostile_model(folder: Path) -> Path:
    make_model(folder)
    weights = load_file(folder / "model.safetensors")
    # Number 0 of every token is 0, but for INFINITE, and number 1, but for NAN. The weights
    # themselves are finite: others are refused.
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings[:, :2] = head[:, :2] = 0
    embeddings[[INFINITE, NAN]] = torch.eye(2, embeddings.shape[1]) * 100
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:2] = 0
    head[HALF, 0] = 1e38
    weights["model.layers.0.self_attn.v_proj.weight"][:, 1] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(hostile_model(tmp_path_factory.mktemp("hostile")))


def engine_of(kind: str, folder: str) -> Any:
    """Make an engine that holds 6 or 7 rows of a prompt and some tokens, at 1 KiB a token."""
    config = EngineConfig(kind=kind, model=folder, max_num_seqs=16, kv_cache_gib=0.0008)  # type: ignore[arg-type]
    if kind == "transformers":
        return TransformersEngine(config, device="cpu")
    from dpray.engines.vllm.engine import VllmEngine

    return VllmEngine(config, private_rows=True)


@pytest.fixture(
    scope="session", params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)]
)
def hostile_engine(
    request: pytest.FixtureRequest, at_the_end: ExitStack, hostile_folder: str
) -> Any:
    if request.param == "vllm":
        request.getfixturevalue("vllm_installed")
    engine = engine_of(request.param, hostile_folder)
    at_the_end.callback(engine.close)
    return engine


def clean_rows(number: int) -> list[tuple[int, ...]]:
    return [(*FRAME, *range(200 + row, 212 + 3 * row)) for row in range(number)]


def sums(engine: Any, *prompts: tuple[int, ...], script: list[int] = SCRIPT) -> np.ndarray:
    """Return what draws are made from: shape (position, sum, token)."""
    spec = SelectorSpec("tests.engines.token_selectors:Sums", {"script": script})
    group = LockstepGroup("a", prompts, FRAME, spec, len(script))
    [result] = engine.decode_lockstep([group])
    assert list(result.token_ids) == script
    found = np.array(result.state["sums"])
    assert np.isfinite(found).all()
    return found


@pytest.mark.parametrize(
    ("kind", "number"),
    [*((kind, 2) for kind in HOSTILE), ("NaN first after the frame", 10), ("infinite once", 10)],
)
def test_a_row_that_is_not_finite_adds_nothing_and_its_batch_goes_on(
    hostile_engine: Any, kind: str, number: int
) -> None:
    hostile, clean = HOSTILE[kind], clean_rows(number)
    assert (hostile_engine.rows_at_once(len(hostile) + 4) < number + 2) is (number == 10)
    without = sums(hostile_engine, *clean)
    for _ in range(2):  # the second time from the prefix cache
        for prompts in ([*clean, hostile], [hostile, *clean], [*clean, hostile, hostile]):
            assert np.abs(sums(hostile_engine, *prompts) - without).max() < ROUNDING
    # Nothing of it is left in the memory that other rows get.
    assert np.abs(sums(hostile_engine, *clean) - without).max() < ROUNDING
    others = [(9, *row) for row in clean]
    assert np.isfinite(sums(hostile_engine, *others)).all()


def test_rows_that_are_all_hostile_are_an_empty_batch(hostile_engine: Any) -> None:
    assert not sums(hostile_engine, *HOSTILE.values()).any()


def draws(engine: Any, *prompts: tuple[int, ...], texts: int, **changes: Any) -> list[Any]:
    """Return the texts of batches of these rows."""
    mechanism = PrivateToken(
        **{
            "batch_size": 20, "private_tokens": 10**6, "clip": "recentred", "clip_bound": 10.0,
            "temperature": 2.0, "public_temperature": 1.0,
        }
        | changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return list(
        engine.decode_lockstep(
            LockstepGroup(str(number), prompts, FRAME, mechanism.selector(new_key()), 3)
            for number in range(texts)
        )
    )


@pytest.mark.parametrize("number", [2, 10], ids=["whole", "in parts"])
def test_an_infinite_logit_decides_nothing(hostile_engine: Any, number: int) -> None:
    """One infinity was not forced, but the lower of it and the token that was drawn: batches were
    repeated until they drew a low one."""
    found = draws(hostile_engine, *clean_rows(number), HOSTILE["infinite once"], texts=30)
    assert len(found) == 30
    high = sum(text.token_ids[0] > HALF for text in found)
    assert 2 < high < 28, "with a chance of 1e-7"


@pytest.mark.parametrize("clip", get_args(Clip))
def test_a_token_at_which_the_model_overflows_ends_no_text(hostile_engine: Any, clip: str) -> None:
    """All rows read it, the public one as well. A failure would depend on what was drawn."""
    zeros = sums(hostile_engine, *clean_rows(2), script=[77, NAN, 78, 79])[2:]
    assert not zeros.any()
    public = (*FRAME, NAN)
    mechanism = PrivateToken(20, 100, clip, 2.0, 1.0, 1.0)  # type: ignore[arg-type]
    groups = (
        LockstepGroup(str(number), (), public, mechanism.selector(new_key()), 3)
        for number in range(8)
    )
    assert len(list(hostile_engine.decode_lockstep(groups))) == 8


@pytest.mark.slow
def test_rows_get_cleared_blocks_of_vllms_cache(
    vllm_installed: None, at_the_end: ExitStack, tmp_path: Path
) -> None:
    """What rows do not look at in a block of the cache may be left from any other row. vLLM's own
    function for CPUs clears no layer with a sliding window."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        sliding_window=40, initializer_range=0.15, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer(512).save_pretrained(tmp_path)
    engine = engine_of("vllm", str(tmp_path))
    at_the_end.callback(engine.close)
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    for number in (2, 10):
        found = []
        for value in (0.0, torch.nan):
            engine.llm.reset_prefix_cache()
            for cache in worker.model_runner.kv_caches:
                cache.fill_(value)
            found.append(sums(engine, *clean_rows(number)))
        assert np.abs(found[0] - found[1]).max() == 0

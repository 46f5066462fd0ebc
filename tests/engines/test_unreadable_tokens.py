"""Tokens that a model can write and not read: no prompt holds one, and no text draws one."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Gemma3nForCausalLM, Gemma3nTextConfig

from dpray.config.sections import EngineConfig
from dpray.engines.base import Completion, LockstepGroup, Prompt, Sampling
from dpray.engines.schema.schema import Form, Schema
from dpray.engines.transformers import TransformersEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.mechanism import PrivateToken
from tests.engines.tiny_model import make_model, make_tokenizer

ROWS = 320
"""The tokens of the model, 320 of the 384 of the tokenizer that its logits are for."""


def gemma(folder: Path) -> str:
    """Make a model that cannot read the last 64 of its 384 tokens."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=384, vocab_size_per_layer_input=ROWS, hidden_size=32,
        hidden_size_per_layer_input=8, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
        sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0, laurel_rank=4, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0, 0.0], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Gemma3nForCausalLM(config).save_pretrained(folder)
    return str(folder)


def llama(folder: Path) -> str:
    """Make a model that reads all 384 tokens, and says that it does not: vLLM's Gemma needs a
    GPU."""
    make_model(folder, vocabulary=384)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size_per_layer_input": ROWS}))
    return str(folder)


def name_tokens(folder: str) -> None:
    """Write a tokenizer with two tokens more than the model has logits for."""
    tokenizer = make_tokenizer(384)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["[MORE]"])
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("[PAD]") == 384


@pytest.fixture(
    scope="session", params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)]
)
def few_read(
    request: pytest.FixtureRequest,
    at_the_end: ExitStack,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    folder = tmp_path_factory.mktemp("few")
    if request.param == "transformers":
        name_tokens(gemma(folder))
        engine: Any = TransformersEngine(EngineConfig(model=str(folder)), device="cpu")
    else:
        request.getfixturevalue("vllm_installed")
        from dpray.engines.vllm.engine import VllmEngine

        name_tokens(llama(folder))
        config = EngineConfig(model=str(folder), max_num_seqs=16, kv_cache_gib=0.01)
        engine = VllmEngine(config, private_rows=True)
    engine.folder = str(folder)
    at_the_end.callback(engine.close)
    return engine


NAMING = "the [PAD] patient </s> came [MORE] with\ud800 a \0 cough"
WAYS: dict[str, dict[str, Any]] = {
    "recentred": {"clip": "recentred", "clip_bound": 1.0},
    "dclip": {"clip": "dclip", "clip_bound": 1.0},
    "top k": {"clip": "dclip", "clip_bound": 1.0, "candidates": "top_k_plus", "k": 380},
    "gate": {"clip": "dclip", "clip_bound": 1.0, "sure_probability": 1e-9},
    "sparse vector": {"clip": "recentred", "clip_bound": 1.0, "threshold": 0.9, "noise": 0.1},
    "schema": {"clip": "recentred", "clip_bound": 1.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_text_draws_a_token_that_the_model_cannot_read(few_read: Any, way: str) -> None:
    """At a temperature of 100, one of 6 tokens drawn would be such a token."""
    mechanism = PrivateToken(
        batch_size=4, private_tokens=10**6, temperature=100.0, public_temperature=100.0, **WAYS[way]
    )
    form = None
    if way == "schema":
        form = Form(Schema("regex", ".*"), few_read.folder).mask_arguments(24)
    private = [few_read.encode(Prompt(text, "x")) for text in ("the old bridge", NAMING, "")]
    public = few_read.encode(Prompt("a text", "x"))
    groups = [
        LockstepGroup(str(n), tuple(private), public, mechanism.selector(new_key(), form=form), 24)
        for n in range(3)
    ]
    texts = list(few_read.decode_lockstep(groups))
    assert len(texts) == 3
    drawn = [token for text in texts for token in text.token_ids]
    assert len(drawn) > 20 and max(drawn) < ROWS


@pytest.mark.parametrize("schema", [None, Schema("regex", ".*")])
def test_no_generated_text_has_such_a_token(
    few_read: Any, monkeypatch: pytest.MonkeyPatch, schema: Schema | None
) -> None:
    sampling, completion, written = Sampling(24, 2.0, schema=schema), few_read.completion, []

    def keeping(prompt: tuple[int, ...], ids: list[int], sampling: Sampling) -> Completion:
        written.extend(ids)
        found: Completion = completion(prompt, ids, sampling)
        return found

    monkeypatch.setattr(few_read, "completion", keeping)
    assert len(few_read.generate([Prompt(NAMING, "x")] * 8, [sampling] * 8)) == 8
    assert len(written) > 20 and max(written) < ROWS

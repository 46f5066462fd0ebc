"""Random embedders of real architectures, with a tokenizer trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import (
    BertConfig,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    LlamaConfig,
    LlamaModel,
    NomicBertConfig,
    NomicBertModel,
)

from tests.engines.tiny_model import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}
ROPE = {"rope_theta": 100.0, "factor": 4.0}


def bert() -> Any:
    return BertModel(BertConfig(**SIZES, max_position_embeddings=128))


def big_bird() -> Any:
    """Return a model that computes full attention from the first text of up to 88 tokens on."""
    config = BigBirdConfig(
        **SIZES, max_position_embeddings=256, block_size=8, num_random_blocks=3, use_cache=False
    )
    return BigBirdModel(config)


def llama(rope_type: str = "dynamic") -> Any:
    longrope = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = ROPE | {"rope_type": rope_type, "original_max_position_embeddings": 64}
    rope |= longrope if rope_type == "longrope" else {}
    most = 256 if rope_type == "longrope" else 64
    return LlamaModel(LlamaConfig(**SIZES, max_position_embeddings=most, rope_parameters=rope))


def nomic() -> Any:
    rope = ROPE | {"rope_type": "dynamic"}
    return NomicBertModel(
        NomicBertConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope)
    )


def make_embedder(folder: Path, model: Any, longest: int = 128) -> Path:
    """Write the model, with mean pooling and a context of `longest` tokens, into `folder`."""
    parts = folder.with_name(f"{folder.name}-parts")
    model.save_pretrained(parts)
    make_tokenizer(512).save_pretrained(parts)
    transformer = Transformer(str(parts), max_seq_length=longest)
    pooling = Pooling(transformer.get_embedding_dimension())
    SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(folder))
    # Published embedders have this key; without it a model reads no more than its positions.
    settings = folder / "sentence_bert_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_seq_length": longest}))
    return folder


def random_weights(make: Any) -> Any:
    torch.manual_seed(0)
    return make().eval()

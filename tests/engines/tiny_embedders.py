"""Random embedders of real architectures, with a tokenizer trained on the spot."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import (
    AddedToken,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
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
INFINITE, BEYOND, WORD_BEYOND = "\a", "[PAD]", "Zürich!!"
"""Texts whose tokens have infinite embeddings, or none, in `make_hostile`."""

ROPE = {"rope_theta": 100.0, "factor": 4.0}


def bert(rows: int = 512) -> Any:
    return BertModel(BertConfig(**SIZES | {"vocab_size": rows}, max_position_embeddings=128))


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


def make_clip(folder: Path) -> Path:
    """Write an embedder of texts and pictures, to which a text may be the name of a picture."""
    text = SIZES | {"max_position_embeddings": 64, "eos_token_id": 2}
    vision = {**SIZES, "image_size": 224, "patch_size": 112}
    parts = folder.with_name(f"{folder.name}-parts")
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(parts)
    CLIPProcessor(CLIPImageProcessorPil(), make_tokenizer(512)).save_pretrained(parts)
    SentenceTransformer(modules=[Transformer(str(parts))], device="cpu").save(str(folder))
    return folder


def make_hostile(folder: Path) -> Path:
    """Write a BERT for which one token is infinite, and two tokens, one of them special, are beyond
    the embedding."""
    tokenizer = make_tokenizer(512)
    make_embedder(folder, random_weights(partial(bert, len(tokenizer))))
    add_tokens(folder)
    (infinite,) = tokenizer(INFINITE)["input_ids"]
    weights = load_file(folder / "model.safetensors")
    # Its sum is infinite. Weights that are not finite themselves are refused.
    weights["embeddings.word_embeddings.weight"][infinite] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def add_tokens(folder: Path) -> None:
    """Give the tokenizer in the folder two tokens more, whose names are `BEYOND`, a special token,
    and `WORD_BEYOND`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(BEYOND, special=True)], special_tokens=True)
    tokenizer.add_tokens([WORD_BEYOND])
    tokenizer.save_pretrained(folder)

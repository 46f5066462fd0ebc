"""A random model with the shape of Llama and a tokenizer trained on the spot."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = (
    "the patient came with a cough and fever after two weeks of travel; market shares fell on "
    "Monday while engineers repaired the old bridge near Zürich, naïve café owners said 12:30 "
)
WORDS = TEXT.split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    tokenizer.train_from_iterator((sentence(rng, 30) for _ in range(300)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_model(
    folder: Path,
    *,
    vocabulary: int = 512,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 2,
    heads: int = 2,
    key_value_heads: int | None = None,
    context: int = 256,
    spread: float = 0.15,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the model and its tokenizer into `folder`. The weights' `spread` is wide enough for the
    next-token distribution to depend on the prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or heads,
        max_position_embeddings=context,
        initializer_range=spread,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    make_tokenizer(min(vocabulary, 512)).save_pretrained(folder)
    return folder

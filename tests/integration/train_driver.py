"""Fine-tunes on two ranks of Ray Train.

Every unit is in every batch and there is almost no noise, so that the outcome is known.
"""

from __future__ import annotations

import os
from functools import partial

from transformers import AutoTokenizer

from dpray.ledger.ledger import NullLedger
from dpray.methods.dp_sgd.algorithm import DpSgd, TextEncoder, Units
from dpray.methods.dp_sgd.training.journal import Journal
from dpray.methods.dp_sgd.training.ranks import Training, train_on_ray
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, Trainer


def plan() -> DpSgd:
    step = DpSgdStep(
        sampling_probability=1.0, noise_multiplier=1e-9, clip_norm=1.0, expected_batch_size=5.0
    )
    settings = TrainingSettings(
        lora_rank=4, micro_batch_size=2, learning_rate=1.0, optimizer="sgd", zero_stage=2
    )
    return DpSgd(step, 2, settings)


def units(model: str) -> Units:
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = TextEncoder(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        start=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        max_length=32,
    )
    return [
        [encoder.training_text("Kind: note\n", f"cough and fever, Marlowe {n}")] for n in range(5)
    ]


def read(model: str, trainer: Trainer) -> Units:
    """Run on a rank. Without GPUs it is shown none, though its machine may have some."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return units(model)


def fine_tune_on_ray(model: str, out: str, scratch: str) -> None:
    checkpoints = f"{scratch}/checkpoints"
    training = Training(
        method=plan(),
        read=partial(read, model),
        base=model,
        base_name=model,
        folder=out,
        journal=Journal(NullLedger(), "run", "attempt", checkpoints, steps=2, block_size=2),
    )
    train_on_ray(training, workers=2, scratch=scratch, cpus_per_worker=1)

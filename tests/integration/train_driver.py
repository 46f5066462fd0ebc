"""A driver: `python train_driver.py MODEL OUT SCRATCH` fine-tunes on two ranks of Ray Train.

Every unit is in every batch and there is almost no noise, so that the outcome is known.
"""

from __future__ import annotations

import os
import sys

from transformers import AutoTokenizer

from dpray.methods.dp_sgd.algorithm import DpSgd, TextEncoder, Units, control_code
from dpray.runs.cluster import start_ray
from dpray.training.gradient_noise import DpSgdStep
from dpray.training.model import Tuning
from dpray.training.ray_train import Training, train_on_ray


def plan() -> DpSgd:
    step = DpSgdStep(
        sampling_probability=1.0, noise_multiplier=1e-9, clip_norm=1.0, expected_batch_size=5.0
    )
    return DpSgd(step, steps=2, micro_batch_size=2, learning_rate=1.0, optimizer="sgd")


def units(model: str) -> Units:
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = TextEncoder(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        eos=tokenizer.eos_token_id,
        bos=tokenizer.bos_token_id,
        max_length=32,
    )
    code = control_code({"Kind": "note"})
    return [[encoder.training_text(code, f"cough and fever, Marlowe {n}")] for n in range(5)]


def units_of_a_rank(model: str) -> Units:
    """Without GPUs a rank is shown none, though its machine may have some."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return units(model)


def main(model: str, out: str, scratch: str) -> None:
    start_ray(None)
    training = Training(
        plan=plan(),
        tuning=Tuning(model, "lora", lora_rank=4),
        zero_stage=2,
        load_units=lambda: units_of_a_rank(model),
        folder=out,
    )
    train_on_ray(training, workers=2, scratch=scratch, cpus_per_worker=1)


if __name__ == "__main__":
    main(*sys.argv[1:])

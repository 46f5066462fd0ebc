"""Bits a byte that SmolLM2-135M needs for test texts, by the steps and learning rate of DP-SGD.

`python experiments/learning_rates.py SET:TUNING:EPOCHS:BATCHES:RATE...` makes the trainings that
are not there yet, at epsilon 4, each of EPOCHS passes in BATCHES batches a pass. It keeps the bits
after some of their steps in experiments/measured/learning_rates.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from math import ceil, log
from typing import Any

import torch
from first_release import SETS, Row, parts
from runs import HERE

from dpray.accounting.accountant import calibrate
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.commands.starter import usual_delta
from dpray.engines.model_path import resolve_model
from dpray.engines.text import TextCodec
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, TextEncoder, fine_tune
from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText, share
from dpray.methods.dp_sgd.training.training import ReferenceTrainer

KEPT = HERE / "measured" / "learning_rates.json"
MODEL, EPSILON, LENGTH, TEST, LOOKS = "smollm2", 4.0, 128, 200, 4


def bits(trainer: ReferenceTrainer, texts: Sequence[TrainingText], size: int) -> float:
    """Return the bits that the model spends on each byte of texts, after their codes."""
    total = 0.0
    with torch.no_grad():
        for some, positions in share(texts, 16, 0, 1):
            batch = MicroBatch.of(some, len(some), positions)
            losses_B, _ = trainer.forward(batch.ids, batch.mask, batch.labels)
            tokens_B = torch.tensor([len(text.ids) - text.given for text in some])
            total += float((losses_B * tokens_B).sum())
    return total / log(2) / size


def training(name: str, tuning: str, epochs: float, batches: int, rate: float) -> dict[str, Any]:
    private, test, _ = parts(name)
    n = round(len(private), -2)
    codec = TextCodec(resolve_model(MODEL), None)
    encoder = TextEncoder(
        partial(codec.first_ids, most=LENGTH), codec.start_id, codec.eos_ids[0], LENGTH
    )

    def encoded(rows: Sequence[Row]) -> list[TrainingText]:
        codes = ["" if row["label"] is None else f"label: {row['label']}\n" for row in rows]
        texts = [row["text"] for row in rows]
        return [*map(encoder.training_text, codes, texts)]

    units = [[text] for text in encoded(private)]
    steps, q = ceil(epochs * batches), 1 / batches
    sigma = calibrate(
        lambda s: SelfComposed(PoissonSubsampledGaussian(q, s), steps), EPSILON, usual_delta(n),
        bracket=(0.2, 100.0), increasing=False,
    )  # fmt: skip
    settings = TrainingSettings(tuning=tuning, learning_rate=rate)
    step = DpSgdStep(q, sigma, 1.0, n * q)
    trainer = ReferenceTrainer(step, settings, load_loss(MODEL, settings), new_key())
    some, began = test[:TEST], time.process_time()
    size, texts = sum(len(row["text"].encode()) for row in some), encoded(some)
    found = {0: bits(trainer, texts, size)}

    def look(t: int) -> bool:
        if (t + 1) % ceil(steps / LOOKS) == 0 or t + 1 == steps:
            found[t + 1] = bits(trainer, texts, size)
            print(f"{name} {rate:g}: {t + 1} of {steps} steps, {found[t + 1]:.3f} bits", flush=True)
        return True

    fine_tune(DpSgd(step, steps, settings), units, trainer, generator(new_key()), after_step=look)
    minutes = (time.process_time() - began) / 60
    return {"sigma": round(sigma, 3), "cpu_minutes": round(minutes, 1),
            "bits": {str(t): round(b, 4) for t, b in found.items()}}  # fmt: skip


def section() -> list[str]:
    """Return the section of docs/results.md."""
    found = json.loads(KEPT.read_text())
    before = {way.partition(":")[0]: of["bits"]["0"] for way, of in found.items()}
    untuned = ", ".join(f"{bits:.2f} on {SETS[name].title}" for name, bits in before.items())
    lines = [
        "## Steps and learning rates of DP-SGD",
        "",
        "Bits a byte that SmolLM2-135M needs for 200 test texts after their labels (less is "
        f"better), at epsilon {EPSILON:g}: {untuned} before the training, and below after each "
        "quarter of it. One run each (`python experiments/learning_rates.py "
        "SET:TUNING:EPOCHS:BATCHES:RATE...`). B over the noise, sigma, is the signal of "
        "[choosing.md](choosing.md).",
        "",
        "| set | tuning | passes | steps | B / sigma | learning rate | 1/4 | 1/2 | 3/4 | all |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way, of in sorted(found.items(), key=lambda item: -min(item[1]["bits"].values())):
        name, tuning, epochs, batches, rate = way.split(":")
        size, bits = round(len(parts(name)[0]), -2), [*of["bits"].values()][1:]
        steps = [*of["bits"]][-1]
        lines.append(
            f"| {SETS[name].title} | {tuning} | {epochs} | {steps} | "
            f"{size / int(batches) / of['sigma']:.0f} | {rate} | "
            f"{' | '.join(f'{each:.2f}' for each in bits)} |"
        )
    return lines


def main() -> None:
    for way in sys.argv[1:]:
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        if way not in kept:
            name, tuning, epochs, batches, rate = way.split(":")
            found = training(name, tuning, float(epochs), int(batches), float(rate))
            kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            KEPT.write_text(json.dumps(kept | {way: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

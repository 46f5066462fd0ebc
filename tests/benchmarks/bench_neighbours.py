"""DP-SGD: how far one text moves the clipped gradients of all the others, which no noise is for.

    python -m tests.benchmarks.bench_neighbours [--model FOLDER] [--batch 128] [--removed 4]

A batch goes through a model with one text whose weight is 0, and once more without that text: the
L2 norm of the difference of the sums of the others' clipped gradients, over C, at its largest over
the removed texts. `fixed` are the micro-batches that training uses
(`dpray.methods.dp_sgd.training.step.share`); `ragged` is for comparison: texts sorted by length, as
long as the longest of each micro-batch. Random tokens, lognormal lengths; without `--model`
the tiny Llama of the tests. Prints Markdown; the seconds are of one pass over the batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import typer

from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.ghost_norms import weighted_sum
from dpray.methods.dp_sgd.training.settings import Precision
from dpray.methods.dp_sgd.training.step import TrainingText, share
from tests.methods.dp_sgd.training.tiny_gradients import llama, lora

SIZE, LONGEST, C = 8, 60, 1.0

Parts = list[tuple[Sequence[TrainingText], int]]


def fixed(batch: Sequence[TrainingText]) -> tuple[Parts, int]:
    return share(batch, SIZE, 0, 1), SIZE


def ragged(batch: Sequence[TrainingText]) -> tuple[Parts, int]:
    texts = sorted(batch, key=lambda text: len(text.ids))
    parts = [texts[start : start + SIZE] for start in range(0, len(texts), SIZE)]
    return [(part, 2) for part in parts], 1


def made_up(batch: int, vocabulary: int) -> list[TrainingText]:
    rng = random.Random(1)
    lengths = [max(6, min(LONGEST, int(rng.lognormvariate(3.2, 0.5)))) for _ in range(batch)]
    return [TrainingText(tuple(rng.randrange(3, vocabulary) for _ in range(n)), 2) for n in lengths]


def others(
    loss: PerExampleLoss, parts: Parts, rows: int, but: TrainingText
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The sum of the clipped gradients of all texts but one; float32, like training's."""
    total = {p: torch.zeros_like(p) for p in loss.parameters() if p.requires_grad}
    for texts, positions in parts:
        norms_B, recorded = loss.norms(MicroBatch.of(texts, rows, positions), loss)
        weight_B = (C / norms_B).clamp(max=1.0).float()
        weight_B[[row for row, text in enumerate(texts) if text is but]] = 0.0
        for parameter, parts_of_p in recorded.parts.items():
            total[parameter] += weighted_sum(parts_of_p, weight_B, parameter.detach())
    return total


def moved(loss: PerExampleLoss, way: Any, batch: list[TrainingText], but: TrainingText) -> float:
    with_it = others(loss, *way(batch), but)
    without = others(loss, *way([text for text in batch if text is not but]), but)
    squares = [((with_it[p] - without[p]).double() ** 2).sum() for p in with_it]
    return float(torch.stack(squares).sum().sqrt()) / C


def main(model: str = "", batch: int = 128, removed: int = 4, tuning: str = "lora") -> None:
    torch.set_num_threads(1)
    print("| model | tuning | B | precision | micro-batches | moved, of C | seconds | tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for precision in get_args(Precision):
        for way in (ragged, fixed):
            net: Any = llama()
            if model:
                from transformers import AutoModelForCausalLM

                net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            texts = made_up(batch, net.config.vocab_size)
            loss = PerExampleLoss(lora(net) if tuning == "lora" else net, precision).eval()
            by_length = sorted(texts, key=lambda text: len(text.ids))
            chosen = [by_length[i * (batch - 1) // max(1, removed - 1)] for i in range(removed)]
            began = time.perf_counter()
            worst = max(moved(loss, way, texts, but) for but in chosen)
            seconds = (time.perf_counter() - began) / (2 * removed)
            parts, rows = way(texts)
            tokens = sum(MicroBatch.of(part, rows, length).ids.numel() for part, length in parts)
            print(
                f"| {Path(model).name or 'tiny'} | {tuning} | {batch} | {precision} | "
                f"{way.__name__} | {worst:.1e} | {seconds:.1f} | {tokens:,} |",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)

"""Steps of DP-SGD with dpray, on the batches and adapters of opacus_sgd.py."""

from __future__ import annotations

import json
import resource
import time

import torch
from opacus_sgd import ALPHA, CLIP, NOISE, RANK, RATE, parsed, same_adapters

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, fine_tune
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText, share
from dpray.methods.dp_sgd.training.training import ReferenceTrainer


class Watched(ReferenceTrainer):
    """Keeps the first batch's sum of clipped gradients, before its noise."""

    first: dict[str, torch.Tensor] | None = None

    def add_noise(self) -> None:
        if self.first is None:
            self.first = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in self._loss.model.named_parameters()
                if p.requires_grad
            }
        super().add_noise()


def main() -> None:
    options = parsed()
    settings = TrainingSettings(
        lora_rank=RANK, lora_alpha=ALPHA, learning_rate=RATE, precision=options.precision
    )
    loss: PerExampleLoss = load_loss(options.model, settings)
    same_adapters(loss.model)
    # Each batch is drawn already: all of its units join.
    plan = DpSgd(DpSgdStep(1.0, NOISE, CLIP, float(options.expected)), 1, settings)
    trainer = Watched(plan.mechanism, settings, loss, new_key())
    seconds = []
    for batch in json.loads(options.batches.read_text()):
        units = [[TrainingText(tuple(ids), given)] for ids, given in batch]
        for texts, positions in share([text for [text] in units], plan.most_rows, 0, 1):
            # A training tries each shape once, and not in every step.
            trainer.row_check.is_alike(max(1, len(texts)), plan.most_rows, positions)
        began = time.process_time()
        fine_tune(plan, units, trainer, generator(new_key()))
        seconds.append(time.process_time() - began)
    torch.save(trainer.first, options.out)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds[1:], "gib": gib}))


if __name__ == "__main__":
    main()

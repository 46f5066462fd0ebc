"""Steps of DP-SGD on low-rank adapters with Opacus, with the settings of dpray's runs, or, with
`--way plain`, of the same loop without privacy: a plain loop in the way of dp-transformers.

Runs in any environment with opacus, peft and transformers; it imports nothing of dpray.
"""

from __future__ import annotations

import json
import resource
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

RANK, ALPHA = 8, 16
MICRO_BATCH, RATE, CLIP, NOISE = 16, 2e-3, 1.0, 1.0
IGNORED = -100

Text = tuple[list[int], int]
"""A text's token ids, and the number of those before its own."""


def main() -> None:
    options = parsed()
    batches: list[list[Text]] = json.loads(options.batches.read_text())
    model = adapted(options.model)
    optimizer: Any = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
    )
    if options.way == "opacus":
        model = GradSampleModule(model, loss_reduction="sum", strict=False)
        optimizer = DPOptimizer(
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            expected_batch_size=options.expected,
        )
    seconds = []
    for number, batch in enumerate(batches):
        began = time.process_time()
        make_step(model, optimizer, batch, options)
        if number:
            seconds.append(time.process_time() - began)
        else:  # the sum of the first batch is compared with others': it has no noise, and no time
            found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            torch.save(found, options.out)
        optimizer.zero_grad()
        if options.way == "opacus":
            optimizer.noise_multiplier = NOISE
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "gib": gib}))


def parsed() -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--way", choices=("opacus", "plain"), default="opacus")
    parser.add_argument("--expected", type=int, required=True, help="expected records of a step")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def adapted(folder: str) -> Any:
    """Return the model with adapters, which are the same in every process."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear"
    )
    return same_adapters(get_peft_model(model, adapters)).train()


def same_adapters(model: Any) -> Any:
    """Give all adapters fixed weights, none of them zero."""
    fixed = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=fixed))
    return model


def make_step(model: Any, optimizer: Any, batch: Sequence[Text], options: Namespace) -> None:
    """Make a step with the batch, in slices that are as long as their longest text."""
    slices = [batch[start : start + MICRO_BATCH] for start in range(0, len(batch), MICRO_BATCH)]
    for number, texts in enumerate(slices, start=1):
        loss, last = summed_loss(model, texts, options.precision), number == len(slices)
        if options.way == "opacus":
            loss.backward()
            optimizer.signal_skip_step(do_skip=not last)
            optimizer.step()
            if not last:
                optimizer.zero_grad()
        else:
            (loss / options.expected).backward()
            if last:
                optimizer.step()


def summed_loss(model: Any, texts: Sequence[Text], precision: str) -> torch.Tensor:
    """Return the sum of the records' means over their own tokens, so that a record's gradient is
    its own."""
    length = max(len(ids) for ids, _ in texts)
    rows = [(ids, given, length - len(ids)) for ids, given in texts]
    ids = torch.tensor([[*ids, *[0] * left] for ids, _, left in rows])
    mask = torch.tensor([[*[1] * len(ids), *[0] * left] for ids, _, left in rows])
    labels = torch.tensor(
        [[*[IGNORED] * given, *ids[given:], *[IGNORED] * left] for ids, given, left in rows]
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    # Flat: over the middle one of three dimensions torch adds up less exactly, to 2e-4 of a loss.
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(following)
    own = (following != IGNORED).sum(1).clamp(min=1)
    return (losses.sum(1) / own).sum()


if __name__ == "__main__":
    main()

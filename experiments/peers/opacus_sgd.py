"""DP-SGD of low-rank adapters with Opacus, with the settings of dpray's runs: a plain loop in the
way of dp-transformers.

Runs in any environment with opacus, peft and transformers; it imports nothing of dpray.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

RECORDS, RANK, ALPHA = 4000, 8, 16
MICRO_BATCH, LENGTH, RATE, CLIP = 16, 48, 2e-3, 1.0
IGNORED = -100


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="expected records of a step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--noise", type=float, required=True)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = encoded(options.data / "private.jsonl", tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
    )
    model = get_peft_model(model, adapters).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
    )
    engine = PrivacyEngine(secure_mode=False)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(texts, batch_size=options.batch, collate_fn=padded),  # type: ignore[arg-type]
        noise_multiplier=options.noise,
        max_grad_norm=CLIP,
        poisson_sampling=True,
    )
    train(model, optimizer, loader, options.steps)
    model._module.save_pretrained(options.out / "adapter")


def encoded(path: Path, tokenizer: Any) -> list[list[int]]:
    """Return the records' token ids: the label as a control code, the text, the end."""
    found = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        ids = tokenizer(f"News Type: {record['label']}\n{record['text']}")["input_ids"]
        found.append([*ids, tokenizer.eos_token_id][:LENGTH])
    return found


def padded(records: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, padded to one length."""
    length = max(len(ids) for ids in records)
    ids = [[*ids, *[0] * (length - len(ids))] for ids in records]
    labels = [[*ids, *[IGNORED] * (length - len(ids))] for ids in records]
    return torch.tensor(ids), torch.tensor(labels)


def train(model: Any, optimizer: Any, loader: Any, steps: int) -> None:
    made = 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=MICRO_BATCH, optimizer=optimizer
    ) as micro_batches:
        while made < steps:
            for ids, labels in micro_batches:
                loss_of(model, ids, labels).backward()
                optimizer.step()
                made += not optimizer._is_last_step_skipped
                optimizer.zero_grad()
                if made == steps:
                    break


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over the records of each one's mean over its own tokens, so that a record's
    gradient is its own."""
    logits = model(input_ids=ids, attention_mask=(labels != IGNORED).long()).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    own = (labels[:, 1:] != IGNORED).sum(1).clamp(min=1)
    return (losses.sum(1) / own).mean()


if __name__ == "__main__":
    main()

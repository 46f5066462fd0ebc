"""The demo's tokenizer and language model are trained from scratch on public notes.

Every training document comes from one random clinic, so that the model learns to copy facts,
wording and length from the example in its prompt.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from clinic_notes import LABEL_FIELD, LABELS, random_book, write_note
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dpray.types import OnProgress, Progress

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
_PAIRS = 3
_MARK = "\x1f"
_BORDER = r"[.,:;!?<>\n]| ?\d+"
_PIECE = re.compile(f"{_MARK}|{_BORDER}")


@dataclass(frozen=True)
class TrainingPlan:
    """A `TrainingPlan` holds the sizes and schedule of a training that reads a document once."""

    documents: int = 13_000
    batch_size: int = 8
    words: int = 1900
    phrases: int = 450
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 6
    context_length: int = 1024
    learning_rate: float = 3e-3
    warmup: float = 0.04
    weight_decay: float = 0.05
    seed: int = 0


def prompt(label: str, example: str | None) -> str:
    """Return the private prompt with `example`, or the public one with the placeholder."""
    shown = f"<clinic note of {LABEL_FIELD}: {label}>" if example is None else example
    return (
        f"Here are clinic notes with {LABEL_FIELD}: {label}.\n\nText: {shown}\n\n"
        "Please give me another one.\n\nText:"
    )


def documents(count: int, rng: random.Random, mark: str = "") -> list[list[tuple[str, str]]]:
    """Return documents: each is a row of (prompt, answer) pairs of one clinic and label. `mark`
    stands at the borders of facts."""
    return [_document(rng, mark) for _ in range(count)]


def _document(rng: random.Random, mark: str) -> list[tuple[str, str]]:
    """Return prompts with examples and their answers, the first with the placeholder in 1 of 5
    cases; or, in 1 of 20 cases, a note after its label. Later pairs repeat the clinic's facts: they
    teach to copy."""
    book, label = random_book(rng), rng.choice(LABELS)

    def text() -> str:
        return write_note(book, label, rng, mark).text

    if rng.random() < 0.05:
        return [(f"{LABEL_FIELD}: {label}\n", text())]
    examples = [text() for _ in range(_PAIRS)]
    first = None if rng.random() < 0.2 else examples[0]
    return [(prompt(label, example), f" {text()}") for example in (first, *examples[1:])]


def train_tokenizer(plan: TrainingPlan) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with phrases: merges inside words first, then, as in SuperBPE (Liu et
    al. 2025), merges of words, but never across the border of a fact. A fact is one token wherever
    it stands: private prediction pays for every token, and a fact of the prompt is easy to copy.
    The tokenizer adds no special token by itself."""
    rows = documents(plan.documents // 4, random.Random(plan.seed + 1), _MARK)
    marked = ["".join(pair) for row in rows for pair in row]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Split(_MARK, "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=plan.words,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(marked, trainer)
    learnt = json.loads(words.to_str())["model"]
    vocabulary, merges = learnt["vocab"], [tuple(merge) for merge in learnt["merges"]]
    for phrase, _ in Counter(_PIECE.split(_MARK.join(marked))).most_common(plan.phrases):
        tokens = words.encode(phrase).tokens
        for end in range(1, len(tokens)):
            merge = ("".join(tokens[:end]), tokens[end])
            if "".join(merge) not in vocabulary:
                vocabulary["".join(merge)] = len(vocabulary)
                merges.append(merge)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(_BORDER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )


Encoded = tuple[torch.Tensor, torch.Tensor]


def _encode(tokenizer: PreTrainedTokenizerFast, row: list[tuple[str, str]]) -> Encoded:
    """Return the ids, every pair between bos and eos, and the labels. The first prompt has none:
    nothing in it can be copied, so it would only add noise."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids: list[int] = []
    for pair in row:
        ids += [bos, *tokenizer("".join(pair), add_special_tokens=False)["input_ids"], eos]
    first = 1 + len(tokenizer(row[0][0], add_special_tokens=False)["input_ids"])
    return torch.tensor(ids), torch.tensor([-100] * first + ids[first:])


def _batches(rows: list[Encoded], size: int, rng: random.Random) -> Iterator[Encoded]:
    """Yield batches of rows of about one length, in random order, padded on the right."""
    ordered = sorted(rows, key=lambda row: len(row[0]))
    groups = [ordered[start : start + size] for start in range(0, len(rows), size)]
    rng.shuffle(groups)
    for group in groups:
        ids, labels = map(list, zip(*group, strict=True))
        yield pad_sequence(ids, True), pad_sequence(labels, True, padding_value=-100)


def _learning_rate(step: int, steps: int, plan: TrainingPlan) -> float:
    """Return the learning rate: a linear warm-up, then a cosine down to a fiftieth."""
    warmup = max(1, int(plan.warmup * steps))
    if step < warmup:
        return plan.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return plan.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def _new_model(tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan) -> LlamaForCausalLM:
    torch.manual_seed(plan.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=plan.hidden_size,
            intermediate_size=plan.intermediate_size,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            num_key_value_heads=plan.heads,
            max_position_embeddings=plan.context_length,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def _optimizers(model: LlamaForCausalLM, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, at AdamW's scale of updates, and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(plan: TrainingPlan, out: Path, on_progress: OnProgress) -> None:
    """Write tokenizer and model (bfloat16 safetensors) to `out`. The detail of the progress is the
    loss in nats per token."""
    rng = random.Random(plan.seed)
    tokenizer = train_tokenizer(plan)
    rows = [_encode(tokenizer, row) for row in documents(plan.documents, rng)]
    model = _new_model(tokenizer, plan)
    optimizers = _optimizers(model, plan)
    steps = math.ceil(len(rows) / plan.batch_size)
    for step, (ids, labels) in enumerate(_batches(rows, plan.batch_size, rng)):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = _learning_rate(step, steps, plan)
        # Attention is causal, so padding on the right needs no mask.
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        on_progress(Progress("training", step + 1, steps, f"loss {loss.item():.3f}"))
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)

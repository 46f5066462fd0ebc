"""An encoder that classifies, and a language model that predicts words, learn from the records."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpray.engines.embedder import embedder_at_hand
from dpray.engines.model_path import folder_or_hub
from dpray.evaluation.downstream import Embedded, mean_and_deviation
from dpray.types import InputError
from paper_evaluation.causal_lm import CausalLM, padded

Batch = dict[str, torch.Tensor]

IGNORED = -100
"""transformers leaves tokens with this label out of the loss."""


@dataclass(frozen=True)
class Training:
    """A fine-tuning's parameters; `max_length` counts tokens."""

    learning_rate: float
    epochs: int
    batch_size: int
    max_length: int = 512
    weight_decay: float = 0.01


CLASSIFIER = Training(learning_rate=3e-5, epochs=5, batch_size=64)
"""Yue et al. (2023), Appendix A, and Xie et al. (2024), Appendix B, train so."""

NEXT_WORD = Training(learning_rate=3e-4, epochs=3, batch_size=32)
"""Xie et al. (2024), Appendix B, train so, but for 10 and 20 epochs, of models that are not causal.
"""

# The most texts that a language model is trained on, and tested on.
MOST_RECORDS = 5000


class Encoder:
    """Any encoder of transformers, from a folder or a hub, with a new head for labels. Raises
    InputError that names `encoder` if there is none.
    """

    def __init__(self, name: str, training: Training = CLASSIFIER) -> None:
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        self.name, self.training = name, training
        self.folder = str(embedder_at_hand(name) or folder_or_hub(name, "encoder"))
        disable_progress_bar()
        try:
            config: Any = AutoConfig.from_pretrained(self.folder)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError):
            raise InputError(f"encoder: cannot load {name} as a model with a tokenizer") from None
        longest = getattr(config.get_text_config(), "max_position_embeddings", training.max_length)
        # RoBERTa counts two positions more than it takes.
        self.max_length = max(1, min(training.max_length, longest - 2))

    def fit(self, train: Embedded, target: np.ndarray, seed: int) -> FineTuned:
        """Fine-tune on texts, which are given as `vectors`; `target` is ignored."""
        classes, labels = np.unique(train.labels, return_inverse=True)
        truth = torch.from_numpy(labels)

        def batch(rows: torch.Tensor) -> Batch:
            return {**self.tokens(list(train.vectors[rows.numpy()])), "labels": truth[rows]}

        with _seeded(seed):
            model = _fine_tune(self._model(len(classes)), batch, len(labels), self.training, seed)
        return FineTuned(self, model, classes)

    def tokens(self, texts: Sequence[str]) -> Batch:
        """Return the texts' tokens, padded on the right."""
        cut = {"truncation": True, "max_length": self.max_length}
        return dict(self.tokenizer(list(texts), **cut, padding=True, return_tensors="pt"))

    def _model(self, labels: int) -> Any:
        from transformers import AutoModelForSequenceClassification

        try:
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                self.folder, num_labels=labels, ignore_mismatched_sizes=True, dtype="float32"
            )
        except (OSError, ValueError):
            raise InputError(f"encoder: {self.name} cannot classify") from None
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        return model.to("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class FineTuned:
    """A classifier of texts; `classes` are the labels of its outputs."""

    encoder: Encoder
    model: Any
    classes: np.ndarray

    def predict(self, texts: np.ndarray) -> np.ndarray:
        """Return the most likely label of each text."""
        found: list[int] = []
        size = self.encoder.training.batch_size
        with torch.inference_mode():
            for start in range(0, len(texts), size):
                batch = self.encoder.tokens(list(texts[start : start + size]))
                scores = self.model(**_moved(batch, self.model.device)).logits
                found += scores.argmax(dim=-1).tolist()
        labels: np.ndarray = self.classes[found]
        return labels


def compare_next_word(
    lm: CausalLM,
    sets: Mapping[str, Sequence[str]],
    test: Sequence[str],
    seeds: int,
    training: Training = NEXT_WORD,
) -> dict[str, Any]:
    """Measure next-word accuracy, on real test texts, of a causal language model fine-tuned on each
    of `sets` (synthetic, ceiling, floor): Xie et al. (2024), Section 4.1 and Appendix B. `base` is
    the model without fine-tuning. "Words" are the model's tokens, the end of a text included.

    Each seed resamples the training texts (bootstrap) and shuffles them. A set is cut to
    `MOST_RECORDS` texts, drawn once, and a text to `training.max_length` tokens.
    """
    rng = np.random.default_rng(0)
    drawn = {}
    for name, texts in {**sets, "test": test}.items():
        some = [texts[i] for i in rng.permutation(len(texts))[:MOST_RECORDS]]
        drawn[name] = _token_rows(lm, some, training)
    tested = drawn.pop("test")
    result: dict[str, Any] = {
        "seeds": seeds,
        "test_records": len(tested),
        "test_words": sum(len(row) - 1 for row in tested),
        "base": next_word_accuracy(lm.model, tested, training.batch_size),
    }
    for name, rows in drawn.items():
        scores = []
        for seed in range(seeds):
            resampled = np.random.default_rng(seed).choice(len(rows), len(rows))
            model = _trained_on(lm, [rows[i] for i in resampled], training, seed)
            scores.append(next_word_accuracy(model, tested, training.batch_size))
        result[name] = {"accuracy": mean_and_deviation(scores), "train_records": len(rows)}
    return result


def next_word_accuracy(model: Any, rows: Sequence[Sequence[int]], batch_size: int = 32) -> float:
    """Return the share of tokens, each row's first excepted, that the model finds the likeliest
    after those before them in their row."""
    right = count = 0
    by_length = sorted(rows, key=len)
    with torch.inference_mode():
        for start in range(0, len(rows), batch_size):
            batch = _moved(_causal_batch(by_length[start : start + batch_size]), model.device)
            labels = batch.pop("labels")[:, 1:]
            guessed = model(**batch).logits[:, :-1].argmax(dim=-1)
            right += int((guessed == labels).sum())
            count += int((labels != IGNORED).sum())
    return right / count


def _trained_on(lm: CausalLM, rows: Sequence[Sequence[int]], training: Training, seed: int) -> Any:
    def batch(chosen: torch.Tensor) -> Batch:
        return _causal_batch([rows[i] for i in chosen.tolist()])

    with _seeded(seed):
        return _fine_tune(copy.deepcopy(lm.model), batch, len(rows), training, seed)


def _token_rows(lm: CausalLM, texts: Sequence[str], training: Training) -> list[list[int]]:
    """Return each text's tokens, with a start and an end token, cut to the longest length."""
    codec = lm.codec
    longest = min(training.max_length, codec.context_length)
    return [
        [codec.start_id, *codec.ids(codec.truncate(text, longest)), codec.eos_ids[0]][:longest]
        for text in texts
    ]


def _causal_batch(rows: Sequence[Sequence[int]]) -> Batch:
    """Pad rows on the right; the padding is neither attended to nor learnt."""
    ids, mask = padded(rows)
    labels = ids.masked_fill(mask == 0, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _fine_tune(
    model: Any, batch_of: Callable[[torch.Tensor], Batch], count: int, training: Training, seed: int
) -> Any:
    """Train by AdamW on the model's own loss, with a learning rate that falls linearly to 0, and
    return the model, ready to be asked."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), training.learning_rate, weight_decay=training.weight_decay
    )
    steps = training.epochs * -(-count // training.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    model.train()
    for _ in range(training.epochs):
        for rows in torch.randperm(count, generator=generator).split(training.batch_size):
            loss = model(**_moved(batch_of(rows), model.device)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators, from which dropout and new layers draw, and restore them after."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield

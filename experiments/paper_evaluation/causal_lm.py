"""A small causal language model gives the likelihoods of answers after a prompt.

Shape suffixes: N queries, A answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dpray.engines.base import EngineError
from dpray.engines.model_path import resolve_model
from dpray.engines.passes import cache_argument
from dpray.types import InputError

Ids = tuple[int, ...]

_ROWS = 16


class CausalLM:
    """A language model of transformers and its tokenizer, from a folder or a hub.

    Raises InputError that names `lm` if there is none.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from dpray.engines.text import TextCodec

        folder = resolve_model(name)
        disable_progress_bar()
        try:
            self.codec = TextCodec(folder, None)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        except (InputError, EngineError, OSError, ValueError):
            raise InputError(f"lm: cannot load {name} as a causal language model") from None
        self.name = name
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = model.to(self.device).eval()

    def ids(self, text: str) -> Ids:
        """Return the token ids of a piece of text, without special tokens."""
        return tuple(self.codec.ids(text))

    def log_likelihoods(
        self, prefix: Ids, queries: Sequence[Ids], answers: Sequence[Ids]
    ) -> np.ndarray:
        """Return the log-likelihood, in nats, of each answer after the start token, `prefix` and
        each query, shape (N, A). Queries and answers hold a token or more.

        The prefix and each query go through the model once.
        """
        from transformers import DynamicCache

        found = np.zeros((len(queries), len(answers)))
        by_length = sorted(range(len(queries)), key=lambda i: len(queries[i]))
        with torch.inference_mode():
            nothing = torch.zeros(1, 0, dtype=torch.long, device=self.device)
            context = _Context(self.model, DynamicCache(config=self.model.config), nothing)
            context, _ = context.read([(self.codec.start_id, *prefix)])
            for start in range(0, len(by_length), _ROWS):
                rows = by_length[start : start + _ROWS]
                asked, logits = context.read([queries[i] for i in rows], "left")
                found[rows] = asked.answers(logits[:, -1], answers)
        return found


def padded(
    rows: Sequence[Sequence[int]], side: Literal["left", "right"] = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids with 0; return them and their mask, which is 0 for padding, else 1."""
    ids = [torch.tensor(row) for row in rows]
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    return pad(ids), pad([torch.ones_like(row) for row in ids])


@dataclass(frozen=True)
class _Context:
    """Rows of tokens that the model has read: their key-value cache and mask."""

    model: Any
    cache: Any
    mask: torch.Tensor

    def read(
        self, rows: Sequence[Ids], side: Literal["left", "right"] = "right"
    ) -> tuple[_Context, torch.Tensor]:
        """Read each of `rows`, padded at `side`, after each row of the context; return the longer
        context, whose rows are (context, row) in this order, and the logits of what was read."""
        cache, device = copy.deepcopy(self.cache), self.mask.device
        if len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
        ids, seen = (part.repeat(len(self.mask), 1).to(device) for part in padded(rows, side))
        before = self.mask.repeat_interleave(len(rows), 0)
        mask = torch.cat([before, seen], dim=1)
        positions = before.sum(1, keepdim=True) + seen.cumsum(1) - 1
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions.clamp(min=0),
            **{cache_argument(self.model.__class__): cache},
        )
        return _Context(self.model, cache, mask), output.logits

    def answers(self, logits_NV: torch.Tensor, answers: Sequence[Ids]) -> np.ndarray:
        """Return the log-likelihoods of answers after rows with these last logits, shape (N, A)."""
        found_NA = logits_NV.float().log_softmax(-1)[:, [answer[0] for answer in answers]]
        # Rows are costly to repeat, and answers of one token are finished.
        longer = [place for place, answer in enumerate(answers) if len(answer) > 1]
        if longer:
            _, logits = self.read([answers[place][:-1] for place in longer])
            count = len(found_NA)
            ids, seen = (
                part.repeat(count, 1).to(logits.device)
                for part in padded([answers[place][1:] for place in longer])
            )
            later = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0] * seen
            found_NA[:, longer] += later.sum(-1).reshape(count, len(longer))
        return found_NA.double().cpu().numpy()

"""A small causal language model gives the likelihoods of answers after a prompt.

Shape suffixes: N queries, A answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dpray.engines.base import EngineError
from dpray.engines.model_path import check_model_path
from dpray.types import InputError

Ids = tuple[int, ...]

_ROWS = 16


class CausalLM:
    """A `CausalLM` is a language model of transformers and its tokenizer, from a folder or a hub.

    Raises InputError that names `lm` where there is none.
    """

    def __init__(self, name: str) -> None:
        # Importing transformers takes seconds, which an evaluation without it should not cost.
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from dpray.engines.text import TextCodec

        folder = check_model_path(name, "lm")
        disable_progress_bar()
        try:
            self.codec = TextCodec(folder, None)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        except (InputError, EngineError, OSError, ValueError):
            raise InputError(f"lm: cannot load {name} as a causal language model") from None
        self.name = name
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = model.to(self.device).eval()

    @property
    def context_length(self) -> int:
        return self.codec.context_length

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
        found = np.zeros((len(queries), len(answers)))
        by_length = sorted(range(len(queries)), key=lambda i: len(queries[i]))
        with torch.inference_mode():
            context = _Context.after(self.model, (self.codec.start_id, *prefix), self.device)
            for start in range(0, len(by_length), _ROWS):
                rows = by_length[start : start + _ROWS]
                found[rows] = context.extended([queries[i] for i in rows]).answers(answers)
        return found


def padded(
    rows: Sequence[Sequence[int]], side: Literal["left", "right"] = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids with 0; return them and their mask, which is 0 for padding, else 1."""
    ids = [torch.tensor(row) for row in rows]
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    return pad(ids), pad([torch.ones_like(row) for row in ids])


class _Context:
    """A `_Context` is rows of tokens that the model has read: key-value cache, attention mask and
    last logits."""

    def __init__(
        self, model: Any, cache: Any, mask: torch.Tensor, logits: torch.Tensor | None
    ) -> None:
        self.model, self.cache, self.mask, self.logits = model, cache, mask, logits

    @classmethod
    def after(cls, model: Any, prefix: Ids, device: torch.device) -> _Context:
        """Read a prefix, as one row."""
        from transformers import DynamicCache

        nothing = torch.zeros(1, 0, dtype=torch.long, device=device)
        row = cls(model, DynamicCache(config=model.config), nothing, None)
        logits = row._read(*padded([prefix]))
        row.logits = logits[:, -1]
        return row

    def extended(self, queries: Sequence[Ids]) -> _Context:
        """Return this one row followed by each query; queries are padded on the left."""
        rows = self._repeated(len(queries))
        rows.logits = rows._read(*padded(queries, "left"))[:, -1]
        return rows

    def answers(self, answers: Sequence[Ids]) -> np.ndarray:
        """Return the log-likelihood of each answer after each row, shape (N, A)."""
        assert self.logits is not None
        first_NV = self.logits.float().log_softmax(-1)
        found_NA = first_NV[:, [answer[0] for answer in answers]]
        # Rows are costly to repeat, and answers of one token are finished.
        longer = [place for place, answer in enumerate(answers) if len(answer) > 1]
        if longer:
            count = len(first_NV)
            ids, seen = (
                each.repeat(count, 1).to(self.mask.device)
                for each in padded([answers[place] for place in longer])
            )
            rows = self._repeated(len(longer))
            logits = rows._read(ids[:, :-1], seen[:, :-1]).float().log_softmax(-1)
            later = logits.gather(-1, ids[:, 1:, None])[..., 0] * seen[:, 1:]
            found_NA[:, longer] += later.sum(-1).reshape(count, len(longer))
        return found_NA.double().cpu().numpy()

    def _repeated(self, times: int) -> _Context:
        """Return a copy with each row repeated so many times."""
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(times)
        return _Context(self.model, cache, self.mask.repeat_interleave(times, 0), None)

    def _read(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return the logits of `ids`, whose tokens not `seen` are padding; extends the cache."""
        before = self.mask.sum(1, keepdim=True)
        ids, seen = ids.to(self.mask.device), seen.to(self.mask)
        self.mask = torch.cat([self.mask, seen], dim=1)
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=(before + seen.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
        )
        logits: torch.Tensor = output.logits
        return logits

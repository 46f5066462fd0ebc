"""A small causal language model: how likely it finds answers after a prompt, and which words it
expects next.

Shape suffixes: N queries, A answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dpray.engines.base import EngineError
from dpray.engines.model_path import check_model_path
from dpray.types import InputError

Ids = tuple[int, ...]

_ROWS = 16


class CausalLM:
    """A causal language model of transformers and its tokenizer, by folder or by a hub's name.

    Raises `InputError` that names `lm` where there is none.
    """

    def __init__(self, name: str) -> None:
        # Imported late: transformers takes seconds, which other commands should not wait for.
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
        """Token ids of a piece of text, without special tokens."""
        return tuple(self.codec.ids(text))

    def log_likelihoods(
        self, prefix: Ids, queries: Sequence[Ids], answers: Sequence[Ids]
    ) -> np.ndarray:
        """The log-likelihood, in nats, of each answer after the start token, `prefix` and each
        query, shape (N, A). Queries and answers hold a token or more.

        The prefix goes through the model once, each query once.
        """
        found = np.zeros((len(queries), len(answers)))
        by_length = sorted(range(len(queries)), key=lambda i: len(queries[i]))
        with torch.inference_mode():
            shown = _Shown.after(self.model, (self.codec.start_id, *prefix), self.device)
            for start in range(0, len(by_length), _ROWS):
                rows = by_length[start : start + _ROWS]
                found[rows] = shown.extended([queries[i] for i in rows]).answers(answers)
        return found


class _Shown:
    """Rows that the model has read: their cache, attention mask, lengths and last logits."""

    def __init__(
        self, model: Any, cache: Any, mask: torch.Tensor, logits: torch.Tensor | None
    ) -> None:
        self.model, self.cache, self.mask, self.logits = model, cache, mask, logits

    @classmethod
    def after(cls, model: Any, prefix: Ids, device: torch.device) -> _Shown:
        """One row."""
        from transformers import DynamicCache

        nothing = torch.zeros(1, 0, dtype=torch.long, device=device)
        row = cls(model, DynamicCache(config=model.config), nothing, None)
        logits = row._read(torch.tensor([prefix], device=device), torch.ones(1, len(prefix)))
        row.logits = logits[:, -1]
        return row

    def extended(self, queries: Sequence[Ids]) -> _Shown:
        """This one row with each of the queries, which are padded on the left."""
        longest = max(map(len, queries))
        ids = torch.zeros(len(queries), longest, dtype=torch.long, device=self.mask.device)
        seen = torch.zeros(len(queries), longest)
        for row, query in enumerate(queries):
            ids[row, longest - len(query) :] = torch.tensor(query)
            seen[row, longest - len(query) :] = 1
        rows = self._repeated(len(queries))
        rows.logits = rows._read(ids, seen)[:, -1]
        return rows

    def answers(self, answers: Sequence[Ids]) -> np.ndarray:
        """The log-likelihood of each answer after each row, shape (N, A)."""
        assert self.logits is not None
        first_NV = self.logits.float().log_softmax(-1)
        found_NA = first_NV[:, [answer[0] for answer in answers]]
        # Rows are costly to repeat, and an answer of one token is done.
        longer = [place for place, answer in enumerate(answers) if len(answer) > 1]
        if longer:
            longest = max(map(len, answers))
            ids = torch.zeros(len(longer), longest, dtype=torch.long, device=self.mask.device)
            held = torch.zeros(len(longer), longest, device=self.mask.device)
            for row, answer in enumerate(answers[place] for place in longer):
                ids[row, : len(answer)] = torch.tensor(answer)
                held[row, : len(answer)] = 1
            count = len(first_NV)
            ids, held = ids.repeat(count, 1), held.repeat(count, 1)
            rows = self._repeated(len(longer))
            logits = rows._read(ids[:, :-1], held[:, :-1]).float().log_softmax(-1)
            later = logits.gather(-1, ids[:, 1:, None])[..., 0] * held[:, 1:]
            found_NA[:, longer] += later.sum(-1).reshape(count, len(longer))
        return found_NA.double().cpu().numpy()

    def _repeated(self, times: int) -> _Shown:
        """Each row so many times in turn; this one stays as it is."""
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(times)
        return _Shown(self.model, cache, self.mask.repeat_interleave(times, 0), None)

    def _read(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Logits of `ids`, of which the tokens not `seen` are padding; grows the cache."""
        before = self.mask.sum(1, keepdim=True)
        seen = seen.to(self.mask)
        self.mask = torch.cat([self.mask, seen], dim=1)
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=(before + seen.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
        )
        logits: torch.Tensor = output.logits
        return logits

"""Forward passes of a transformers model over rows: a prompt's first pass, and one token at a time.

The shape of these passes grows with the text. `dpray.engines.fixed_pass` has those that do not.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dpray.engines.base import EngineError
from dpray.engines.float32 import without_tf32
from dpray.engines.text import readable_tokens
from dpray.engines.weights import load_whole
from dpray.types import InputError

TOKENS_KEPT = 8192
"""The most tokens of prompts whose prefills `PublicPass` keeps. A document's later sections have
prompts that never come again."""

TokenIds = tuple[tuple[int, ...], ...]
"""It has the token ids of several prompts."""


def load_model(folder: str, dtype: str, device: torch.device) -> Any:
    """Load the model in evaluation mode. Raises InputError if its weights are not those of its
    configuration, EngineError if it cannot be loaded."""
    without_tf32()
    try:
        loaded = load_whole(folder, dtype)
    except InputError:
        raise
    except Exception as error:  # damaged files raise errors of many classes
        raise EngineError(f"cannot load {folder} ({type(error).__name__})") from error
    return loaded.to(device).eval()


def left_padded(
    prompts: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both of shape (rows, longest prompt)."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


@dataclass
class PrefilledRows:
    """Rows after their prompts: KV cache, attention mask, and first logits, float32, shape
    (rows, V)."""

    cache: Any
    mask: torch.Tensor
    logits: torch.Tensor

    def rewind(self) -> None:
        """Forget the tokens after the prompts."""
        self.cache.crop(-(self.cache.get_seq_length() - self.mask.shape[1]))

    @property
    def can_rewind(self) -> bool:
        return all(type(layer) is DynamicLayer for layer in self.cache.layers)


@functools.cache
def cache_argument(model: type) -> str:
    """Return the name by which a model takes its KV cache.

    transformers 5.24 calls it `cache`, and 5.40 will refuse `past_key_values`, its older name.
    """
    parameters = inspect.signature(model.forward).parameters  # type: ignore[attr-defined]
    return "cache" if "cache" in parameters else "past_key_values"


def readable(model: Any) -> int:
    """Return the number of tokens that the model has embeddings for; logits are cut to these."""
    embedded: int = model.get_input_embeddings().weight.shape[0]
    return min(embedded, readable_tokens(model.config.get_text_config()))


@torch.inference_mode()
def prefill(model: Any, prompts: Sequence[tuple[int, ...]], device: torch.device) -> PrefilledRows:
    """Compute the prompts' rows in one forward pass."""
    ids, mask = left_padded(prompts, device)
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=1,
        **{cache_argument(model.__class__): cache},
    )
    return PrefilledRows(cache, mask, output.logits[:, -1, : readable(model)].float())


@torch.inference_mode()
def advance(model: Any, rows: PrefilledRows, tokens: Sequence[int]) -> torch.Tensor:
    """Compute the rows' logits after `tokens`, the same for all; only the last token is new."""
    count = rows.mask.shape[0]
    grown = rows.mask.new_ones(count, len(tokens))
    output = model(
        input_ids=rows.mask.new_full((count, 1), tokens[-1]),
        attention_mask=torch.cat([rows.mask, grown], dim=1),
        position_ids=rows.mask.sum(1, keepdim=True) + len(tokens) - 1,
        **{cache_argument(model.__class__): rows.cache},
    )
    logits: torch.Tensor = output.logits[:, -1, : readable(model)].float()
    return logits


class PublicPass:
    """Computes the logits of public prompts in forward passes that hold one row each.

    The shape of such a pass is a function of the prompt and of the tokens drawn so far, which are
    public. So the logits are too, to the last bit: a set of candidates cut out by them is the same
    whatever else is in the batch, and so is the public gate's answer. In a pass shared with private
    rows the last bits move with these rows, and a token at the edge of the set flips in or out: a
    loss without bound.
    Proof: docs/privacy.md, sections 2.4 and 2.9.
    """

    def __init__(self, model: object, device: torch.device) -> None:
        self._model, self._device = model, device
        self._prompts: dict[tuple[int, ...], PrefilledRows] = {}

    def start(self, prompt: tuple[int, ...]) -> PrefilledRows:
        """Return the prompt's row, a copy of a prefill that is kept for the next text."""
        if prompt not in self._prompts:
            while self._prompts and sum(map(len, self._prompts)) + len(prompt) > TOKENS_KEPT:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[prompt] = prefill(self._model, [prompt], self._device)
        return copy.deepcopy(self._prompts[prompt])

    def logits(self, row: PrefilledRows, tokens: Sequence[int]) -> torch.Tensor:
        """Return the next token's logits after `tokens`, float32, shape (V,). Call it once at every
        position, in order."""
        return advance(self._model, row, tokens)[0] if tokens else row.logits[0]

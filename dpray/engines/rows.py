"""A transformers model computes several rows in a pass, and a public row by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils.logging import disable_progress_bar

from dpray.engines.base import EngineError

PROMPTS_KEPT = 64


def load_model(folder: str, dtype: str, device: torch.device) -> Any:
    """Load the model in evaluation mode. Raises EngineError where it cannot be loaded."""
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
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
class Rows:
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


@torch.inference_mode()
def prefill(model: Any, prompts: Sequence[tuple[int, ...]], device: torch.device) -> Rows:
    """Compute the prompts' rows in one forward pass."""
    ids, mask = left_padded(prompts, device)
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        logits_to_keep=1,
    )
    return Rows(cache, mask, output.logits[:, -1].float())


@torch.inference_mode()
def advance(model: Any, rows: Rows, tokens: Sequence[int]) -> torch.Tensor:
    """Compute the rows' logits after `tokens`, the same for all; only the last token is new."""
    count = rows.mask.shape[0]
    grown = rows.mask.new_ones(count, len(tokens))
    output = model(
        input_ids=rows.mask.new_full((count, 1), tokens[-1]),
        attention_mask=torch.cat([rows.mask, grown], dim=1),
        position_ids=rows.mask.sum(1, keepdim=True) + len(tokens) - 1,
        past_key_values=rows.cache,
    )
    logits: torch.Tensor = output.logits[:, -1].float()
    return logits


class PublicPass:
    """Computes the logits of public prompts in forward passes that hold one row each.

    The shape of such a pass is a function of the prompt and of the tokens drawn so far, which are
    public. So the logits are too, to the last bit: a set of candidates cut out by them is the same
    whoever is in the batch, and so is the public gate's answer. In a pass shared with private rows
    the last bits move with these rows, and a token at the edge of the set flips in or out: a loss
    without bound.
    Proof: docs/privacy.md, sections 2.4 and 2.9.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self._prompts: dict[tuple[int, ...], Rows] = {}

    def start(self, prompt: tuple[int, ...]) -> Rows:
        """Return the prompt's row, a copy of a prefill that is kept for the next text."""
        if prompt not in self._prompts:
            if len(self._prompts) == PROMPTS_KEPT:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[prompt] = prefill(self._model, [prompt], self._device)
        return copy.deepcopy(self._prompts[prompt])

    def logits(self, row: Rows, tokens: Sequence[int]) -> torch.Tensor:
        """Return the next token's logits after `tokens`, float32, shape (V,). Call it once at every
        position, in order."""
        return advance(self._model, row, tokens)[0] if tokens else row.logits[0]

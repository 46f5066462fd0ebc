"""Attention of rows that get one new token each, without copies of keys and values.

Where several heads of queries share a head of keys, transformers copies the keys and values for
each of them before it attends with a mask: in a pass of one token a row that is half of the time.
Here these heads are queries of one head: they have the same keys, values and mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ONE_TOKEN = "sdpa_of_one_token"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' "sdpa" does. Shapes: queries (B, heads, T, D), keys and values (B,
    heads that are shared, columns, D); the result has (B, T, heads, D)."""
    rows, heads, tokens, size = query.shape
    shared, mask = key.shape[1], attention_mask
    is_alike = mask is not None and mask.shape[1] == 1 and more.get("position_bias") is None
    if tokens > 1 or shared == heads or not is_alike:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, **more
        )
        return found
    together = query.view(rows, shared, heads // shared, size)
    attended = scaled_dot_product_attention(
        together, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(ONE_TOKEN, attend)
AttentionMaskInterface.register(ONE_TOKEN, sdpa_mask)

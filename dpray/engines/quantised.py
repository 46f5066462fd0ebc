"""Quantised models whose rows depend on each other are refused for private rows.

Quantised weights are the same for every row. Quantised activations have a scale: where it is the
largest number of a whole pass, one row with large numbers makes the others coarse, or 0. A
`row_variation` measured with public prompts does not show that. So only what is known to work row
by row is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpray.types import InputError

QUANTISATION = ("quantization_config", "compression_config")
"""The keys of a configuration that say how a model is quantised."""

WEIGHTS_ALONE = {"awq", "gptq", "hqq", "mxfp4"}
"""Methods that quantise weights, or activations by small blocks of a row."""

BY_ROWS = {"token", "group", "tensor_group"}
"""Strategies of compressed-tensors whose scales are those of a row or of parts of it."""


def refuse_shared_scales(model: str) -> None:
    """Raise InputError for the folder, or the hub's name, of a model whose activations may be
    quantised by scales that rows share."""
    from transformers import AutoConfig  # late: it imports torch

    try:
        config: Any = AutoConfig.from_pretrained(model, trust_remote_code=False)
        parts = (config, config.get_text_config())
    except Exception as error:  # damaged files raise errors of many classes
        raise InputError(
            f"engine.model: cannot read a configuration from {model} ({type(error).__name__})"
        ) from None
    for part in parts:
        for key in QUANTISATION:
            found = getattr(part, key, None)
            if found and not works_by_rows(found):
                raise InputError(
                    f"engine.model: {key} of {model} may quantise activations by a scale of the "
                    "whole pass, so that a record would move the rows of others; take a model "
                    "that is not quantised, or its weights alone (GPTQ, AWQ)"
                )


def works_by_rows(quantization: Any) -> bool:
    """Return whether each row of a model that is quantised like this is computed by itself, as far
    as is known."""
    if not isinstance(quantization, Mapping):
        return False
    method = quantization.get("quant_method")
    if method == "bitsandbytes":
        # With 8 bits, columns with a large number in any row are computed otherwise for all rows.
        return quantization.get("load_in_4bit") is True and not quantization.get("load_in_8bit")
    if method == "fp8":
        is_static = quantization.get("activation_scheme") == "static"
        return is_static or bool(quantization.get("weight_block_size"))
    if method == "compressed-tensors":
        return _groups_work_by_rows(quantization)
    return isinstance(method, str) and method in WEIGHTS_ALONE


def _groups_work_by_rows(quantization: Mapping[str, Any]) -> bool:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    activations = [quantization.get("kv_cache_scheme")]
    for group in groups.values():
        if not isinstance(group, Mapping):
            return False
        activations += [group.get("input_activations"), group.get("output_activations")]
    return all(each is None or _is_by_rows(each) for each in activations)


def _is_by_rows(scheme: Any) -> bool:
    if not isinstance(scheme, Mapping):
        return False
    return scheme.get("dynamic") is False or scheme.get("strategy") in BY_ROWS

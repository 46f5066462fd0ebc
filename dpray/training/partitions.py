"""Under ZeRO 3 a rank holds a part of each parameter. These functions take parameters that are
whole, too.

A parameter's parts are equally long, in the order of the ranks; the last ones are padded.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether DeepSpeed keeps the parameter in parts, though it may be gathered just now."""
    return hasattr(parameter, "ds_id")


def shape_of(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter."""
    return parameter.ds_shape if is_partitioned(parameter) else parameter.shape


def gathered(parameter: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which every rank holds the whole parameter; all enter it together."""
    if not is_partitioned(parameter):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameter)


def own_part(parameter: Any, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of `whole`, which is shaped like the parameter, that belongs to a rank."""
    length = parameter.ds_tensor.ds_numel
    mine = whole.reshape(-1)[length * rank : length * (rank + 1)]
    return torch.nn.functional.pad(mine, (0, length - len(mine)))


def put(parameter: Any, whole: torch.Tensor) -> None:
    """Set the parameter to `whole`; where it is in parts, set this rank's part."""
    with torch.no_grad():
        if is_partitioned(parameter):
            parameter.ds_tensor.copy_(own_part(parameter, whole, torch.distributed.get_rank()))
        else:
            parameter.copy_(whole)

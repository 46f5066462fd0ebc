"""Gradient checkpointing (Chen et al. 2016): activations of a model's blocks are not kept but
computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dpray.training.ghost_norms import NoNormRule
from dpray.training.ghost_recording import GhostNorms


def checkpoint_blocks(model: nn.Module, ghost: GhostNorms) -> None:
    """Transformers' own switch works in training mode only, where dropout is on.

    Raises NoNormRule where the model has no blocks.
    """
    blocks = [m for m in model.modules() if _is_block(m)]
    if not blocks:
        raise NoNormRule(
            f"method.gradient_checkpointing: {type(model).__name__} has no blocks for it"
        )
    for block in blocks:
        block.forward = _checkpointed(block.forward, ghost)


def _is_block(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _checkpointed(forward: Callable[..., Any], ghost: GhostNorms) -> Callable[..., Any]:
    def checkpointed(x: torch.Tensor, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *args, **named)
        if not x.requires_grad:  # the norms' backward pass has to get to every block
            x = x.detach().requires_grad_()
        # The whole block again, so that every layer's input is seen.
        with ghost.block(x), set_checkpoint_early_stop(False):
            return checkpoint(
                forward, x, *args, use_reentrant=False, preserve_rng_state=False, **named
            )

    return checkpointed

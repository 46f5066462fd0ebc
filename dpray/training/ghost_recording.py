"""`GhostNorms` records the layers' inputs in a forward pass and their outputs' gradients in the
backward pass: `dpray.training.ghost_norms` makes norms and clipped sums of them.

With gradient checkpointing (Chen et al. 2016) the activations of a model's blocks are not kept but
computed again in the backward pass. Layers in such blocks keep no inputs: their norms are computed
in the backward pass at once. B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dpray.training.ghost_norms import NoNormRule, Part, Rule, rule_of, squared_norms


@dataclass(frozen=True)
class _Layer:
    name: str
    rule: Rule
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class _Call:
    """Notes one use of a layer in the forward pass."""

    layer: _Layer
    input: torch.Tensor = field(repr=False)
    output: torch.Tensor = field(repr=False)


@dataclass(repr=False)
class _Recording:
    """Follows one forward pass and the backward pass after it."""

    calls: list[_Call] = field(default_factory=list)
    block_inputs: list[torch.Tensor] = field(default_factory=list)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Holds, for each layer of a checkpointed block, the input, computed anew in the backward pass,
    and the output's gradient. Whichever comes first waits for the other."""
    squared: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    in_block: bool = False
    """It is True while the forward pass is inside a checkpointed block."""
    examples: int = 0
    """It is 0 until the backward pass begins."""

    def square(self, layer: _Layer) -> None:
        """Compute the layer's squared norms once both its input and its gradient are there."""
        if layer.name not in self.inputs or layer.name not in self.gradients:
            return
        a, g = self.inputs.pop(layer.name), self.gradients.pop(layer.name)
        parts = _parts(layer, a, g, self.examples)
        for parameter, part in zip(layer.parameters, parts, strict=True):
            if parameter in self.squared:
                raise NoNormRule(f"{layer.name}: in a checkpointed block, and used more than once")
            self.squared[parameter] = squared_norms([part])


@dataclass(frozen=True)
class Recorded:
    """Holds the losses (B,) of B examples, the parts of each parameter's per-example gradients, and
    instead of the parts, for layers in checkpointed blocks, the squared norms (B,), float64. A
    parameter without a gradient is in neither."""

    losses: torch.Tensor = field(repr=False)
    parts: dict[nn.Parameter, list[Part]] = field(repr=False)
    squared: dict[nn.Parameter, torch.Tensor] = field(repr=False)

    def squared_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        return {p: squared_norms(parts) for p, parts in self.parts.items()} | self.squared


class GhostNorms:
    """Records the inputs and the outputs' gradients of the trainable layers of `model`.

    Raises NoNormRule at once where a trainable layer has no rule, so that no gradient goes
    unaccounted; `dpray.training.clipped_loss.check_norm_rules` finds what class names do not show.
    """

    def __init__(self, model: nn.Module) -> None:
        self._recording: _Recording | None = None
        for name, module in model.named_modules():
            own = tuple(p for p in module.parameters(recurse=False) if p.requires_grad)
            if own:
                layer = _Layer(name, rule_of(name, module), own)
                module.register_forward_pre_hook(self._before(layer))
                module.register_forward_hook(self._after(layer))

    def record(self, forward: Callable[[], torch.Tensor]) -> Recorded:
        """Record `forward`, which returns the losses (B,), and the backward pass from their sum.

        The losses have to be the model's own: a training engine's output may carry a scale into the
        backward pass, and norms that are too small by it are a silent loss of privacy.
        """
        recording = self._recording = _Recording()
        try:
            losses_B = forward()
            recording.examples = len(losses_B)
            outputs = [call.output for call in recording.calls]
            gradients = torch.autograd.grad(
                losses_B.sum(), [*outputs, *recording.block_inputs], allow_unused=True
            )
        finally:
            self._recording = None
        if unused := list(recording.gradients):
            raise NoNormRule(f"{unused[0]}: its checkpointed block was not computed again")
        parts: dict[nn.Parameter, list[Part]] = {}
        for call, gradient in zip(recording.calls, gradients, strict=False):
            if gradient is None:
                continue  # not on the way to the loss
            found = _parts(call.layer, call.input, gradient, len(losses_B))
            for parameter, part in zip(call.layer.parameters, found, strict=True):
                parts.setdefault(parameter, []).append(part)
        if shared := parts.keys() & recording.squared.keys():
            raise NoNormRule(
                f"{len(shared)} parameters are used in a checkpointed block and outside"
            )
        return Recorded(losses_B.detach(), parts, recording.squared)

    @contextmanager
    def block(self, x: torch.Tensor) -> Iterator[None]:
        """Enter a checkpointed block, whose input is `x`, in the forward pass."""
        if (recording := self._recording) is None:
            yield
            return
        recording.block_inputs.append(x)
        recording.in_block = True
        try:
            yield
        finally:
            recording.in_block = False

    def _before(self, layer: _Layer) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if (recording := self._recording) is not None and recording.examples:
                recording.inputs[layer.name] = inputs[0].detach()
                recording.square(layer)

        return hook

    def _after(self, layer: _Layer) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
            if (recording := self._recording) is None or recording.examples:
                return
            if len(inputs) != 1 or not isinstance(output, torch.Tensor):
                raise NoNormRule(f"{layer.name}: not called with one tensor for one tensor")
            if not recording.in_block:
                recording.calls.append(_Call(layer, inputs[0].detach(), output))
            elif output.requires_grad:
                on_gradient = partial(self._gradient, layer, recording)
                output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

        return hook

    @staticmethod
    def _gradient(layer: _Layer, recording: _Recording, gradient: torch.Tensor) -> None:
        recording.gradients[layer.name] = gradient
        recording.square(layer)


def _parts(layer: _Layer, a: torch.Tensor, g: torch.Tensor, examples: int) -> list[Part]:
    """Apply the layer's rule to its input and its output's gradient, as (B, T, features) in
    float32, or (B, T) ids."""
    if len(a) != examples or len(g) != examples:
        raise NoNormRule(
            f"{layer.name}: the first dimension of its input or output is not the examples, "
            "so their gradients cannot be told apart"
        )
    if a.is_floating_point():
        a = a.reshape(examples, -1, a.shape[-1]).float()
    else:
        a = a.reshape(examples, -1)
    return layer.rule(a, g.reshape(examples, -1, g.shape[-1]).float())


def checkpoint_blocks(model: nn.Module, ghost: GhostNorms) -> None:
    """Checkpoint the model's blocks. Transformers' own switch works in training mode only, where
    dropout is on.

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
        if not x.requires_grad:  # the norms' backward pass has to reach every block
            x = x.detach().requires_grad_()
        # Without an early stop the whole block is computed again, and every layer's input recorded.
        with ghost.block(x), set_checkpoint_early_stop(False):
            return checkpoint(
                forward, x, *args, use_reentrant=False, preserve_rng_state=False, **named
            )

    return checkpointed

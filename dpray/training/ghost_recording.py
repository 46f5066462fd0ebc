"""What the layers of a model see in a forward pass, and the gradients of what they give: all that
the norms and the clipped sums of per-example gradients are made of (`dpray.training.ghost_norms`).

Layers in checkpointed blocks (`dpray.training.checkpointing`) keep nothing: their inputs are
computed again in the backward pass and made to norms at once. B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from dpray.training.ghost_norms import NoNormRule, Part, Rule, rule_of, squared_norms


@dataclass(frozen=True)
class _Call:
    """One use of a layer in the forward pass."""

    layer: _Layer
    input: torch.Tensor = field(repr=False)
    output: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class _Layer:
    name: str
    rule: Rule
    parameters: tuple[nn.Parameter, ...]


@dataclass(repr=False)
class _Recording:
    """What is known of one forward pass, and of the backward pass after it."""

    calls: list[_Call] = field(default_factory=list)
    block_inputs: list[torch.Tensor] = field(default_factory=list)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the layers of a block in the backward pass, by name: the input, from when it was computed
    again, and the output's gradient. Whichever comes first waits for the other."""
    squared: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    block: bool = False
    """Whether one is being computed."""
    examples: int = 0
    """0 until the backward pass begins."""

    def in_block(self, layer: _Layer) -> None:
        """To be called when either is there."""
        if layer.name not in self.inputs or layer.name not in self.gradients:
            return
        a, g = self.inputs.pop(layer.name), self.gradients.pop(layer.name)
        for parameter, part in zip(
            layer.parameters, _parts(layer, a, g, self.examples), strict=True
        ):
            if parameter in self.squared:
                raise NoNormRule(f"{layer.name}: in a checkpointed block, and used more than once")
            self.squared[parameter] = squared_norms([part])


@dataclass(frozen=True)
class Seen:
    """Of B examples: their losses (B,); what each parameter's per-example gradients are made of;
    and in its place, for layers in checkpointed blocks, their squared norms (B,), float64. A
    parameter without a gradient is in neither."""

    losses: torch.Tensor = field(repr=False)
    parts: dict[nn.Parameter, list[Part]] = field(repr=False)
    squared: dict[nn.Parameter, torch.Tensor] = field(repr=False)

    def squared_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        return {p: squared_norms(parts) for p, parts in self.parts.items()} | self.squared


class GhostNorms:
    """Records what the layers of `model` see and the gradients of what they give.

    Raises NoNormRule at once where a trainable layer has no rule, so that no gradient goes
    unaccounted; `dpray.training.clipped_loss.check_norm_rules` finds what class names cannot tell.
    """

    def __init__(self, model: nn.Module) -> None:
        self._recording: _Recording | None = None
        for name, module in model.named_modules():
            own = tuple(p for p in module.parameters(recurse=False) if p.requires_grad)
            if own:
                layer = _Layer(name, rule_of(name, module), own)
                module.register_forward_pre_hook(self._before(layer))
                module.register_forward_hook(self._after(layer))

    def see(self, forward: Callable[[], torch.Tensor]) -> Seen:
        """`forward` returns the losses (B,).

        They have to be the model's own: a training engine's output may carry a scale into the
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
        if unseen := list(recording.gradients):
            raise NoNormRule(f"{unseen[0]}: its checkpointed block was not computed again")
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
        return Seen(losses_B.detach(), parts, recording.squared)

    @contextmanager
    def block(self, x: torch.Tensor) -> Iterator[None]:
        """Around a checkpointed block, whose input is `x`: what its layers see is not kept but
        computed again in the backward pass, and made to norms at once."""
        if (recording := self._recording) is None:
            yield
            return
        recording.block_inputs.append(x)
        recording.block = True
        try:
            yield
        finally:
            recording.block = False

    def _before(self, layer: _Layer) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if (recording := self._recording) is not None and recording.examples:
                recording.inputs[layer.name] = inputs[0].detach()
                recording.in_block(layer)

        return record

    def _after(self, layer: _Layer) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
            if (recording := self._recording) is None or recording.examples:
                return
            if len(inputs) != 1 or not isinstance(output, torch.Tensor):
                raise NoNormRule(f"{layer.name}: not called with one tensor for one tensor")
            if not recording.block:
                recording.calls.append(_Call(layer, inputs[0].detach(), output))
            elif output.requires_grad:
                hook = partial(self._gradient, layer, recording)
                output.register_hook(hook)  # type: ignore[no-untyped-call]

        return record

    @staticmethod
    def _gradient(layer: _Layer, recording: _Recording, gradient: torch.Tensor) -> None:
        recording.gradients[layer.name] = gradient
        recording.in_block(layer)


def _parts(layer: _Layer, a: torch.Tensor, g: torch.Tensor, examples: int) -> list[Part]:
    """The layer's rule for its input and its output's gradient, as (B, T, features) in float32, or
    (B, T) ids."""
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

"""`GhostNorms` records what per-example gradients are made of, in one forward and one backward pass
(Li et al. 2022b, section 4, "ghost clipping"; Bu et al. 2022 and 2023, "book-keeping").

Each kind of layer has a rule: it makes the parts of its parameters' gradients (`gradient_parts.py`)
of the layer's input and its output's gradient. B examples, T positions, M x N a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dpray.methods.dp_sgd.training.gradient_parts import (
    FORMED_AT_ONCE,
    Gathered,
    GradientPart,
    Lookup,
    Outer,
    Whole,
    outer_part,
    rounded_down,
    squared_norms,
    weighted_sum,
    whole,
)
from dpray.types import InputError


class NoNormRule(InputError):
    """A trainable layer has no rule for its per-example gradient norms."""


Rule = Callable[[torch.Tensor, torch.Tensor], list[GradientPart]]
"""A `Rule` maps a layer's input and its output's gradient to one part for each trainable parameter,
in the order of `named_parameters`."""


def rule_of(name: str, module: nn.Module) -> Rule:
    """Return the rule for `module`'s trainable parameters.

    Conv1D (GPT-2's linear layer with a transposed weight) and the models' RMS norms are recognised
    by their class names. Raises NoNormRule that names the layer.
    """
    trainable = {n for n, p in module.named_parameters(recurse=False) if p.requires_grad}
    weight_part = _weight_part(name, module)
    if weight_part is None or not trainable <= {"weight", "bias"}:
        raise NoNormRule(
            f"{name} ({type(module).__name__}) has trainable parameters {sorted(trainable)} and no "
            "rule for the norms of their gradients: freeze it, or use LoRA on linear layers"
        )

    def rule(a: torch.Tensor, g_BTM: torch.Tensor) -> list[GradientPart]:
        found = [weight_part(a, g_BTM)] if "weight" in trainable else []
        if "bias" in trainable:
            found.append(Whole(g_BTM.sum(1, dtype=torch.float32)))
        return found

    return rule


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a linear layer: torch's, or GPT-2's with a transposed weight."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _weight_part(
    name: str, module: nn.Module
) -> Callable[[torch.Tensor, torch.Tensor], GradientPart] | None:
    """Return the part that a layer's input and its output's gradient give to its weight, or None
    for a layer that is not known."""
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        return lambda a_BTN, g_BTM: outer_part(g_BTM, a_BTN)
    if kind == "Conv1D":
        return outer_part
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        normalised = partial(
            nn.functional.layer_norm, normalized_shape=module.normalized_shape, eps=module.eps
        )
        return lambda a_BTN, g_BTN: Whole((g_BTN * normalised(a_BTN)).sum(1))
    if isinstance(module, nn.RMSNorm) or kind.endswith("RMSNorm"):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float):
            raise NoNormRule(f"{name} ({kind}): no eps to compute its norm with")
        return lambda a_BTN, g_BTN: Whole(
            (g_BTN * (a_BTN * torch.rsqrt(a_BTN.pow(2).mean(-1, keepdim=True) + eps))).sum(1)
        )
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise NoNormRule(f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse")
        if (padding_idx := module.padding_idx) is not None:  # torch gives this row no gradient
            return lambda ids_BT, g_BTN: Lookup(
                ids_BT, g_BTN * (ids_BT != padding_idx).unsqueeze(-1)
            )
        return Lookup
    return None


@dataclass(frozen=True)
class _Layer:
    name: str
    rule: Rule
    parameters: tuple[nn.Parameter, ...]


@dataclass(repr=False)
class Recorded:
    """The losses (B,) of B examples and the parts of each parameter's per-example gradients.
    `parts` has the parameters in the order of the backward pass, whatever the shapes: ranks add up
    their gradients in it. Those whose gradients are `gathered` have none there."""

    losses: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    parts: dict[nn.Parameter, list[GradientPart]] = field(default_factory=dict)
    gathered: Gathered | None = None

    def all_parts(self) -> dict[nn.Parameter, list[GradientPart]]:
        return self.parts | (self.gathered.parts() if self.gathered else {})

    def norms(self) -> torch.Tensor:
        """Return the examples' norms over all parameters, bounded from above: (B,), float64."""
        own = [parts for parts in self.parts.values() if parts]
        squares = [squared_norms(own).sum(0)] if own else []
        if self.gathered:
            squares.append(self.gathered.squared_norms())
        return torch.stack(squares).sum(0).sqrt()

    def squared_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        parts = self.all_parts()
        return dict(zip(parts, squared_norms(parts.values()), strict=True))

    def weighted_sums(self, weight_B: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Return `sum_i weight_i g_i` for each parameter, g_i its gradient for example i. Where
        bfloat16 rows are multiplied, the weights are rounded down: for all parameters, as the parts
        of a gradient may cancel out."""
        outer = (p for found in self.parts.values() for p in found if isinstance(p, Outer))
        if any(part.left.dtype == torch.bfloat16 for part in outer):
            weight_B = rounded_down(weight_B)
        sums = self.gathered.weighted_sums(weight_B) if self.gathered else {}
        return {
            p: weighted_sum(parts, weight_B, p.detach()) if parts else sums[p]
            for p, parts in self.parts.items()
        }

    def of(self, counted_B: torch.Tensor) -> Recorded:
        """Return what was recorded of these examples only. The parts of the others may not be
        finite: no weight would make them 0."""
        parts = {
            p: [replace(part, **{n: x[counted_B] for n, x in vars(part).items()}) for part in found]
            for p, found in self.parts.items()
        }
        gathered = self.gathered
        if gathered:
            gathered = replace(gathered, rows=gathered.rows[counted_B])
        return Recorded(self.losses[counted_B], parts, gathered)

    def gather(self) -> None:
        """End the recording: gather the gradients that were formed, but for large ones, which
        would be in memory twice."""
        formed = {
            p: gradient
            for p, parts in self.parts.items()
            if (gradient := whole(parts)) is not None and gradient[0].numel() <= FORMED_AT_ONCE
        }
        if formed:
            self.gathered = Gathered.of(formed)
            self.parts |= {p: [] for p in formed}

    def add(self, layer: _Layer, a: torch.Tensor, g: torch.Tensor) -> None:
        """Note a use of the layer, by its input and its output's gradient: the last use first."""
        B = self.losses.shape[0]
        if a.shape[0] != B or g.shape[0] != B:
            raise NoNormRule(
                f"{layer.name}: the first dimension of its input or output is not the examples, "
                "so their gradients cannot be told apart"
            )
        # As (B, T, features), or (B, T) ids.
        a = a.reshape(B, -1, a.shape[-1]) if a.is_floating_point() else a.reshape(B, -1)
        g = g.reshape(B, -1, g.shape[-1])
        if a.dtype != g.dtype:  # the layer did not compute in bfloat16
            a, g = a.float() if a.is_floating_point() else a, g.float()
        parts = layer.rule(a, g)
        for parameter, part in zip(layer.parameters, parts, strict=True):
            self.parts.setdefault(parameter, []).insert(0, part)


class GhostNorms:
    """Records the inputs and the outputs' gradients of the trainable layers of `model`.

    Raises NoNormRule at once if a trainable layer has no rule, so that no gradient goes
    unaccounted; `clipped_loss.check_norm_rules` finds what class names do not show.
    """

    def __init__(self, model: nn.Module) -> None:
        self._recorded: Recorded | None = None
        self._source = torch.zeros((), requires_grad=True)
        """Every recorded output depends on it, the first ones by themselves and the others by their
        inputs: the backward pass towards it reaches them all, and forms no parameter's gradient."""
        for name, module in model.named_modules():
            own = tuple(p for p in module.parameters(recurse=False) if p.requires_grad)
            if own:
                layer = _Layer(name, rule_of(name, module), own)
                module.forward = partial(self._watched, layer, module.forward)

    def record(self, forward: Callable[[], torch.Tensor]) -> Recorded:
        """Record `forward`, which returns the losses (B,), and the backward pass from their sum.

        The losses have to be the model's own: a training engine's output may carry a scale into the
        backward pass, and norms that are too small by it are a silent loss of privacy.
        """
        with self.recording() as recorded:
            losses_B = forward()
            recorded.losses = losses_B.detach()
            torch.autograd.grad(losses_B.sum(), self._source, allow_unused=True)
        return recorded

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Record the forward and the backward pass that are made within. `losses` have to be set
        between the two."""
        recorded = self._recorded = Recorded()
        try:
            yield recorded
        finally:
            self._recorded = None
        recorded.gather()

    def _watched(
        self, layer: _Layer, forward: Callable[..., Any], *inputs: Any, **named: Any
    ) -> object:
        """Run a layer's forward pass, and have the backward pass record the use."""
        output = forward(*inputs, **named)
        if self._recorded is None:
            return output
        if len(inputs) != 1 or named or not isinstance(output, torch.Tensor):
            raise NoNormRule(f"{layer.name}: not called with one tensor for one tensor")
        # What is done in place on a view, as a layer with a bias returns, cuts off the view's node.
        if not inputs[0].requires_grad or output._is_view():
            output = _Sourced.apply(output, self._source)  # type: ignore[no-untyped-call]
        use, place = [(self._recorded, inputs[0].detach())], output.output_nr

        def record(gradients: tuple[torch.Tensor | None, ...]) -> None:
            recorded, a = use.pop()  # the graph may outlive what was recorded
            if (gradient := gradients[place]) is not None:  # a fused kernel has other outputs, too
                recorded.add(layer, a, gradient)

        # Called with what the layer's own backward pass is called with, after any hook of a tensor.
        output.grad_fn.register_prehook(record)
        return output


class _Sourced(torch.autograd.Function):
    """Passes a layer's output on, and makes it depend on a source, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None

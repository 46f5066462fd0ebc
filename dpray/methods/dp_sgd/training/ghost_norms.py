"""Norms and clipped sums of per-example gradients without forming the gradients (Li et al. 2022b,
section 4, "ghost clipping"; Bu et al. 2022 and 2023, "book-keeping").

A linear layer's gradient for one example is `sum_t g_t a_t^T`, g_t the gradient of that example's
loss with respect to the layer's output at position t, a_t its input. Its squared norm is
`sum_{t,t'} (g_t . g_t') (a_t . a_t')`: T x T numbers instead of a matrix of the weight's size. The
terms may cancel out, so they are added up in float64. A matrix that is smaller than its a_t and
g_t, such as an adapter's, is formed. The weight of a lookup is the same with one-hot a_t; a
parameter that is used in several places (tied embeddings) has the gradients' sum, so the inner
products of its parts are added. `GhostNorms` has the a_t and g_t from one forward and one backward
pass.

Legend: B examples, T positions (U: of another use of the same parameter), M x N a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from dpray.types import InputError


class NoNormRule(InputError):
    """A trainable layer has no rule for its per-example gradient norms."""


def rounded_down(weight_B: torch.Tensor) -> torch.Tensor:
    """Return float32 weights, not negative, cut down to the 8 significant bits of bfloat16."""
    return (weight_B.view(torch.int32) & -(2**16)).view(torch.float32)


def in_two(x_BTN: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """Return `weight_i x_i` as the sum of two bfloat16 numbers, one after the other along T: the
    product itself for `rounded_down` weights, as 8 bits by 8 are 16."""
    product_BTN = x_BTN * weight_B[:, None, None]  # float32
    high_BTN = product_BTN.bfloat16()
    return torch.cat([high_BTN, (product_BTN - high_BTN).bfloat16()], 1)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return `x @ y` of matrices, or of batches of matrices. The products of bfloat16 numbers are
    exact, and added up in float32."""
    if x.dtype != torch.bfloat16:
        return x @ y
    if not x.is_cuda:
        return x.float() @ y.float()
    multiply = torch.mm if x.dim() == 2 else torch.bmm
    return multiply(x, y, out_dtype=torch.float32)


@dataclass(frozen=True, repr=False)
class Outer:
    """Stands for the gradient `sum_t left_t right_t^T` of a matrix: (B, T, M) and (B, T, N), both
    in float32 or both in bfloat16. Weights of bfloat16 rows have to be `rounded_down`."""

    left: torch.Tensor
    right: torch.Tensor

    def weighted_sum(self, weight_B: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        left, right = self.left, self.right
        if left.dtype != torch.bfloat16:
            left = left * weight_B[:, None, None]
        elif left.shape[2] <= right.shape[2]:
            left, right = in_two(left, weight_B), right.repeat(1, 2, 1)
        else:
            left, right = left.repeat(1, 2, 1), in_two(right, weight_B)
        return _product(left.flatten(0, 1).T, right.flatten(0, 1))


@dataclass(frozen=True, repr=False)
class Lookup:
    """Stands for the gradient `sum_t e_{ids_t} row_t^T` of a matrix, e the unit vectors: (B, T) and
    (B, T, N)."""

    ids: torch.Tensor
    row: torch.Tensor

    def weighted_sum(self, weight_B: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        row_BTN = self.row * weight_B[:, None, None]
        return torch.zeros_like(of).index_add_(0, self.ids.flatten(), row_BTN.flatten(0, 1))


@dataclass(frozen=True, repr=False)
class Whole:
    """The gradient itself, of a vector or a small matrix: (B, N) or (B, M, N)."""

    gradient: torch.Tensor

    def weighted_sum(self, weight_B: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return (weight_B @ self.gradient.flatten(1)).view_as(of)


COLUMNS_AT_ONCE = 2048
"""The columns of a matrix that are made float64 at once."""

NORM_ROUNDING = 2.0**-21
"""A bound on a squared norm is above it by this share of the squared sum of the terms' norms."""

GradientPart = Outer | Lookup | Whole
"""One use of a parameter adds a `GradientPart` to its per-example gradients."""

Rule = Callable[[torch.Tensor, torch.Tensor], list[GradientPart]]
"""A `Rule` maps a layer's input and its output's gradient to one part for each trainable parameter,
in the order of `named_parameters`."""


def inner_products(first: GradientPart, second: GradientPart) -> torch.Tensor:
    """Return each example's inner product of two parts of one parameter's gradient: shape (B,),
    float64."""
    match first, second:
        case Whole(gradient), Whole(other):
            return (gradient.double() * other.double()).flatten(1).sum(1)
        case Whole(gradient), Outer() | Lookup():
            return inner_products(first, _formed(second, gradient))
        case (_, Whole()) | (Outer(), Lookup()):
            return inner_products(second, first)
        case Lookup(ids, row), Outer(left, right):
            places = ids.unsqueeze(1).expand(-1, left.shape[1], -1)
            left_BUT = left.gather(2, places)
            return (left_BUT * _row_products(right, row)).sum((1, 2))
        case Lookup(ids, row), Lookup(other_ids, other_row):
            same_BTU = ids.unsqueeze(2) == other_ids.unsqueeze(1)
            return (same_BTU * _row_products(row, other_row)).sum((1, 2))
        case Outer(left, right), Outer(other_left, other_right):
            lefts_BTU = _row_products(left, other_left)
            return (lefts_BTU * _row_products(right, other_right)).sum((1, 2))
    raise TypeError("not a part")


def _formed(part: Outer | Lookup, like_BMN: torch.Tensor) -> Whole:
    """Return a part of a small matrix's gradient as the gradient itself, in float64."""
    if isinstance(part, Outer):
        return Whole(part.left.double().mT @ part.right.double())
    places = part.ids.unsqueeze(-1).expand_as(part.row)
    zeros_BMN = torch.zeros_like(like_BMN, dtype=torch.float64)
    return Whole(zeros_BMN.scatter_add_(1, places, part.row.double()))


def _row_products(x_BTN: torch.Tensor, y_BUN: torch.Tensor) -> torch.Tensor:
    """Return `x @ y.mT`, (B, T, U), float64, without a copy of a whole operand in float64: one may
    be as large as the logits."""
    total_BTU = x_BTN.new_zeros(x_BTN.shape[:2] + y_BUN.shape[1:2], dtype=torch.float64)
    for start in range(0, x_BTN.shape[2], COLUMNS_AT_ONCE):
        x = x_BTN[..., start : start + COLUMNS_AT_ONCE].double()
        y = x if x_BTN is y_BUN else y_BUN[..., start : start + COLUMNS_AT_ONCE].double()
        total_BTU.baddbmm_(x, y.mT)
    return total_BTU


def _sizes(part: GradientPart) -> torch.Tensor:
    """Return the sums over positions of the norms of an example's terms: (B,), float64. Whatever
    cancels out in the gradient's norm is in them."""
    match part:
        case Outer(left, right):
            return (_norms(left) * _norms(right)).sum(1)
        case Lookup(_, row):
            return _norms(row).sum(1)
        case Whole(gradient):
            return _norms(gradient.flatten(1))


def _norms(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return found


def _gradient(parts: Sequence[GradientPart]) -> torch.Tensor | None:
    """Return the gradient itself if it is all that was recorded."""
    return parts[0].gradient if len(parts) == 1 and isinstance(parts[0], Whole) else None


def squared_norms(parts: Sequence[GradientPart]) -> torch.Tensor:
    """Return bounds on the squared norms of a parameter's per-example gradients, each the sum of
    `parts`: shape (B,), float64.

    Claim: with x the bound of an example and w a float32 number of at most `C / sqrt(x)`, rounded
    to nearest or down, what `Recorded.weighted_sums` adds up for that example has a norm of at most
    C, before the rounding of that addition. With several parameters the same holds for the sum of
    the bounds.
    Proof: docs/privacy.md, section 5.2.
    """
    if (gradient := _gradient(parts)) is not None:
        return (1.0 + NORM_ROUNDING) * _norms(gradient.flatten(1)).square()
    products = [
        (1.0 if first is second else 2.0) * inner_products(first, second)
        for i, first in enumerate(parts)
        for second in parts[: i + 1]
    ]
    size_B = torch.stack([_sizes(part) for part in parts]).sum(0)
    found_B = torch.stack(products).sum(0).clamp(min=0.0)  # NaN stays NaN
    return found_B + NORM_ROUNDING * size_B.square()


def _weighted_sum(
    parts: Sequence[GradientPart], weight_B: torch.Tensor, of: torch.Tensor
) -> torch.Tensor:
    return reduce(torch.Tensor.add_, [part.weighted_sum(weight_B, of) for part in parts])


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
        return lambda a_BTN, g_BTM: _outer(g_BTM, a_BTN)
    if kind == "Conv1D":
        return _outer
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


def _outer(left_BTM: torch.Tensor, right_BTN: torch.Tensor) -> GradientPart:
    """Return the gradient of a matrix, formed if that takes no more memory: a rule on shapes."""
    (_, T, M), N = left_BTM.shape, right_BTN.shape[2]
    if T * (M + N) * left_BTM.element_size() < M * N * 4:
        return Outer(left_BTM, right_BTN)
    # A CPU multiplies a matrix of few rows four times as fast as one of few columns.
    if M <= N:
        return Whole(_product(left_BTM.mT, right_BTN))
    return Whole(_product(right_BTN.mT, left_BTM).mT)


@dataclass(frozen=True)
class _Layer:
    name: str
    rule: Rule
    parameters: tuple[nn.Parameter, ...]


@dataclass(repr=False)
class Recorded:
    """The losses (B,) of B examples and the parts of each parameter's per-example gradients; a
    parameter without a gradient has none."""

    losses: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    parts: dict[nn.Parameter, list[GradientPart]] = field(default_factory=dict)

    def norms(self) -> torch.Tensor:
        """Return the examples' norms over all parameters, bounded from above: (B,), float64."""
        return torch.stack(list(self.squared_norms().values())).sum(0).sqrt()

    def squared_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        return {p: squared_norms(parts) for p, parts in self.parts.items()}

    def weighted_sums(self, weight_B: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Return `sum_i weight_i g_i` for each parameter, g_i its gradient for example i. Where
        bfloat16 rows are multiplied, the weights are rounded down: for all parameters, as the parts
        of a gradient may cancel out."""
        outer = (p for found in self.parts.values() for p in found if isinstance(p, Outer))
        if any(part.left.dtype == torch.bfloat16 for part in outer):
            weight_B = rounded_down(weight_B)
        return {p: _weighted_sum(parts, weight_B, p.detach()) for p, parts in self.parts.items()}

    def of(self, counted_B: torch.Tensor) -> Recorded:
        """Return what was recorded of these examples only. The parts of the others may not be
        finite: no weight would make them 0."""
        parts = {
            p: [replace(part, **{n: x[counted_B] for n, x in vars(part).items()}) for part in found]
            for p, found in self.parts.items()
        }
        return Recorded(self.losses[counted_B], parts)

    def add(self, layer: _Layer, a: torch.Tensor, g: torch.Tensor) -> None:
        """Note a use of the layer, by its input and its output's gradient: the last use first."""
        B = len(self.losses)
        if len(a) != B or len(g) != B:
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
        """Every recorded output depends on it: the backward pass towards it reaches them all, and
        forms no gradient of a parameter."""
        for name, module in model.named_modules():
            own = tuple(p for p in module.parameters(recurse=False) if p.requires_grad)
            if own:
                layer = _Layer(name, rule_of(name, module), own)
                module.register_forward_hook(partial(self._watch, layer))

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

    def _watch(
        self, layer: _Layer, _: nn.Module, inputs: tuple[torch.Tensor, ...], output: object
    ) -> torch.Tensor | None:
        if self._recorded is None:
            return None
        if len(inputs) != 1 or not isinstance(output, torch.Tensor):
            raise NoNormRule(f"{layer.name}: not called with one tensor for one tensor")
        add = partial(self._recorded.add, layer)
        watched: torch.Tensor = _Watched.apply(output, inputs[0].detach(), self._source, add)  # type: ignore[no-untyped-call]
        return watched


class _Watched(torch.autograd.Function):
    """Passes a layer's output on; the backward pass calls `add` with the layer's input and the
    output's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        a: torch.Tensor,
        source: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(a)
        ctx.add = add
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.add(*ctx.saved_tensors, gradient)
        ctx.add = None  # the graph may outlive what was recorded
        return gradient, None, None, None

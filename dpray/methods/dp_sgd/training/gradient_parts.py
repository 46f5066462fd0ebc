"""The parts of per-example gradients, with their norms and weighted sums.

A linear layer's gradient for one example is `sum_t g_t a_t^T`, g_t the gradient of that example's
loss with respect to the layer's output at position t, a_t its input. Its squared norm is
`sum_{t,t'} (g_t . g_t') (a_t . a_t')`: T x T numbers instead of a matrix of the weight's size (Li
et al. 2022b, section 4, "ghost clipping"). The terms may cancel out, so they are added up in
float64. A matrix that is smaller than its a_t and g_t, such as an adapter's, is formed. The weight
of a lookup is the same with one-hot a_t; a parameter that is used in several places (tied
embeddings) has the gradients' sum, so the inner products of its parts are added.

Legend: B examples, T positions (U: of another use of the same parameter), M x N a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn


def rounded_down(weight_B: torch.Tensor) -> torch.Tensor:
    """Return float32 weights, not negative, cut down to the 8 significant bits of bfloat16."""
    return (weight_B.view(torch.int32) & -(2**16)).view(torch.float32)


def in_two(x_BTN: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """Return `weight_i x_i` as the sum of two bfloat16 numbers, one after the other along T: the
    product itself for `rounded_down` weights, as 8 bits by 8 are 16."""
    product_BTN = x_BTN * weight_B[:, None, None]  # float32
    high_BTN = product_BTN.bfloat16()
    return torch.cat([high_BTN, (product_BTN - high_BTN).bfloat16()], 1)


def weighted_in_two(
    left: torch.Tensor, right: torch.Tensor, weight_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bfloat16 rows, twice as many, the smaller ones with their weights."""
    if left.shape[2] <= right.shape[2]:
        return in_two(left, weight_B), right.repeat(1, 2, 1)
    return left.repeat(1, 2, 1), in_two(right, weight_B)


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
        if left.dtype == torch.bfloat16 and left.is_cuda:
            left, right = weighted_in_two(left, right, weight_B)
        else:  # float32 holds products of 16 bits by 8
            left = left * weight_B[:, None, None]
            right = right.to(left.dtype)
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


def _square_and_size(part: GradientPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part's squared norm, and the sum over positions of the norms of its terms, in which
    is whatever cancels out: (B,), float64."""
    match part:
        case Outer(left, right):
            lefts_BTT, rights_BTT = _row_products(left, left), _row_products(right, right)
            terms_BT = (_diagonals(lefts_BTT) * _diagonals(rights_BTT)).sqrt()
            return (lefts_BTT * rights_BTT).sum((1, 2)), terms_BT.sum(1)
        case Lookup(ids, row):
            rows_BTT = _row_products(row, row)
            same_BTT = ids.unsqueeze(2) == ids.unsqueeze(1)
            return (same_BTT * rows_BTT).sum((1, 2)), _diagonals(rows_BTT).sqrt().sum(1)
        case Whole(gradient):
            norm_B = _norms(gradient.flatten(1))
            return norm_B.square(), norm_B


def _diagonals(x_BTT: torch.Tensor) -> torch.Tensor:
    return x_BTT.diagonal(dim1=1, dim2=2)


def _norms(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return found


def whole(parts: Sequence[GradientPart]) -> torch.Tensor | None:
    """Return the gradient itself if it is all that was recorded."""
    return parts[0].gradient if len(parts) == 1 and isinstance(parts[0], Whole) else None


def squared_norms(gradients: Iterable[Sequence[GradientPart]]) -> torch.Tensor:
    """Return bounds on the squared norms of per-example gradients, a row for each parameter and its
    parts: shape (P, B), float64.

    Claim: with x the sum of an example's bounds and w a float32 number of at most `C / sqrt(x)`,
    rounded to nearest or down, what `Recorded.weighted_sums` adds up for that example has a norm of
    at most C, before the rounding of that addition.
    Proof: docs/privacy.md, section 5.2.
    """
    squares, sizes = zip(*map(_squares_and_sizes, gradients), strict=True)
    return _bounds(torch.stack(squares), torch.stack(sizes))


def _bounds(square: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return square.clamp(min=0.0) + NORM_ROUNDING * size.square()  # NaN stays NaN


def _squares_and_sizes(parts: Sequence[GradientPart]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sum of parts' squared norm, and the sum of their sizes: (B,), float64."""
    square_B, size_B = _square_and_size(parts[0])
    for i, part in enumerate(parts[1:], 1):
        own_B, own_size_B = _square_and_size(part)
        products = [inner_products(part, other) for other in parts[:i]]
        square_B, size_B = square_B + own_B + 2.0 * sum(products), size_B + own_size_B
    return square_B, size_B


def weighted_sum(
    parts: Sequence[GradientPart], weight_B: torch.Tensor, of: torch.Tensor
) -> torch.Tensor:
    """Return `sum_i weight_i g_i`, g_i the gradient of the parameter `of` for example i, the sum
    of `parts`."""
    return reduce(torch.Tensor.add_, [part.weighted_sum(weight_B, of) for part in parts])


def outer_part(left_BTM: torch.Tensor, right_BTN: torch.Tensor) -> GradientPart:
    """Return the gradient of a matrix, formed if it has no more numbers: a rule on shapes."""
    (_, T, M), N = left_BTM.shape, right_BTN.shape[2]
    if M * N > T * (M + N):
        return Outer(left_BTM, right_BTN)
    if M <= N or left_BTM.is_cuda:
        return Whole(_product(left_BTM.mT, right_BTN))
    # A CPU multiplies a matrix of few rows four times as fast as one of few columns.
    return Whole(_product(right_BTN.mT, left_BTM).mT)


FORMED_AT_ONCE = 2**18
"""The elements of the largest gradient that is `Gathered`, and of each example's part of them that
is made float64 at once."""


@dataclass(frozen=True, repr=False)
class Gathered:
    """The gradients of several parameters that were formed, one after the other in the rows of a
    matrix (B, n). A GPU is done with one of them before it is told of the next."""

    shapes: dict[nn.Parameter, torch.Size]
    rows: torch.Tensor

    @staticmethod
    def of(gradients: dict[nn.Parameter, torch.Tensor]) -> Gathered:
        shapes = {p: gradient.shape[1:] for p, gradient in gradients.items()}
        return Gathered(shapes, torch.cat([each.flatten(1) for each in gradients.values()], 1))

    def parts(self) -> dict[nn.Parameter, list[GradientPart]]:
        return {p: [Whole(gradient)] for p, gradient in self._split(self.rows).items()}

    def squared_norms(self) -> torch.Tensor:
        """Return the sums of the parameters' `squared_norms`: (B,), float64."""
        norms = [_norms(columns) for columns in self.rows.split(FORMED_AT_ONCE, 1)]
        sizes = torch.stack(norms)
        return _bounds(sizes.square(), sizes).sum(0)

    def weighted_sums(self, weight_B: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        return self._split(weight_B @ self.rows)

    def _split(self, rows: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        each = rows.split([shape.numel() for shape in self.shapes.values()], -1)
        return {
            p: x.view(x.shape[:-1] + shape)
            for x, (p, shape) in zip(each, self.shapes.items(), strict=True)
        }

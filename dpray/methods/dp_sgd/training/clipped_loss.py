"""`PerExampleLoss.clipped` has the sum of clipped per-example gradients as its gradient.

One pass (Bu et al. 2023, "book-keeping") keeps every layer's input and its output's gradient: both
the norms (`ghost_norms.py`) and the clipped sum are made of them. Two passes (Li et al. 2022b) keep
them only for the norms; the sum is an ordinary backward pass of the losses weighted with
`min(1, C / norm)`, in which the norms are measured once more. B examples, T positions, V
vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dpray.methods.dp_sgd.training.ghost_norms import (
    GhostNorms,
    NoNormRule,
    Recorded,
    is_linear,
)
from dpray.methods.dp_sgd.training.settings import Precision
from dpray.methods.dp_sgd.training.step import TrainingText
from dpray.types import DprayError

PASS_ROUNDING: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""The relative room for rounding, by precision, between the pass that gives the norms and the one
that gives the gradients. Small models showed 4e-7 in float32; in bfloat16 a standard deviation of
4e-3, and 1.9e-2 at most in 480 texts. No claim rests on it: a training that needs more stops."""

IGNORED = -100
"""A position with this label has no part in the loss."""


@dataclass(frozen=True)
class MicroBatch:
    """Token ids, attention mask and labels, (B, T) each, padded on the right.

    Padding changes an example's loss in the last bits, in bfloat16 in the third digit: kernels are
    chosen by shape, and by whether anything is padded. So training pads to fixed lengths
    (`dpray.methods.dp_sgd.training.step.share`), and to a fixed number of rows where that matters
    (`dpray.methods.dp_sgd.training.rows`).
    """

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)
    labels: torch.Tensor = field(repr=False)

    @staticmethod
    def of(texts: Sequence[TrainingText], rows: int = 1, positions: int = 2) -> MicroBatch:
        """Pad the texts to this number of rows and positions, or more if they need it. A row
        without a text is a dummy: one token without a label, whose loss is 0."""
        longest = max((len(text.ids) for text in texts), default=0)
        ids_BT = torch.zeros(max(rows, len(texts)), max(positions, longest), dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        mask_BT[:, 0] = 1
        labels_BT = torch.full_like(ids_BT, IGNORED)
        for row, text in enumerate(texts):
            length = len(text.ids)
            ids_BT[row, :length] = torch.tensor(text.ids)
            mask_BT[row, :length] = 1
            labels_BT[row, text.given : length] = ids_BT[row, text.given : length]
        return MicroBatch(ids_BT, mask_BT, labels_BT)

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(self.ids.to(device), self.mask.to(device), self.labels.to(device))

    def with_dummies(self, dummy_B: torch.Tensor) -> MicroBatch:
        """Turn the rows that `dummy_B` marks into dummies, padded as they were."""
        dummy_B1 = dummy_B.unsqueeze(1)
        return MicroBatch(
            self.ids.masked_fill(dummy_B1, 0), self.mask, self.labels.masked_fill(dummy_B1, IGNORED)
        )


class _TokenLosses(torch.autograd.Function):
    """Maps logits (B, T, V) and labels (B, T) to negative log-likelihoods (B, T), 0 without a
    label. One tensor of the logits' size is made, in float32; the backward pass overwrites it."""

    @staticmethod
    def forward(ctx: Any, logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        log_p_BTV = torch.log_softmax(logits_BTV, -1, dtype=torch.float32)
        ctx.save_for_backward(log_p_BTV, labels_BT)
        ctx.dtype = logits_BTV.dtype
        nll_BT = -log_p_BTV.gather(-1, labels_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return nll_BT.masked_fill(labels_BT == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient_BT: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        log_p_BTV, labels_BT = ctx.saved_tensors
        gradient_BT1 = gradient_BT.masked_fill(labels_BT == IGNORED, 0.0).unsqueeze(-1)
        result = log_p_BTV.exp_().mul_(gradient_BT1)
        result.scatter_add_(-1, labels_BT.clamp(min=0).unsqueeze(-1), -gradient_BT1)
        return result.to(ctx.dtype), None


Losses = tuple[torch.Tensor, Callable[[], torch.Tensor]]
"""A pass's losses (B,) twice: for a training engine, which hooks every tensor that it finds in what
a module returns, and behind a function as they are: the norms are made of these."""

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Losses]
"""Runs a `PerExampleLoss`, by itself or in a training engine."""


class PerExampleLoss(nn.Module):
    """Maps a micro-batch to one loss per example of a causal language model.

    An example's loss is the mean over its own labelled tokens, 0 without any: it depends on that
    example only. Raises NoNormRule if a trainable layer has no rule for its norm.

    With `bfloat16` linear layers compute in it, and the sums over examples are made in float32. In
    two passes autograd makes these sums, in the precision of the layer: so there a trainable layer
    computes in float32. A sum that is rounded to 8 bits would move with everybody's gradients, by
    more than C. `two_passes` is for parameters that are whole only while their layer runs.
    """

    def __init__(
        self, model: nn.Module, precision: Precision = "float32", two_passes: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.precision, self.two_passes = precision, two_passes
        self.ghost = GhostNorms(model)
        config = getattr(model, "config", None)
        most = (
            getattr(config.get_text_config(), "max_position_embeddings", None) if config else None
        )
        self._last_position = sys.maxsize if most is None else most - 1
        if precision == "bfloat16":
            for module in model.modules():
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    self._choose_precision(module)
                elif isinstance(module, nn.Linear):
                    _round_weight_once(module)

    def _choose_precision(self, module: nn.Module) -> None:
        """Have a trainable layer compute in float32, a linear one in two passes only: in one pass
        its input is rounded as autocast would round it, so that what is recorded is multiplied."""
        forward, linear = module.forward, is_linear(module)

        def in_precision(x: torch.Tensor) -> torch.Tensor:
            low = linear and torch.is_autocast_enabled(x.device.type)
            if low and not self.two_passes:
                result: torch.Tensor = forward(x.bfloat16())
                return result
            with torch.autocast(x.device.type, enabled=False):
                result = forward(x.float() if x.is_floating_point() else x)
            return result.bfloat16() if low else result

        module.forward = in_precision

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, labels_BT: torch.Tensor
    ) -> Losses:
        positions_BT = self._positions(mask_BT)
        low = self.precision == "bfloat16"
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=low):
            logits_BTV = self.model(
                input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False
            ).logits
        # The labels are shifted, not the logits, the largest tensor: that would copy them.
        next_BT = nn.functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
        nll_BT: torch.Tensor = _TokenLosses.apply(logits_BTV, next_BT)  # type: ignore[no-untyped-call]
        tokens_B = (next_BT != IGNORED).sum(1)
        losses_B: torch.Tensor = nll_BT.sum(1) / tokens_B.clamp(min=1)
        return losses_B.clone(), lambda: losses_B

    def _positions(self, mask_BT: torch.Tensor) -> torch.Tensor:
        """Return the positions of all tokens, a row for each example: a lookup that all examples
        share has no per-example gradient.

        Padding counts on, up to the last position that a text of this shape may have. So the
        largest one follows from the shape only: LongRoPE, as transformers computes it, chooses the
        angles of all rows by it. Padding may exceed the model's
        positions, and then stays at its last one.
        """
        T = mask_BT.shape[1]
        positions_T = torch.arange(T, device=mask_BT.device)
        padding_T = positions_T.clamp(max=min(max(T - 2, 0), self._last_position))
        return torch.where(mask_BT.bool(), positions_T, padding_T)

    @contextmanager
    def clipped(
        self,
        batch: MicroBatch,
        clip_norm: float,
        scale: float = 1.0,
        forward: Forward | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield a scalar whose gradient is `scale * sum_i g_i min(1, C / ||g_i||)`, C the clip
        norm. The caller makes its backward pass within the block.

        Claim: each example's part of that gradient has a norm of at most `scale * C`. In one pass
        it is made of the numbers that its norm was made of (`squared_norms`). In two, the pass that
        adds may round otherwise than the one before: it clips to a little less than C, and is
        rehearsed. An example that would add more than C then counts for nothing. What is added is
        measured once more: DprayError, and the step is not made, if a device computes the same
        thing in two ways.
        Proof: docs/privacy.md, section 5.2.

        An example whose loss or norm is not finite has weight 0: a rule on that example, of which
        no number reaches the others. `forward` runs this module in a training engine.
        """
        run: Forward = self if forward is None else forward
        norms_B, recorded = self.norms(batch, run)
        if not self.two_passes:
            yield scale * _clipped_sum(recorded, _weights(norms_B, clip_norm))
            return
        del recorded
        weight_B = _weights(norms_B, clip_norm / (1.0 + PASS_ROUNDING[self.precision]))
        batch = batch.with_dummies(weight_B == 0)

        def rehearsed() -> torch.Tensor:
            return scale * (weight_B * _own_losses(run, batch))

        too_long_B = ~(self.ghost.record(rehearsed).norms() <= scale * clip_norm)
        weight_B = weight_B.masked_fill(too_long_B, 0.0)
        batch = batch.with_dummies(too_long_B)
        with self.ghost.recording() as added:
            losses_B, _ = run(batch.ids, batch.mask, batch.labels)
            added.losses = losses_B.detach()
            yield scale * (weight_B * losses_B).sum()
        if not (added.norms() <= scale * clip_norm).all():
            raise DprayError(
                "a clipped gradient was longer than method.clip_norm: the device computed the same "
                "gradients in two ways; the step was not made"
            )

    def norms(self, batch: MicroBatch, forward: Forward) -> tuple[torch.Tensor, Recorded]:
        """Return per-example gradient norms (B,), float64, bounded from above, and what they were
        made of. A norm is infinite if it or the loss is not finite. Private."""
        if self.training:
            raise ValueError("dropout has to be off (eval): the norm is one model's")

        recorded = self.ghost.record(lambda: _own_losses(forward, batch))
        norms_B = recorded.norms()
        usable_B = torch.isfinite(recorded.losses) & torch.isfinite(norms_B)
        return torch.where(usable_B, norms_B, torch.inf), recorded


def _own_losses(forward: Forward, batch: MicroBatch) -> torch.Tensor:
    _, own = forward(batch.ids, batch.mask, batch.labels)
    return own()


def _weights(norms_B: torch.Tensor, clip_to: float) -> torch.Tensor:
    weight_B = (clip_to / norms_B).clamp(max=1.0).float()
    # Below the least normal number a weight may be rounded up by half.
    return weight_B.masked_fill(weight_B < torch.finfo(torch.float32).tiny, 0.0)


def _clipped_sum(recorded: Recorded, weight_B: torch.Tensor) -> torch.Tensor:
    """Return a scalar whose gradient is the weighted sum of what was recorded. An example of weight
    0 is left out."""
    if not (counted_B := weight_B != 0).all():
        recorded, weight_B = recorded.of(counted_B), weight_B[counted_B]
    sums = recorded.weighted_sums(weight_B)
    result: torch.Tensor = _GivenGradients.apply(list(sums.values()), *sums)  # type: ignore[no-untyped-call]
    return result


class _GivenGradients(torch.autograd.Function):
    """A scalar, 0, whose backward pass gives `gradients` to `parameters`, once."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: nn.Parameter) -> torch.Tensor:
        ctx.gradients = gradients
        return gradients[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None  # else autograd would copy them
        torch._foreach_mul_(gradients, scale)
        return (None, *gradients)


def _round_weight_once(module: nn.Module) -> None:
    """Keep the frozen weight in bfloat16 too: autocast would round it in every pass. A weight that
    an engine has taken apart is whole only while its layer runs, and is not kept."""
    forward, kept = module.forward, list[torch.Tensor]()

    def rounded(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if not torch.is_autocast_enabled(x.device.type) or hasattr(weight, "ds_id"):
            result: torch.Tensor = forward(x)
            return result
        if not kept:
            kept.append(weight.detach().bfloat16())
        return nn.functional.linear(x, kept[0], module.bias)  # type: ignore[arg-type]

    module.forward = rounded


def check_norm_rules(loss: PerExampleLoss, vocabulary: int, forward: Forward | None = None) -> None:
    """Compare the norm of every parameter's gradient with plain autograd, one example at a time, on
    two made-up texts: public, whatever the model.

    This finds a parameter used outside its layer, a layer with another formula than its name's, and
    examples that see each other. Raises NoNormRule that names the parameter. `forward` runs this
    module in a training engine; all ranks then call it.
    """
    run: Forward = loss if forward is None else forward
    rng = torch.Generator().manual_seed(0)
    device = next(loss.parameters()).device
    texts = [
        TrainingText(tuple(torch.randint(1, vocabulary, (length,), generator=rng).tolist()), given)
        for length, given in ((7, 0), (5, 2))
    ]

    def losses(texts: Sequence[TrainingText]) -> torch.Tensor:
        batch = MicroBatch.of(texts).to(device)
        return _own_losses(run, batch)

    trained = loss.trainable_parameters()
    precision, loss.precision = loss.precision, "float32"
    try:
        squared = loss.ghost.record(lambda: losses(texts)).squared_norms()
        alone = [_gradient_norms(losses([text]).sum(), list(trained.values())) for text in texts]
    finally:
        loss.precision = precision
    for row, norms in enumerate(alone):
        for (name, parameter), norm in zip(trained.items(), norms, strict=True):
            ghost = float(squared[parameter][row].sqrt()) if parameter in squared else 0.0
            if not abs(ghost - norm) <= 1e-3 * norm + 1e-5 * max(norms):
                raise NoNormRule(
                    f"{name}: its gradient is not the one that its layer's rule gives; freeze it, "
                    "or use LoRA on other layers"
                )


def _gradient_norms(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[float]:
    """Return the norm of the loss's gradient to each parameter. Each gradient is given up for its
    norm as soon as it is made: together they are as large as the model."""
    norms = [0.0] * len(parameters)

    def keep_norm(number: int, gradient: torch.Tensor) -> torch.Tensor:
        norms[number] = float(gradient.double().norm())
        return gradient.new_zeros(()).expand_as(gradient)

    hooks: list[Any] = [
        p.register_hook(partial(keep_norm, number))  # type: ignore[no-untyped-call]
        for number, p in enumerate(parameters)
    ]
    try:
        torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return norms

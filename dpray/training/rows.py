"""`RowCheck` finds the shapes in which a micro-batch needs no dummies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from dpray.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.training.step import TrainingText, padded_length


class RowCheck:
    """Compares micro-batches of few rows with full ones, on made-up texts.

    A text's gradient may have no other bits because of who else is in the batch, so all
    micro-batches of a length have the same number of rows, and dummies fill up the last one. Where
    the kernels of a machine give a row the same bits whatever the number of rows, dummies are only
    a waste. Which kernels run depends on shapes alone: a shape is tried once.
    Proof: docs/privacy.md, section 5.2.
    """

    def __init__(self, loss: PerExampleLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._numbers: dict[tuple[int, int], torch.Tensor] = {}

    def is_free(self, full: int) -> bool:
        """Return whether a single short text is computed alike alone and among `full` rows."""
        return self.is_alike(1, full, padded_length(8))

    def is_alike(self, rows: int, full: int, positions: int) -> bool:
        """Return whether `rows` texts have the same losses and norms, bit for bit, by themselves
        and in a micro-batch of `full` rows, each row of `positions`."""
        few, many = self._of(rows, positions), self._of(full, positions)
        return torch.equal(few, many[:, :rows])

    def _of(self, rows: int, positions: int) -> torch.Tensor:
        """Return the losses of made-up texts, and their squared norms for each trained parameter:
        (1 + parameters, rows), float64."""
        if (shape := (rows, positions)) not in self._numbers:
            batch = made_up(rows, positions).to(self._device)
            with _nonzero(self._loss):
                _, recorded = self._loss.norms(batch, self._loss)
                squares = list(recorded.squared_norms().values())
            self._numbers[shape] = torch.stack([recorded.losses.double(), *squares]).cpu()
        return self._numbers[shape]


def made_up(rows: int, positions: int) -> MicroBatch:
    """Return texts of two tokens in random order, padded by one position or by two. The first ones
    are the same for any number of rows."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, (rows, positions - 1), generator=rng).tolist()
    texts = [TrainingText(tuple(row[: len(row) - n % 2]), 1) for n, row in enumerate(ids)]
    return MicroBatch.of(texts, rows, positions)


@contextlib.contextmanager
def _nonzero(loss: PerExampleLoss) -> Iterator[None]:
    """Give random weights to parameters that are zero, as half of the adapters are before the first
    step: whatever is multiplied with them would be zero in any shape."""
    rng = torch.Generator().manual_seed(0)
    zeros: list[nn.Parameter] = [p for p in loss.trainable_parameters().values() if not p.any()]
    try:
        with torch.no_grad():
            for parameter in zeros:
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=rng))
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()

"""`RowCheck` finds the shapes in which a micro-batch needs no dummies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.step import TrainingText, padded_length


class RowCheck:
    """Compares micro-batches of few rows with full ones, on made-up texts.

    A text's gradient may have no other bits because of who else is in the batch, so all
    micro-batches of a length have the same number of rows, and dummies fill up the last one. Where
    the kernels of a CPU give a text the same bits in any place among any number of rows, dummies
    are only a waste. Which kernels run depends on shapes only: a shape is tried once.

    On a GPU rows stay fixed. They do in bfloat16 too. It hides that a kernel adds up in another
    order, but for one number in 100,000: made-up texts may be alike where others are not.
    Proof: docs/privacy.md, section 5.2.
    """

    def __init__(self, loss: PerExampleLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._alike: dict[tuple[int, int, int], bool] = {}

    def is_free(self, full: int) -> bool:
        """Return whether a single short text is computed alike alone and among `full` rows."""
        return self.is_alike(1, full, padded_length(8))

    def is_alike(self, rows: int, full: int, positions: int) -> bool:
        """Return whether the last `rows` texts of a micro-batch of `full` rows have the same losses
        and norms, bit for bit, by themselves, where they are in other places; each row has
        `positions`."""
        if rows == full:
            return True
        if self._device.type != "cpu" or self._loss.precision != "float32":
            return False
        if (shape := (rows, full, positions)) not in self._alike:
            texts = made_up(full, positions)
            with _nonzero(self._loss):  # both of one model: a step changes the weights
                few, many = self._of(texts[-rows:], positions), self._of(texts, positions)
            self._alike[shape] = torch.equal(few, many[:, -rows:])
        return self._alike[shape]

    def _of(self, texts: Sequence[TrainingText], positions: int) -> torch.Tensor:
        """Return the losses of the texts, their norms, and their squared norms for each trained
        parameter: (2 + parameters, rows), float64."""
        batch = MicroBatch.of(texts, len(texts), positions)
        norms_B, recorded = self._loss.norms(batch, self._loss)
        squares = recorded.squared_norms().values()
        return torch.stack([recorded.losses.double(), norms_B, *squares])


def made_up(rows: int, positions: int) -> list[TrainingText]:
    """Return texts of two tokens in random order, to be padded by one position or by two."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, (rows, positions - 1), generator=rng).tolist()
    return [TrainingText(tuple(row[: len(row) - n % 2]), 1) for n, row in enumerate(ids)]


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

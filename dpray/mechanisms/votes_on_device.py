"""The exact search for the nearest text (`dpray.mechanisms.votes.NearestText`) on a GPU.

Claim: every vote is that of the host, so that a record's vote depends on that record and the
synthetic texts only, whatever the device. Embeddings on the grid are whole numbers; products and
sums of them stay below 2^53, so that float64 holds each partial sum exactly, in whatever order a
kernel adds up and with or without fused multiplications. Equal distances go to the lowest index by
a comparison with the least distance, not by the order in which a kernel meets them. Where float32
is the faster way, it decides only what its rounding cannot move, by the bound of the host.
Proof: docs/privacy.md, section 3.1.

Shapes: B private records, U distinct synthetic texts, D dimensions of an embedding.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt

from dpray.extras import torch
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.votes import GRID, LONGEST_SQUARE, NearestText, in_parts

FAST_FLOAT64 = {(8, 0), (9, 0), (10, 0)}
"""The compute capabilities (A100, H100 and H200, B200) of cards whose float64 products take at most
twice the time of float32 ones (NVIDIA's data sheets); on others they take 32 to 64 times it."""

TRIED = 64
"""The texts whose products are tried on a device before it counts."""

CELLS = 2**25
"""Cells of one distance matrix: 256 MiB in float64."""


class NearestOnDevice(NearestText):
    """The search on a torch device. Private rows come and go in parts: their number decides no
    amount of the device's memory.

    The host searches instead where the device's float64 products are not exact, and where it fails,
    as for want of memory next to a language model: the votes are the same, and a vote that failed
    is never held again.

    >>> search = NearestOnDevice(np.eye(2, dtype=np.float32), "cpu")
    >>> search.count(np.array([[0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], dtype=np.float32))
    array([1, 2])
    """

    def __init__(self, rows_ND: npt.NDArray[np.float32], device: str) -> None:
        super().__init__(rows_ND)
        torch.set_float32_matmul_precision("highest")  # with TF32 the bound would not hold
        self._device = torch.device(device)
        try:
            self._put_there()
            self._is_used = self._products_are_exact()
        except RuntimeError:  # PyTorch's for a device
            self._is_used = False

    def _put_there(self) -> None:
        self._is_exact = self._device.type == "cuda" and (
            torch.cuda.get_device_capability(self._device) in FAST_FLOAT64
        )
        self._exact_UD, self._rows_UD, self._squares_U, self._rounded_squares_U = (
            torch.from_numpy(each).to(self._device)
            for each in (self.exact_UD, self.rows_UD, self.squares_U, self.rounded_squares_U)
        )

    def count(self, rows_MD: npt.NDArray[np.float32]) -> Counts:
        if self._is_used:
            with suppress(RuntimeError):
                return self._count_there(rows_MD)
        return super().count(rows_MD)

    def _count_there(self, rows_MD: npt.NDArray[np.float32]) -> Counts:
        U = len(self.index_U)
        counts = torch.zeros(U + 1, dtype=torch.int64, device=self._device)
        for rows_BD in in_parts(rows_MD, CELLS // U):
            given_BD = torch.from_numpy(np.ascontiguousarray(rows_BD, np.float32))
            if self._device.type == "cuda":
                given_BD = given_BD.pin_memory()  # while the device is at the part before
            given_BD = given_BD.to(self._device)
            steps_BD = (given_BD * GRID).round_()
            squares_B = steps_BD.double().square_().sum(dim=1)
            is_text_B = (squares_B > 0) & (squares_B <= LONGEST_SQUARE)
            nearest_B = (self._exactly_there if self._is_exact else self._by_bound)(steps_BD)
            # Rows that are no texts are counted last, and left out.
            counts.index_add_(0, nearest_B.where(is_text_B, U), torch.ones_like(nearest_B))
        counts_U: Counts = counts[:-1].cpu().numpy()
        return counts_U

    def _by_bound(self, steps_BD: torch.Tensor) -> torch.Tensor:
        """Search in float32, and again exactly for the rows whose gap rounding could make."""
        rows_BD = steps_BD / GRID
        order_BU = self._rounded_squares_U - 2 * (rows_BD @ self._rows_UD.T)
        least_B, nearest_B = order_BU.min(dim=1)
        order_BU.scatter_(1, nearest_B[:, None], torch.inf)
        gap_B = order_BU.min(dim=1).values.double() - least_B.double()
        norms_B = rows_BD.double().square().sum(dim=1).sqrt()
        unsure = (gap_B <= self.largest_rounding_gap(norms_B)).nonzero().squeeze(1)
        nearest_B[unsure] = self._exactly_there(steps_BD[unsure])
        return nearest_B

    def _exactly_there(self, steps_BD: torch.Tensor) -> torch.Tensor:
        order_BU = self._orders(steps_BD.double())
        is_least_BU = order_BU == order_BU.min(dim=1, keepdim=True).values
        U = len(self.index_U)
        places_U = torch.arange(U, dtype=torch.int32, device=self._device)
        return places_U.where(is_least_BU, U).min(dim=1).values.long()

    def _orders(self, exact_BD: torch.Tensor) -> torch.Tensor:
        """Return |y|^2 - 2 x.y, which orders the texts y as |x - y|^2 does."""
        return torch.addmm(self._squares_U, exact_BD, self._exact_UD.T, alpha=-2.0)

    def _products_are_exact(self) -> bool:
        tried = self.exact_UD[:TRIED]
        there = self._orders(self._exact_UD[:TRIED]).cpu().numpy()
        return np.array_equal(there, self.squares_U - 2.0 * (tried @ self.exact_UD.T))

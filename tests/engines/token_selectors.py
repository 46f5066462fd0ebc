"""Token selectors for the engines' tests, built in the process that holds the logits."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from dpray.engines.base import GroupLogits, HostSync, Selected, Selection
from dpray.methods.private_prediction.logits import (
    GRID,
    PROBABILITY_GRID,
    Rows,
    dclip_sums,
    probability_sums,
    recentred_sums,
)
from dpray.methods.private_prediction.token import PrivateTokenSelector


class PublicKeeper:
    """Keeps the bits of the public row's logits, and says `script`'s tokens."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.digests: list[str] = []
        self.orders: list[list[int]] = []

    def add(self, logits: GroupLogits) -> None:
        """Private rows are not looked at."""

    def select(self, logits: GroupLogits) -> Selection:
        bits = logits.public.float().cpu().numpy().tobytes()
        self.digests.append(hashlib.sha256(bits).hexdigest())
        order = torch.argsort(logits.public.float(), descending=True, stable=True)
        return HostSync(order, torch.stack, self.keep)

    def keep(self, order: torch.Tensor) -> Selected:
        self.orders.append(order.tolist())
        return Selected(self.script[len(self.digests) - 1])

    def state(self) -> dict[str, Any]:
        return {"digests": self.digests, "orders": self.orders}


class Adder:
    """Draws, by `PrivateTokenSelector`, from rows that may come in parts; its state tells how many
    rows each position had, and in how many parts."""

    def __init__(self, fail_at: int | None = None, **arguments: Any) -> None:
        self.selector = PrivateTokenSelector(**arguments)
        self.fail_at = fail_at
        self.parts: list[list[int]] = [[]]

    def add(self, logits: GroupLogits) -> None:
        if len(self.parts) == self.fail_at:
            raise ArithmeticError("a private number: 42")
        self.parts[-1].append(len(logits.private))
        self.selector.add(logits)

    def select(self, logits: GroupLogits) -> Selection:
        self.parts[-1].append(len(logits.private))
        self.parts.append([])
        return self.selector.select(logits)

    def state(self) -> dict[str, Any]:
        return self.selector.state() | {"parts": self.parts[:-1]}


class Sums:
    """Keeps the sums that a private draw is made from, of all rows, and says `script`'s tokens."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.sums: list[list[list[float]]] = []
        self.clear()

    def clear(self) -> None:
        self.total: torch.Tensor | float = 0.0

    def add(self, logits: GroupLogits) -> None:
        highest_S = logits.highest
        group_S = torch.zeros(len(highest_S), dtype=torch.long, device=highest_S.device)
        rows = Rows(logits.private, highest_S[:, None], group_S, 1)
        public_1V = torch.zeros_like(logits.public)[None]
        self.total = self.total + torch.cat(
            [
                recentred_sums(rows, None, 10.0) / GRID,
                dclip_sums(rows, public_1V, None, 2.0) / GRID,
                probability_sums(rows) / PROBABILITY_GRID,
            ]
        )

    def select(self, logits: GroupLogits) -> Selection:
        self.add(logits)
        return HostSync(self.total, torch.stack, self.keep)

    def keep(self, sums: torch.Tensor) -> Selected:
        self.sums.append(sums.tolist())
        self.clear()
        return Selected(self.script[len(self.sums) - 1])

    def state(self) -> dict[str, Any]:
        return {"sums": self.sums}


class MeanSampler:
    """Samples from the mean of the rows' log-probabilities, the public row's included.

    Draws None after `limit` tokens, fails at `fail_at`, and says `script`'s tokens first. Its state
    has what it was called with.
    """

    def __init__(
        self,
        seed: int,
        temperature: float = 1.0,
        limit: int | None = None,
        fail_at: int | None = None,
        script: list[int] | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.temperature, self.limit, self.fail_at = temperature, limit, fail_at
        self.script = script or []
        self.calls = 0
        self.rows: list[int] = []
        self.dtypes: set[str] = set()
        self.first_row: list[float] = []

    def add(self, logits: GroupLogits) -> None:
        raise NotImplementedError("the groups fit the engine")

    def select(self, logits: GroupLogits) -> Selection:
        if self.limit is not None and self.calls >= self.limit:
            return Selected(None)
        self.calls += 1
        if self.fail_at == self.calls:
            raise ArithmeticError("a private number: 42")
        self.rows.append(logits.private.shape[0])
        self.dtypes.add(str(logits.private.dtype))
        all_rows = torch.cat([logits.private, logits.public[None]]).double()
        self.first_row.append(float(torch.log_softmax(all_rows[0], -1)[7]))
        mean = torch.log_softmax(all_rows, dim=-1).mean(0)
        probabilities = torch.softmax(mean / self.temperature, dim=-1).cpu()
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return HostSync(drawn, torch.stack, self.after_draw)

    def after_draw(self, drawn: torch.Tensor) -> Selected:
        scripted = self.script[self.calls - 1 : self.calls]
        return Selected(scripted[0] if scripted else int(drawn))

    def state(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "rows": self.rows,
            "dtypes": sorted(self.dtypes),
            "first_row": self.first_row,
        }

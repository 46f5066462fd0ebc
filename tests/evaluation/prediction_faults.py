"""Private prediction with faults in it: its tokens, its sparse vector, and runs with Poisson
batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from dpray.accounting.event import Event
from dpray.accounting.events import ExponentialMechanism
from dpray.config.config import DataConfig
from dpray.engines.base import GroupLogits, Selected, select_tokens
from dpray.mechanisms.batches import HashPartition, PoissonBatches
from dpray.mechanisms.monte_carlo import Target
from dpray.mechanisms.randomness import named_key
from dpray.methods.private_prediction import step as step_module
from dpray.methods.private_prediction.algorithm import BatchState, PrivatePrediction
from dpray.methods.private_prediction.audit import made_up_rows, runs_target
from dpray.methods.private_prediction.logits import GRID, Rows
from dpray.methods.private_prediction.mechanism import PrivateToken, SoftmaxSampler, SparseVector
from dpray.methods.private_prediction.token import PrivateTokenSelector
from dpray.workers.rows import Row, record_rows

Fault = Callable[[], AbstractContextManager[Any]]


def token(**changes: Any) -> PrivateToken:
    """Make a mechanism in which one row moves two tokens apart by 0.8, whatever the clipping."""
    values: dict[str, Any] = {
        "batch_size": 5, "private_tokens": 6, "clip": "recentred", "clip_bound": 3.0,
        "temperature": 1.5, "public_temperature": 1.0,
    }  # fmt: skip
    return PrivateToken(**(values | changes))


def unclipped() -> AbstractContextManager[Any]:
    def sums(rows: Rows, *others: Any) -> torch.Tensor:
        return GRID * rows.logits.sum(dim=0, keepdim=True).double()

    stack = ExitStack()
    stack.enter_context(patch.object(step_module, "recentred_sums", sums))
    stack.enter_context(patch.object(step_module, "dclip_sums", sums))
    return stack


def one_row_for_the_batch() -> AbstractContextManager[Any]:
    """Divide by the rows that are there, one, where s = 5 is paid for."""
    right = step_module.dclip_sums

    def last(rows: Rows, *others: Any) -> torch.Tensor:
        return 5 * right(Rows(rows.logits[-1:], rows.highest[-1:]), *others)

    return patch.object(step_module, "dclip_sums", last)


def colder(times: int) -> Fault:
    right = SoftmaxSampler.exponents

    def exponents(self: SoftmaxSampler, utilities: torch.Tensor) -> Any:
        return times * right(self, utilities)

    return lambda: patch.object(SoftmaxSampler, "exponents", exponents)


SPARSE = token(batch_size=5, threshold=0.4, noise=0.3)


def exact_answers() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(
        patch.object(SparseVector, "draw_threshold", lambda self, rng: self.threshold)
    )
    stack.enter_context(patch.object(SparseVector, "draw_noise", lambda self, rng: -1e-6))
    return stack


def half_answers() -> AbstractContextManager[Any]:
    stack = ExitStack()
    for name in ("draw_threshold", "draw_noise"):
        method = getattr(SparseVector, name)

        def halved(self: SparseVector, *arguments: Any, method: Any = method) -> Any:
            return method(replace(self, noise=self.noise / 2), *arguments)

        stack.enter_context(patch.object(SparseVector, name, halved))
    return stack


def schema_of_a_row() -> AbstractContextManager[Any]:
    """Let the last private row decide what the schema allows."""
    right, right_select = PrivateTokenSelector._allowed, PrivateTokenSelector.select

    def select(self: PrivateTokenSelector, logits: GroupLogits) -> Any:
        rows = logits.private

        def allowed(selector: PrivateTokenSelector) -> Any:
            found = right(selector)
            if found is None or not rows[-1, 0] > rows[-1, 1]:
                return found
            return np.arange(len(found)) == found.argmax()

        with patch.object(PrivateTokenSelector, "_allowed", allowed):
            return right_select(self, logits)

    return patch.object(PrivateTokenSelector, "select", select)


def free_where_sure() -> AbstractContextManager[Any]:
    """Count no token if the private rows, not the schema, leave little choice about it."""
    right = PrivateTokenSelector.select

    def select(self: PrivateTokenSelector, logits: GroupLogits) -> Any:
        rows, before = logits.private, self.t
        [end] = select_tokens([right(self, logits)])
        if end == Selected(0) and len(rows) and rows[-1, 0] > rows[-1, 1]:
            self.t = before
        return end

    return patch.object(PrivateTokenSelector, "select", select)


# Runs with Poisson batches. Nothing is patched: the target is given other rows, keys,
# batches or another method.


@dataclass(frozen=True)
class Runs:
    """Runs of so many batches of each label with sampling probability `q`, with `copies` of the
    withheld unit beside it, which has a record of each label."""

    number: int
    q: float
    mechanism: PrivateToken
    copies: int = 0
    labels: tuple[str, ...] = ("",)

    @property
    def batches(self) -> PoissonBatches:
        return PoissonBatches(
            dict.fromkeys(self.labels, self.number), dict.fromkeys(self.labels, self.q)
        )

    def rows(self, by_place: bool = True) -> list[Row]:
        data = DataConfig(path="", public_size=100)
        if len(self.labels) > 1:
            columns = {"label": "label", "labels": self.labels, "unit": "who"}
            data = DataConfig(
                path="", public_size=100, max_records_per_unit=len(self.labels), **columns
            )
        rows_of = partial(record_rows, data=data, by_place=by_place)
        return made_up_rows(data, rows_of, self.labels, 1 + self.copies)

    def method(self, kind: type[PrivatePrediction] = PrivatePrediction) -> PrivatePrediction:
        return kind(self.mechanism, self.mechanism.private_tokens, examples_per_batch=1)

    def target(self) -> Target:
        return runs_target(self.method(), self.batches, self.rows())

    def coins_by_content(self) -> Target:
        """Let all copies of a record join the same batches."""
        return runs_target(self.method(), self.batches, self.rows(by_place=False))

    def reused_key(self) -> Target:
        """Take one key for all runs, under which the withheld record joins a batch: who knows the
        key knows which."""
        rows = self.rows()
        keys = (named_key("00" * 32, str(number)) for number in count())
        known = next(key for key in keys if any(self.batches.joined(key, "", rows[-1]["unit"])))
        return runs_target(self.method(), self.batches, rows, key=lambda: known)

    def partition(self) -> Target:
        """Put each unit into one batch, by a public salt, where the other claim is made."""
        batches = Disjoint(self.batches.batches_per_label, self.batches.sampling_probabilities)
        return runs_target(self.method(), batches, self.rows())

    def label_by_label(self) -> Target:
        """Charge each label's batches for the row that a unit has there, and no unit for two
        labels."""
        batches = InParallel(self.batches.batches_per_label, self.batches.sampling_probabilities)
        return runs_target(self.method(), batches, self.rows())

    def real_size(self) -> Target:
        return runs_target(self.method(DividesByRows), self.batches, self.rows())


class Disjoint(PoissonBatches):
    def joined(self, key: str, label: str, place: str) -> Iterator[str]:
        return HashPartition(self.batches_per_label, "00" * 16).joined(label, place)


class InParallel(PoissonBatches):
    def dp_event(self, draw: ExponentialMechanism, draws: int, records_per_unit: int) -> Event:
        return super().dp_event(replace(draw, range=draw.range / records_per_unit), draws, 1)


class DividesByRows(PrivatePrediction):
    """Divides sums by the number of rows that joined."""

    def next_text(self, state: BatchState) -> Any:
        rows = max(1, len(state.S.private_prompts))
        divided = replace(self, mechanism=replace(self.mechanism, batch_size=rows))
        return PrivatePrediction.next_text(divided, state)

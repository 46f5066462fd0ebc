"""The device's own test: found where rows depend on each other, silent where they do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dpray.engines.base import (
    Engine,
    EngineError,
    Lockstep,
    LockstepGroup,
    LockstepResult,
    select_token,
)
from dpray.engines.row_variation import row_variation


class Rounding:
    """Stands in for a device of known rounding: a row's logits are moved by `step` for each other
    row of its pass."""

    context_length = 64

    def __init__(self, step: float, first_token: float = 0.0) -> None:
        self.step, self.first_token = step, first_token
        self.sizes: list[int] = []

    def rows_at_once(self, tokens: int) -> int:
        return 1000

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return tuple(range(1, 2 + len(prompt.user.split())))

    def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
        for group in groups:
            rows = len(group.private_prompts)
            self.sizes.append(rows)
            selector = group.selector.build()
            first = float(group.private_prompts[0][-1])
            for _ in range(group.max_tokens):
                logits = torch.full((rows, 5000), first) + self.step * (rows - 1)
                logits[:, 0] += self.first_token
                select_token(selector, logits, logits[0])
            yield LockstepResult(group.group_id, "", (), "length", selector.state())


def test_rows_that_do_not_move_are_0() -> None:
    device: Any = Rounding(0.0)
    assert row_variation(device, 127) == 0.0
    assert device.sizes == [1, 2, 8, 33, 127, 1, 127]


@pytest.mark.parametrize("rows", [2, 8, 40])
def test_the_largest_move_is_found(rows: int) -> None:
    device: Any = Rounding(0.25)
    assert row_variation(device, rows) == pytest.approx(0.25 * (rows - 1))


def test_a_masked_token_does_not_move_and_what_is_no_number_is_refused() -> None:
    """A report is JSON, which has no infinities: it could not be written after the charge."""
    device: Any = Rounding(0.25, first_token=-torch.inf)
    assert row_variation(device, 2) == pytest.approx(0.25)
    overflowed: Any = Rounding(0.0, first_token=torch.nan)
    with pytest.raises(EngineError, match="no numbers"):
        row_variation(overflowed, 2)


def test_a_prompt_with_the_last_token_in_it_is_compared_too() -> None:
    """A batch in parts computes its rows so."""

    class Passes(Rounding):
        def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
            for group in groups:
                selector = group.selector.build()
                for position in range(group.max_tokens):
                    # 22 tokens of the prompt, and one that was drawn.
                    is_prefilled = position == 0 and len(group.private_prompts[0]) == 23
                    logits = torch.full((1, 5000), 0.5 * is_prefilled)
                    select_token(selector, logits, logits[0])
                yield LockstepResult(group.group_id, "", (), "length", selector.state())

    device: Any = Passes(0.0)
    assert row_variation(device, 1) == 0.5


def test_an_engine_that_holds_one_row_at_once_is_tested_too() -> None:
    """Its groups, of one private row and the public one, come in parts."""

    class OneRow(Rounding):
        def rows_at_once(self, tokens: int) -> int:
            return 1

        def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
            for group in groups:
                self.sizes.append(len(group.private_prompts))
                selector = group.selector.build()
                for _ in range(group.max_tokens):
                    logits = torch.full((1, 5000), self.step * (len(self.sizes) - 1))
                    selector.add(logits, logits[0])
                    select_token(selector, logits[:0], logits[0])
                yield LockstepResult(group.group_id, "", (), "length", selector.state())

    device: Any = OneRow(0.25)
    assert row_variation(device, 127) == pytest.approx(0.25)
    assert device.sizes == [1, 1]


def test_a_real_engine_rounds_a_little(engine: Engine) -> None:
    assert 0.0 <= row_variation(engine, 20) < 1e-3

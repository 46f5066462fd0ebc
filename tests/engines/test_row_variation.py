"""The device's own test: found where rows depend on each other, silent where they do not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Engine,
    EngineError,
    Lockstep,
    LockstepGroup,
    LockstepResult,
    select_token,
)
from dpray.engines.finite_rows import highest
from dpray.engines.row_variation import refuse_dependence, row_variation
from dpray.engines.transformers import TransformersEngine
from dpray.types import InputError
from tests.engines.tiny_model import make_tokenizer


class Rounding:
    """Stands in for a device of known rounding: a row's logits are moved by `step` for each other
    row of its pass."""

    context_length = 64
    shares_public_pass = False

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


def test_an_empty_batch_shows_a_row_that_is_alone_in_its_pass() -> None:
    """vLLM on a CPU multiplies one row by another kernel than two: the public logits of an empty
    batch moved by 9e-5 when it got its first row, and the report said 0."""

    class Shared(Rounding):
        shares_public_pass = True

        def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
            for group in groups:
                self.sizes.append(len(group.private_prompts))
                selector = group.selector.build()
                for _ in range(group.max_tokens):
                    logits = torch.full((len(group.prompts), 5000), self.step)
                    logits += 0.25 * (len(group.prompts) == 1)
                    select_token(selector, logits[:-1], logits[-1])
                yield LockstepResult(group.group_id, "", (), "length", selector.state())

    device: Any = Shared(1.0)
    assert row_variation(device, 8) == 0.25
    assert device.sizes == [1, 2, 8, 0, 1, 8]
    device.shares_public_pass = False  # by itself, perhaps in other kernels
    assert row_variation(device, 8) == 0.0


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
                    selector.add(logits, highest(logits), logits[0])
                    select_token(selector, logits[:0], logits[0])
                yield LockstepResult(group.group_id, "", (), "length", selector.state())

    device: Any = OneRow(0.25)
    assert row_variation(device, 127) == pytest.approx(0.25)
    assert device.sizes == [1, 1]


def test_a_row_that_moves_with_the_length_of_another_is_found(tmp_path: Path) -> None:
    """As transformers computes LongRoPE, one long row turns all rows of its pass by other angles:
    one record more would move the logits of all others. The other groups do not show it, because
    the row that is compared is the longest in them."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, initializer_range=0.15,
        original_max_position_embeddings=128, rope_parameters=rope,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer(512).save_pretrained(tmp_path)
    section = EngineConfig(kind="transformers", model=str(tmp_path), dtype="float32")
    engine = TransformersEngine(section, device="cpu", group=(16, 256))
    for length in (0, 128):
        refuse_dependence(row_variation(engine, 8, length), "float32")
    found = row_variation(engine, 8, 160)
    assert found > 0.5
    with pytest.raises(InputError, match=r"more than rounding in float32\. Nothing was drawn"):
        refuse_dependence(found, "float32")


def test_a_real_engine_rounds_a_little(engine: Engine) -> None:
    assert 0.0 <= row_variation(engine, 20) < 1e-3

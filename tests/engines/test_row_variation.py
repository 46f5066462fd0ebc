"""The device's own test: found where rows depend on each other, silent where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Phi3Config, Phi3ForCausalLM

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    EngineError,
    Following,
    GroupLogits,
    LockstepGroup,
    LockstepResult,
    nothing_follows,
    select_token,
)
from dpray.engines.finite_rows import highest
from dpray.engines.row_variation import refuse_dependence, row_variation
from dpray.engines.transformers import TransformersEngine
from dpray.methods.private_prediction.logits import Clip, distribution_distances
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import Coins, Group
from dpray.methods.private_prediction.step import Step as PrivateStep
from dpray.types import InputError
from tests.engines.tiny_model import make_tokenizer


class Rounding:
    """Stands in for a device of known rounding: a row's logits are moved by `step` for each other
    row of its pass. The public row has a pass of its own."""

    context_length = 64
    shares_public_pass = False

    def __init__(self, step: float, first_token: float = 0.0) -> None:
        self.step, self.first_token = step, first_token
        self.sizes: list[int] = []

    def rows_at_once(self, tokens: int) -> int:
        return 1000

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return tuple(range(1, 2 + len(prompt.user.split())))

    def decode_lockstep(self, groups: Iterable[LockstepGroup], *_: Any) -> Iterator[LockstepResult]:
        for group in groups:
            rows = len(group.private_prompts)
            self.sizes.append(rows)
            selector = group.selector.build()
            first = torch.full((rows + 1, 5000), float(group.prompts[0][-1]))
            first[:, 0] += self.first_token
            for _ in range(group.max_tokens):
                select_token(selector, first[:-1] + self.step * (rows - 1), first[-1])
            yield LockstepResult(group.group_id, "", (), "length", selector.state())


def test_rows_that_do_not_move_are_0() -> None:
    device: Any = Rounding(0.0)
    assert row_variation(device, 127) == 0.0
    assert device.sizes == [*[1, 2, 8, 33, 127, 0, 1, 127], *[1, 1, 8, 0, 1]]


@pytest.mark.parametrize("rows", [2, 8, 40])
def test_the_largest_move_is_found(rows: int) -> None:
    device: Any = Rounding(0.25)
    assert row_variation(device, rows) == pytest.approx(0.25 * (rows - 1))


class SideBySide(Rounding):
    """Stands in for vLLM: groups enter as they come, a text's next one a step after it. `moves` is
    told of a row and of its step, and says whether the row moves by one bit there."""

    context_length = 1024
    shares_public_pass = True

    def __init__(self, moves: Callable[[Step, int, bool], bool]) -> None:
        super().__init__(0.0)
        self.moves = moves
        self.steps: list[Step] = []

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        running = [(group, group.selector.build(), 0) for group in groups]
        while running:
            queries = [
                1 if position else len(prompt)
                for group, _, position in running
                for prompt in group.prompts
            ]
            step = Step(len(running), tuple(queries))
            self.steps.append(step)
            now, running = running, []
            for group, selector, position in now:
                rows = [self.row(step, prompt, position) for prompt in group.prompts]
                logits = torch.stack(rows)
                select_token(selector, logits[:-1], logits[-1])
                if position + 1 < group.max_tokens:
                    running.append((group, selector, position + 1))
                    continue
                result = LockstepResult(group.group_id, "", (), "length", selector.state())
                if (after := following(result)) is not None:
                    running.append((after, after.selector.build(), 0))
                yield result

    def row(self, step: Step, prompt: tuple[int, ...], position: int) -> torch.Tensor:
        logits = torch.full((5000,), float(prompt[-1]))
        if self.moves(step, len(prompt) + position, position > 0):
            logits[0] = torch.nextafter(logits[0], torch.tensor(torch.inf))
        return logits


@dataclass(frozen=True)
class Step:
    """The contents of a forward pass: the number of groups, and the new tokens of each row."""

    groups: int
    queries: tuple[int, ...]


FAULTS: dict[str, Callable[[Step, int, bool], bool]] = {
    # FlashAttention 3 on Hopper, in vLLM's batch-invariant mode.
    "a decode of 129 keys next to a prefill of 10 tokens": lambda step, keys, decodes: (
        decodes and keys >= 129 and max(step.queries) >= 10
    ),
    "next to a prefill of 257 tokens": lambda step, keys, decodes: (
        decodes and keys >= 129 and max(step.queries) >= 257
    ),
    "next to any prefill": lambda step, keys, decodes: decodes and max(step.queries) > 1,
    "a long row among some": lambda step, keys, decodes: keys >= 300 and len(step.queries) >= 8,
    "among many": lambda step, keys, decodes: len(step.queries) >= 60,
    "among groups": lambda step, keys, decodes: step.groups >= 4,
    "alone in its pass": lambda step, keys, decodes: len(step.queries) == 1,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_bit_that_moves_is_found_and_refused_where_public_logits_decide(fault: str) -> None:
    device: Any = SideBySide(FAULTS[fault])
    moved = row_variation(device, 64)
    assert 0.0 < moved < 1e-3
    refuse_dependence(moved, 0.0, "bfloat16")
    with pytest.raises(InputError, match="no private row may move a bit"):
        refuse_dependence(moved, 0.0, "bfloat16", exact=True)


def test_every_shape_of_a_pass_is_tried() -> None:
    device: Any = SideBySide(lambda *_: False)
    assert row_variation(device, 64) == 0.0
    beside = {max(step.queries) for step in device.steps if 1 in step.queries}
    assert beside >= {1, 2, 9, 10, 64, 65, 129, 257}
    assert max(max(step.queries) for step in device.steps) >= 300
    assert {step.groups for step in device.steps} >= {1, 2, 8}
    assert (1,) in {step.queries for step in device.steps}


def test_an_empty_batch_shows_a_row_that_is_alone_in_its_pass() -> None:
    """vLLM on a CPU multiplies one row by another kernel than two: the public logits of an empty
    batch moved by 9e-5 when it got its first row, and the report said 0."""

    class Shared(Rounding):
        shares_public_pass = True

        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], *_: Any
        ) -> Iterator[LockstepResult]:
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
    device.shares_public_pass = False
    with pytest.raises(EngineError, match="public row that is computed by itself moved"):
        row_variation(device, 8)


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
        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], *_: Any
        ) -> Iterator[LockstepResult]:
            for group in groups:
                selector = group.selector.build()
                for position in range(group.max_tokens):
                    # 22 tokens of the prompt, and one that was drawn.
                    is_prefilled = position == 0 and len(group.prompts[0]) == 23
                    logits = torch.full((len(group.prompts), 5000), 0.5 * is_prefilled)
                    select_token(selector, logits[:-1], torch.zeros(5000))
                yield LockstepResult(group.group_id, "", (), "length", selector.state())

    device: Any = Passes(0.0)
    assert row_variation(device, 1) == 0.5


def test_an_engine_that_holds_one_row_at_once_is_tested_too() -> None:
    """Its groups, of one private row and the public one, come in parts."""

    class OneRow(Rounding):
        def rows_at_once(self, tokens: int) -> int:
            return 1

        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], *_: Any
        ) -> Iterator[LockstepResult]:
            for group in groups:
                self.sizes.append(len(group.private_prompts))
                selector = group.selector.build()
                for _ in range(group.max_tokens):
                    logits = torch.full((1, 5000), self.step * (len(self.sizes) == 3))
                    if group.private_prompts:
                        selector.add(GroupLogits(logits, highest(logits), torch.zeros(5000)))
                    select_token(selector, logits[:0], torch.zeros(5000))
                yield LockstepResult(group.group_id, "", (), "length", selector.state())

    device: Any = OneRow(0.25)
    assert row_variation(device, 127) == pytest.approx(0.25)
    assert device.sizes == [*[1, 0, 1], *[1, 1, 1, 0, 1]]


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
    mechanism = PrivateToken(8, 1, "recentred", 10.0, 1.0, 1.0)

    def refuse(moved: float) -> None:
        refuse_dependence(moved, mechanism.share_of_rounding(moved, False), "float32")

    for length in (0, 128):
        refuse(row_variation(engine, 8, length))
    found = row_variation(engine, 8, 160)
    assert found > 0.5
    with pytest.raises(InputError, match=r"one record moves it, where 0\.05 is allowed: "):
        refuse(found)


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    clip=st.sampled_from(get_args(Clip)),
    c=st.floats(0.1, 10.0),
    moved=st.floats(1e-3, 1.0),
    seed=st.integers(0, 2**32 - 1),
    sparse=st.booleans(),
    shared=st.booleans(),
)
def test_rounding_of_all_rows_moves_a_batch_by_no_more_than_the_share_of_it(
    rows: int, clip: Any, c: float, moved: float, seed: int, sparse: bool, shared: bool
) -> None:
    """All of them may move the same way: 0.1 nats in 127 rows are more than a c of 10."""
    vector = {"threshold": 0.3, "noise": 0.1} if sparse else {}
    mechanism = PrivateToken(rows, 1, clip, c, 1.0, 1.0, **vector)  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(rows + 1, 9, generator=rng) * 5
    near = z + moved * torch.sign(torch.randn(rows + 1, 9, generator=rng))
    near[:, 0] = z[:, 0] + moved  # as far as it goes: the highest one way, another the other
    near[:, 1] = z[:, 1] - moved
    if not shared:
        near[-1] = z[-1]
    share = mechanism.share_of_rounding(moved, shared)
    steps = [
        PrivateStep(
            mechanism, [Group(each[:-1], highest(each[:-1]), each[-1], Coins())], looks=True
        )
        for each in (z, near)
    ]
    averages = [step.averages_GK for step in steps]
    assert float((averages[1] - averages[0]).abs().max()) <= share * c / rows * (1 + 1e-3) + 1e-5
    if sparse:
        distances = [
            distribution_distances(step.probability_sums_GA, step.public_GA, rows) for step in steps
        ]
        assert abs(float(distances[1] - distances[0])) <= share / rows * (1 + 1e-3) + 1e-5


@pytest.mark.parametrize(("s", "c", "moved"), [(127, 10.0, 0.1), (127, 1.0, 1e-3), (8, 3.0, 0.05)])
def test_a_bound_on_one_row_is_none_on_many(s: int, c: float, moved: float) -> None:
    """Each of these was below the 0.1 nats of a row that were once allowed."""
    share = PrivateToken(s, 1, "dclip", c, 1.0, 1.0).share_of_rounding(moved, False)
    with pytest.raises(InputError, match=r"^engine\.model: the logits of a row moved"):
        refuse_dependence(moved, share, "float32")
    few = PrivateToken(s, 1, "dclip", c, 1.0, 1.0).share_of_rounding(1e-5, True)
    refuse_dependence(1e-5, few, "float32")


@pytest.mark.parametrize("kind", ["transformers", "lanes"])
def test_a_real_engine_rounds_a_little(request: pytest.FixtureRequest, kind: str) -> None:
    """`test_vllm` has vLLM's."""
    assert 0.0 <= row_variation(request.getfixturevalue(f"{kind}_engine"), 20) < 1e-3

"""DP-SGD's loop makes the steps of a plain reference; texts are encoded as the paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import (
    DpSgd,
    TextEncoder,
    fine_tune,
    one_record_each,
    poisson_batch,
)
from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from tests.methods.dp_sgd.training.tiny_gradients import (
    clipped_sum,
    flat,
    gpt2,
    llama,
    lora,
    plain_clipped_sum,
    texts,
    trainable,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")

C = 0.7
NO_NOISE = 1e-9
"""A noise multiplier whose noise is lost in float32 rounding."""


def plan(sigma: float = NO_NOISE, steps: int = 3, **changes: Any) -> DpSgd:
    step = DpSgdStep(
        sampling_probability=0.3, noise_multiplier=sigma, clip_norm=C, expected_batch_size=6.0
    )
    settings = {"micro_batch_size": 4, "learning_rate": 0.1, "optimizer": "sgd"} | changes
    return DpSgd(step, steps, TrainingSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    # AdamW needs noise: where a gradient is 0 it would turn rounding errors into whole steps.
    ("make", "optimizer", "sigma"),
    [(gpt2, "sgd", NO_NOISE), (lambda: lora(llama()), "sgd", 1.0), (gpt2, "adamw", 1.0)],
)
def test_three_steps_are_those_of_a_plain_reference(
    make: Callable[[], Any], optimizer: Any, sigma: float
) -> None:
    ours = plan(sigma, optimizer=optimizer)
    # Fixed, as once in a few hundred runs AdamW has a gradient so near to 0.
    units, sampling, noise = [[text] for text in texts(20)], "01" * 32, "02" * 32
    loss = PerExampleLoss(make()).eval()
    trainer = ReferenceTrainer(ours.mechanism, ours.settings, loss, noise)
    fine_tune(ours, units, trainer, generator(sampling))

    model, rng, normals = make(), generator(sampling), generator(noise)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    update = kinds[optimizer](trainable(model), lr=0.1, weight_decay=0.0)
    start = flat(model)
    for _ in range(3):
        batch = [units[i][0] for i in poisson_batch(len(units), 0.3, rng)]
        total = plain_clipped_sum(model, batch, ours.mechanism.clip_norm)
        total += sigma * C * torch.from_numpy(normals.standard_normal(len(total))).float()
        sizes = [p.numel() for p in trainable(model)]
        for parameter, part in zip(trainable(model), (total / 6.0).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        update.step()
    assert (flat(model) - start).norm() > 0.01
    # Adam divides by the root of small squares, so that rounding grows; the weights move by 0.1.
    tolerance = 2e-6 if optimizer == "sgd" else 2e-4
    torch.testing.assert_close(flat(loss.model), flat(model), rtol=0, atol=tolerance)


class Listening:
    """Notes the texts, and trains nothing."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks, self.free = rank, ranks, False
        self.steps: list[list[TrainingText]] = [[]]
        self.micro_batches = [0]

    def may_vary_rows(self, full: int) -> bool:
        return self.free

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        assert all(len(text.ids) < shape[1] for text in texts) and len(texts) <= shape[0]
        self.steps[-1] += texts
        self.micro_batches[-1] += 1
        self.last = last
        self.is_noisy = False

    def add_noise(self) -> None:
        self.is_noisy = True

    def update(self) -> None:
        assert self.last and self.is_noisy
        self.steps.append([])
        self.micro_batches.append(0)


def test_ranks_take_the_batch_apart() -> None:
    units, key = [[text] for text in texts(20)], new_key()
    ranks = [Listening(rank, 3) for rank in range(3)]
    for trainer in ranks:
        fine_tune(plan(steps=5, micro_batch_size=1), units, trainer, generator(key))
    rng = generator(key)
    for step in range(5):
        batch = poisson_batch(20, 0.3, rng)
        # `one_record_each` draws too.
        drawn = one_record_each(units, batch, rng)
        assert {t.micro_batches[step] for t in ranks} == {max(1, -(-len(batch) // 3))}
        held = [text for trainer in ranks for text in trainer.steps[step]]
        assert sorted(text.ids for text in held) == sorted(text.ids for text in drawn)


def test_a_step_is_announced_before_it_draws() -> None:
    class Noted:
        def __init__(self) -> None:
            self.rng = generator(new_key())

        def __getattr__(self, name: str) -> Any:
            said.append("draw")
            return getattr(self.rng, name)

    said: list[Any] = []
    rng: Any = Noted()
    trainer = Listening()
    fine_tune(plan(), [[text] for text in texts(3)], trainer, rng, said.append)
    assert [s for s in said if s != "draw"] == [0, 1, 2]
    assert said[0] == 0 and said.index("draw") < said.index(1)


def test_the_plan_costs_its_steps() -> None:
    event = plan(sigma=0.8).dp_event
    assert event == SelfComposed(PoissonSubsampledGaussian(0.3, 0.8), 3)


def characters(max_length: int) -> TextEncoder:
    return TextEncoder(lambda s: [ord(c) for c in s], start=1, eos=2, max_length=max_length)


def test_a_text_follows_its_code_and_ends() -> None:
    text = characters(20).training_text("a: b\n", "xy")
    assert text.ids == (1, *map(ord, "a: b\nxy"), 2) and text.given == 6


def test_a_long_record_is_cut_by_itself() -> None:
    assert characters(8).training_text("a: b\n", "xyz").ids == (1, *map(ord, "a: b\nxy"))
    all_code = characters(4).training_text("a: b\n", "xyz")
    assert all_code.ids == (1, *map(ord, "a: ")) and all_code.given == 4
    loss = PerExampleLoss(gpt2()).eval()
    small = TrainingText((2, 3, 4, 5), all_code.given)
    assert not clipped_sum(loss, [small], C, 1).any()


def test_private_texts_are_not_shown() -> None:
    text = characters(9).training_text("", "Marlowe")
    assert str(ord("M")) not in repr(text) and "tensor" not in repr(MicroBatch.of([text]))


@pytest.mark.parametrize(("expected", "rows"), [(1, 1), (32, 4), (256, 11), (4096, 16)])
def test_the_rows_of_a_micro_batch_follow_from_the_expected_batch(expected: int, rows: int) -> None:
    step = replace(plan().mechanism, expected_batch_size=float(expected))
    assert replace(plan(micro_batch_size=None), mechanism=step).fixed_rows == rows
    assert replace(plan(), mechanism=step).fixed_rows == 4


def test_free_rows_are_as_many_as_memory_takes() -> None:
    ours = plan(micro_batch_size=None)
    ours = replace(ours, mechanism=replace(ours.mechanism, sampling_probability=1.0))
    units = [[TrainingText((1, 2, 3), 1)] for _ in range(40)]
    counts = {}
    for free in (True, False):
        trainer = Listening()
        trainer.free = free
        fine_tune(ours, units, trainer, generator(new_key()))
        counts[free] = trainer.micro_batches[0]
    assert counts == {True: 7, False: 40}

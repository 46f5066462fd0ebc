"""DP-SGD against a plain reference, and its claims on neighbouring batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.accounting.events import PoissonSubsampledGaussian, SelfComposed
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import (
    DpSgd,
    TextEncoder,
    control_code,
    fine_tune,
    padded_length,
    share,
)
from dpray.methods.dp_sgd.poisson import poisson_batch
from dpray.training.clipped_loss import MicroBatch, PerExampleLoss, TrainingText, check_norm_rules
from dpray.training.ghost_norms import weighted_sum
from dpray.training.gradient_noise import DpSgdStep
from dpray.training.reference import ReferenceTrainer
from tests.training.tiny_gradients import clipped_sum, gpt2, llama, lora, plain_gradient, texts

C = 0.7
NO_NOISE = 1e-9
"""A noise multiplier whose noise is lost in float32 rounding."""


pytestmark = pytest.mark.usefixtures("one_thread")


def plan(sigma: float = NO_NOISE, **changes: Any) -> DpSgd:
    step = DpSgdStep(
        sampling_probability=0.3, noise_multiplier=sigma, clip_norm=C, expected_batch_size=6.0
    )
    ours = DpSgd(step, steps=3, micro_batch_size=4, learning_rate=0.1, optimizer="sgd")
    return replace(ours, **changes)


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainable(model)])


def plain_clipped_sum(model: torch.nn.Module, batch: list[TrainingText], c: float) -> torch.Tensor:
    total = torch.zeros_like(flat(model))
    for text in batch:
        gradient = plain_gradient(model, text)
        total += gradient * min(1.0, c / float(gradient.double().norm()))
    return total


@pytest.mark.parametrize("make", [gpt2, lambda: lora(llama())], ids=["gpt2", "llama_lora"])
@pytest.mark.parametrize(
    # AdamW needs noise: where a gradient is 0 it would turn rounding errors into whole steps.
    ("optimizer", "sigma"),
    [("sgd", NO_NOISE), ("sgd", 1.0), ("adamw", 1.0)],
)
def test_three_steps_are_those_of_a_plain_reference(
    make: Callable[[], Any], optimizer: Any, sigma: float
) -> None:
    ours = plan(sigma, optimizer=optimizer, schedule="linear", weight_decay=0.01)
    units, sampling, noise = [[text] for text in texts(20)], new_key(), new_key()
    loss = PerExampleLoss(make()).eval()
    fine_tune(ours, units, ReferenceTrainer(ours, loss, noise), generator(sampling))

    model, rng, normals = make(), generator(sampling), generator(noise)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    update = kinds[optimizer](trainable(model), lr=0.1, weight_decay=0.01)
    start = flat(model)
    for t in range(3):
        batch = [units[i][0] for i in poisson_batch(len(units), 0.3, rng)]
        total = plain_clipped_sum(model, batch, ours.mechanism.clip_to)
        total += sigma * C * torch.from_numpy(normals.standard_normal(len(total))).float()
        sizes = [p.numel() for p in trainable(model)]
        for parameter, part in zip(trainable(model), (total / 6.0).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        update.param_groups[0]["lr"] = 0.1 * (1 - t / 3)
        update.step()
    assert (flat(model) - start).norm() > 0.01
    # Adam divides by the root of small squares, so that rounding grows; the weights move by 0.1.
    tolerance = 2e-6 if optimizer == "sgd" else 2e-4
    torch.testing.assert_close(flat(loss.model), flat(model), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("two_passes", "checkpointing"), [(False, False), (True, False), (False, True)]
)
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_micro_batches_and_passes_change_nothing(
    size: int, two_passes: bool, checkpointing: bool
) -> None:
    loss, batch = PerExampleLoss(gpt2(), checkpointing=checkpointing).eval(), texts(7)
    plain = plain_clipped_sum(loss.model, batch, C)
    ours = clipped_sum(loss, batch, C, size, two_passes)
    torch.testing.assert_close(ours, plain, rtol=0, atol=2e-6)


def test_an_empty_batch_still_steps_with_noise() -> None:
    ours = plan(sigma=1.0)
    loss = PerExampleLoss(gpt2()).eval()
    before = flat(loss.model)
    trainer = ReferenceTrainer(ours, loss, new_key())
    trainer.accumulate(MicroBatch.of([]), last=True)
    assert all(p.grad is not None and not p.grad.any() for p in trainable(loss.model))
    trainer.step(0.1)
    assert (flat(loss.model) != before).float().mean() > 0.99


def test_the_sum_is_divided_by_the_public_size() -> None:
    loss, batch = PerExampleLoss(gpt2()).eval(), texts(3)
    plain = plain_clipped_sum(loss.model, batch, plan().mechanism.clip_to) / 6.0
    before = flat(loss.model)
    trainer = ReferenceTrainer(plan(), loss, new_key())
    trainer.accumulate(MicroBatch.of(batch), last=True)
    trainer.step(1.0)
    torch.testing.assert_close(before - flat(loss.model), plain, rtol=0, atol=1e-6)


def moved_by(loss: PerExampleLoss, batch: list[TrainingText], new: TrainingText, c: float) -> float:
    with_it = clipped_sum(loss, [*batch, new], c, 3)
    return float((with_it - clipped_sum(loss, batch, c, 3)).double().norm())


TINY: dict[str, PerExampleLoss] = {}


def tiny(name: str) -> PerExampleLoss:
    """Models are slow to make, and never change here."""
    makes = {"gpt2": gpt2, "llama": llama, "llama_tied": lambda: llama(True)}
    return TINY.setdefault(name, PerExampleLoss(makes[name]()).eval())


@settings(max_examples=25)
@given(
    model=st.sampled_from(["gpt2", "llama", "llama_tied"]),
    seed=st.integers(0, 10**6),
    others=st.integers(0, 4),
    c=st.floats(1e-3, 10.0),
    ids=st.lists(st.integers(0, 96), min_size=1, max_size=30),
    given=st.integers(0, 30),
)
def test_a_record_moves_the_clipped_sum_by_at_most_c(
    model: str, seed: int, others: int, c: float, ids: list[int], given: int
) -> None:
    new = TrainingText(tuple(ids), min(given, len(ids)))
    batch = texts(others, seed)
    clip_to = DpSgdStep(0.1, 1.0, c, 6.0).clip_to
    # The rest of the sum, up to 4 C long, is rounded to float32.
    assert moved_by(tiny(model), batch, new, clip_to) <= c


def test_broken_clipping_moves_it_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = tiny("gpt2")
    right = loss.norms

    def scaled(*args: Any) -> Any:  # what an engine's scale does
        norms, parts = right(*args)
        return norms / 4, parts

    monkeypatch.setattr(loss, "norms", scaled)
    assert moved_by(loss, texts(2), texts(1, seed=9)[0], C) > 2 * C


def test_what_an_engine_does_to_its_output_does_not_reach_the_norms() -> None:
    loss, batch = tiny("llama"), MicroBatch.of(texts(3))

    def engine(*inputs: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = loss(*inputs)
        losses.register_hook(lambda gradient: gradient / 4)
        return losses

    assert (loss.norms(batch, engine)[0] == loss.norms(batch, loss)[0]).all()


def poisoned() -> PerExampleLoss:
    """Texts with token 96 have a loss that is not finite."""
    loss = PerExampleLoss(llama()).eval()
    with torch.no_grad():
        loss.model.get_input_embeddings().weight[96] = torch.inf  # type: ignore[operator]
    return loss


@pytest.mark.parametrize("two_passes", [False, True])
def test_an_example_that_is_not_finite_counts_as_none(two_passes: bool) -> None:
    loss = poisoned()
    batch = [replace(t, ids=tuple(min(i, 95) for i in t.ids)) for t in texts(4)]
    bad = TrainingText((5, 96, 7, 8, 9), 0)
    without = clipped_sum(loss, batch, C, 3, two_passes)
    for place in range(5):
        total = clipped_sum(loss, [*batch[:place], bad, *batch[place:]], C, 3, two_passes)
        torch.testing.assert_close(total, without, rtol=0, atol=1e-6)


def test_a_loss_is_the_mean_over_the_texts_own_tokens() -> None:
    loss, text = PerExampleLoss(gpt2()).eval(), TrainingText((5, 6, 7, 8, 9), 3)
    logits = loss.model(input_ids=torch.tensor([text.ids])).logits[0]
    log_p = torch.log_softmax(logits, -1)
    alone = -(log_p[2, 8] + log_p[3, 9]) / 2
    batch = MicroBatch.of([text, *texts(3)])
    losses = loss(batch.ids, batch.mask, batch.labels)
    torch.testing.assert_close(losses[0], alone, rtol=1e-6, atol=0)


def test_training_mode_is_refused() -> None:
    loss = PerExampleLoss(gpt2()).train()
    with pytest.raises(ValueError, match="dropout"):
        loss.clipped(MicroBatch.of(texts(2)), C)


def test_bfloat16_stays_within_c() -> None:
    """The true norm of what an example adds, after rounding in both passes."""
    loss = PerExampleLoss(lora(llama()), "bfloat16").eval()
    step = DpSgdStep(0.1, 1.0, 0.05, 6.0, "bfloat16")
    norms = [float(clipped_sum(loss, [t], step.clip_to, 1).double().norm()) for t in texts(30)]
    assert 0.96 * step.clip_norm < max(norms) <= step.clip_norm


def test_the_check_of_a_bfloat16_model_is_in_float32() -> None:
    loss = PerExampleLoss(lora(llama()), "bfloat16").eval()
    check_norm_rules(loss, 97)
    assert loss.precision == "bfloat16"


def test_a_model_in_another_precision_than_the_plans_is_refused() -> None:
    loss = PerExampleLoss(lora(llama()), "bfloat16").eval()
    with pytest.raises(ValueError, match="bfloat16"):
        ReferenceTrainer(plan(), loss, new_key())


def test_bfloat16_adds_up_in_float32() -> None:
    loss = PerExampleLoss(lora(llama()), "bfloat16").eval()
    batch = MicroBatch.of(texts(4))
    loss.clipped(batch, 1.0).backward()
    adapters = [p for p in loss.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in adapters)
    # A sum that went through bfloat16 has zeros in the last 16 bits.
    bits = torch.cat([p.grad.reshape(-1) for p in adapters]).view(torch.int32)  # type: ignore[union-attr]
    assert (bits % 65536 != 0).float().mean() > 0.9


class Listening:
    """A trainer that only notes what it is given."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.steps: list[list[MicroBatch]] = [[]]
        self.lasts: list[bool] = []
        self.rates: list[float] = []

    def accumulate(self, micro_batch: MicroBatch, last: bool) -> None:
        self.steps[-1].append(micro_batch)
        self.lasts.append(last)

    def step(self, learning_rate: float) -> None:
        self.rates.append(learning_rate)
        self.steps.append([])


def test_ranks_take_the_batch_apart() -> None:
    units, key = [[text] for text in texts(20)], new_key()
    ranks = [Listening(rank, 3) for rank in range(3)]
    for trainer in ranks:
        fine_tune(plan(steps=5, micro_batch_size=1), units, trainer, generator(key))
    rng = generator(key)
    for step in range(5):
        batch = poisson_batch(20, 0.3, rng)
        counts = {len(trainer.steps[step]) for trainer in ranks}
        assert counts == {max(1, -(-len(batch) // 3))}
        labels = [m.labels for trainer in ranks for m in trainer.steps[step]]
        assert sum(bool((row != -100).any()) for m in labels for row in m) == len(batch)


def test_texts_of_a_length_go_together() -> None:
    lengths = [2, 9, 3, 8, 2, 9, 3, 8]
    everybody = replace(plan(), steps=1, micro_batch_size=2)
    everybody = replace(everybody, mechanism=replace(everybody.mechanism, sampling_probability=1.0))
    trainer = Listening()
    units = [[TrainingText((1,) * length, 0)] for length in lengths]
    fine_tune(everybody, units, trainer, generator(new_key()))
    assert [m.ids.shape for m in trainer.steps[0]] == [(2, 5), (2, 5), (2, 9), (2, 13)]


def test_a_text_is_padded_by_its_own_length_alone() -> None:
    assert [padded_length(n) for n in (0, 1, 4, 5, 6, 7, 8, 9, 12, 13)] == [
        5, 5, 5, 7, 7, 9, 9, 13, 13, 17,
    ]  # fmt: skip
    assert [padded_length(n) for n in (64, 65, 96, 97, 128, 1024)] == [65, 97, 97, 129, 129, 1025]
    assert all(n < padded_length(n) <= max(5, 3 * n // 2 + 1) for n in range(1, 3000))


SHAPES = {"bfloat16": 1e-5, "float32": 1e-5}


@pytest.mark.parametrize("precision", SHAPES)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_text_does_not_move_the_gradients_of_others(precision: Any, tuning: str) -> None:
    """Their sum moves by the rounding of float32 sums at most, whichever text joins: short or long,
    at the end of a micro-batch or with one of its own, without any padding or with much."""
    model = llama() if tuning == "full" else lora(llama())
    loss = PerExampleLoss(model, precision).eval()
    full = [TrainingText((n,) * 16, 1) for n in range(2, 8)]
    batch, size, c = [*full, *texts(40)], 4, 0.05  # all are clipped
    others = sum_of_others(loss, batch, None, size, c)
    new_texts = [TrainingText((3,) * length, 1) for length in (3, 14, 16, 40)]
    for new in [*new_texts, *texts(4, seed=9)]:
        moved = (sum_of_others(loss, [new, *batch], new, size, c) - others).norm()
        assert moved <= SHAPES[precision] * c


def sum_of_others(
    loss: PerExampleLoss, batch: list[TrainingText], but: TrainingText | None, size: int, c: float
) -> torch.Tensor:
    """The sum of the clipped gradients of all texts but one, which goes through the model too."""
    total = torch.zeros(sum(p.numel() for p in trainable(loss.model)))
    for part, positions in share(batch, size, 0, 1):
        norms_B, seen = loss.norms(MicroBatch.of(part, size, positions), loss)
        weight_B = (c / norms_B).clamp(max=1.0).float()
        for row, text in enumerate(part):
            if text is but:
                weight_B[row] = 0.0
        sums = [weighted_sum(seen.parts[p], weight_B, p.detach()) for p in trainable(loss.model)]
        total += torch.cat([each.flatten() for each in sums])
    return total


@given(size=st.integers(1, 5), ranks=st.integers(1, 5), count=st.integers(0, 40))
def test_shares_are_equally_many_and_hold_every_text_once(
    size: int, ranks: int, count: int
) -> None:
    batch = [TrainingText((i,) * (i % 11 + 1), 0) for i in range(count)]
    shares = [share(batch, size, rank, ranks) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in shares}) == 1 and len(shares[0]) >= 1
    assert all(len(micro) <= size for of_rank in shares for micro, _ in of_rank)
    assert all(
        positions == padded_length(len(text.ids))
        for of_rank in shares
        for micro, positions in of_rank
        for text in micro
    )
    held = [text.ids[0] for of_rank in shares for micro, _ in of_rank for text in micro]
    assert sorted(held) == list(range(count))


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
    assert trainer.rates == [0.1] * 3 and len(trainer.lasts) >= 3


def test_the_plan_costs_its_steps() -> None:
    event = plan(sigma=0.8).dp_event
    assert event == SelfComposed(PoissonSubsampledGaussian(0.3, 0.8), 3)


def test_learning_rates() -> None:
    assert [plan().learning_rate_at(t) for t in range(3)] == [0.1] * 3
    linear = plan(schedule="linear")
    np.testing.assert_allclose(
        [linear.learning_rate_at(t) for t in range(3)], [0.1, 0.2 / 3, 0.1 / 3]
    )


def test_control_codes_are_the_papers() -> None:
    code = control_code({"Business Type": "Restaurants", "Review Stars": "5.0"})
    assert code == "Business Type: Restaurants | Review Stars: 5.0\n"
    assert control_code({}) == ""


def characters(max_length: int, bos: int | None = None) -> TextEncoder:
    return TextEncoder(lambda s: [ord(c) for c in s], eos=2, max_length=max_length, bos=bos)


def test_a_text_follows_its_code_and_ends() -> None:
    encoder = characters(20)
    text = encoder.training_text("a: b\n", "xy")
    assert text.ids == (2, *map(ord, "a: b\nxy"), 2) and text.given == 6
    assert text.ids[: text.given] == encoder.prompt("a: b\n")
    assert characters(20, bos=1).prompt("a")[0] == 1


def test_a_long_record_is_cut_by_itself() -> None:
    assert characters(8).training_text("a: b\n", "xyz").ids == (2, *map(ord, "a: b\nxy"))
    all_code = characters(4).training_text("a: b\n", "xyz")
    assert all_code.ids == (2, *map(ord, "a: ")) and all_code.given == 4
    loss = PerExampleLoss(gpt2()).eval()
    small = replace(all_code, ids=(2, 3, 4, 5))
    assert not clipped_sum(loss, [small], C, 1).any()


def test_private_texts_are_not_shown() -> None:
    text = characters(9).training_text("", "Marlowe")
    assert str(ord("M")) not in repr(text) and "tensor" not in repr(MicroBatch.of([text]))

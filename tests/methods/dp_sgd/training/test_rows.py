"""Micro-batches have fewer rows only where that leaves every text's bits as they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.gradient_parts import Outer
from dpray.methods.dp_sgd.training.rows import RowCheck
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText, share
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from tests.methods.dp_sgd.training.tiny_gradients import flat, gpt2, llama, lora, texts, trainable

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FULL, POSITIONS = 8, 33


def depends_on_rows(model: Any) -> Any:
    """Have a layer in the midst of the model round otherwise in a full micro-batch."""

    def rounded(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 1e-6) if len(output) == FULL else output

    layer = next(m for name, m in model.named_modules() if name.endswith("mlp"))
    layer.register_forward_hook(rounded)
    return model


@pytest.mark.parametrize("make", [gpt2, lambda: lora(llama())], ids=["gpt2", "llama_lora"])
def test_a_kernel_that_depends_on_the_number_of_rows_is_found(make: Callable[[], Any]) -> None:
    check = RowCheck(PerExampleLoss(depends_on_rows(make())).eval(), CPU)
    assert not check.is_alike(2, FULL, POSITIONS) and not check.is_free(FULL)
    assert check.is_alike(FULL, FULL, POSITIONS)
    plain = RowCheck(PerExampleLoss(make()).eval(), CPU)
    assert check.is_alike(2, 3, POSITIONS) == plain.is_alike(2, 3, POSITIONS)


def test_a_kernel_that_depends_on_the_place_of_a_row_is_found() -> None:
    model = gpt2()

    def rounded(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(len(output), 1, 1)
        scale[4:] += 1e-6
        return output * scale

    loss = PerExampleLoss(model).eval()
    assert RowCheck(loss, CPU).is_alike(3, FULL, POSITIONS)
    layer = next(m for name, m in model.named_modules() if name.endswith("mlp"))
    layer.register_forward_hook(rounded)
    assert not RowCheck(loss, CPU).is_alike(3, FULL, POSITIONS)


def test_a_step_between_two_checks_changes_no_verdict() -> None:
    """Both sides of a check are of the same weights."""
    model = gpt2()
    check = RowCheck(PerExampleLoss(model).eval(), CPU)
    assert check.is_alike(1, FULL, POSITIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    assert check.is_alike(2, FULL, POSITIONS)


def test_rows_stay_fixed_on_other_devices_than_a_cpu() -> None:
    check = RowCheck(PerExampleLoss(gpt2()).eval(), torch.device("meta"))
    assert not check.is_free(FULL) and check.is_alike(FULL, FULL, POSITIONS)


def test_adapters_that_are_zero_hide_nothing() -> None:
    """Before the first step half of the adapters are zero, and so is all that they multiply."""
    model = lora(llama())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()

    def of_gradient(module: Any, _: Any, output: torch.Tensor) -> None:
        if len(output) == FULL:
            output.register_hook(lambda gradient: gradient * (1 + 1e-6))

    loss, before = PerExampleLoss(model).eval(), flat(model)
    layer = next(m for name, m in model.named_modules() if name.endswith("q_proj.lora_A.default"))
    layer.register_forward_hook(of_gradient)
    assert not RowCheck(loss, CPU).is_alike(2, FULL, POSITIONS)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_dummies_fill_up_a_micro_batch_only_where_rows_matter(
    is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt2()
    loss = PerExampleLoss(depends_on_rows(model) if is_fixed else model).eval()
    trainer = ReferenceTrainer(
        DpSgdStep(0.5, 1.0, 1.0, 4.0), TrainingSettings(tuning="full"), loss, new_key()
    )
    monkeypatch.setattr(trainer.row_check, "is_alike", lambda *_: not is_fixed)
    rows = []
    of = MicroBatch.of
    monkeypatch.setattr(MicroBatch, "of", lambda *found: rows.append(found[1]) or of(*found))
    trainer.accumulate(texts(3), (FULL, POSITIONS), last=True)
    trainer.accumulate((), (FULL, POSITIONS), last=True)
    assert rows == ([FULL, FULL] if is_fixed else [3, 1])


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_what_the_check_says_holds_for_other_texts(tuning: str) -> None:
    """A shape in which made-up texts are alike gives real ones the same gradients, all numbers of
    them, among any others."""
    loss = PerExampleLoss(gpt2() if tuning == "full" else lora(llama())).eval()
    check, tried = RowCheck(loss, CPU), 0
    many = [TrainingText(tuple((7 * n + k) % 90 + 1 for k in range(29 + n % 4)), n % 5)
            for n in range(FULL)]  # fmt: skip
    parts_of = {rows: parts(loss, many[:rows]) for rows in range(1, FULL + 1)}
    for rows in range(1, FULL):
        if check.is_alike(rows, FULL, POSITIONS):
            tried += 1
            for few, full in zip(parts_of[rows], parts_of[FULL], strict=True):
                assert torch.equal(few, full[:rows])
    assert tried or not check.is_free(FULL)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_text_more_moves_a_trainers_sum_by_c(precision: Any) -> None:
    """With fewer rows where made-up texts are alike, a text of seed 52 moved it by 1.0001 C in
    bfloat16."""
    loss, c = PerExampleLoss(lora(gpt2()), precision).eval(), 0.05
    step = DpSgdStep(0.5, 1.0, c, 1.0)
    trainer = ReferenceTrainer(
        step, TrainingSettings(optimizer="sgd", learning_rate=1.0), loss, new_key()
    )

    def clipped_sum(batch: list[TrainingText]) -> torch.Tensor:
        loss.zero_grad()
        for part, positions in share(batch, FULL, 0, 1):
            trainer.accumulate(part, (FULL, positions), last=True)
        return torch.cat([p.grad.flatten() for p in trainable(loss) if p.grad is not None])

    moved = []
    for seed in range(50, 60):
        rng = random.Random(seed)
        length = (4, 6, 8, 12, 24)[seed % 5]
        new, *others = [
            TrainingText(tuple(rng.randrange(97) for _ in range(length)), 1) for _ in range(9)
        ]
        moved.append(float((clipped_sum([new, *others]) - clipped_sum(others)).norm()))
    assert 0.5 * c < max(moved) <= c * (1 + 1e-5)


def parts(loss: PerExampleLoss, batch: list[TrainingText]) -> list[torch.Tensor]:
    _, recorded = loss.norms(MicroBatch.of(batch, len(batch), POSITIONS), loss)
    found = []
    for each in recorded.all_parts().values():
        for part in each:
            found += [part.left, part.right] if isinstance(part, Outer) else [*vars(part).values()]
    return found

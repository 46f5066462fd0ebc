"""The reference trainer makes single steps; a training goes from the base model to the folder of
the tuned one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpray.ledger.ledger import NullLedger
from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, Units
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.journal import Journal
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.training import ReferenceTrainer, Training, train_here
from dpray.types import DprayError, InputError
from tests.methods.dp_sgd.training.tiny_gradients import (
    flat,
    gpt2,
    texts,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def read(trainer: ReferenceTrainer) -> Units[TrainingText]:
    return [[text] for text in texts(4)]


def training(steps: int, base: str, folder: Path) -> Training:
    checkpoints = str(folder.parent / "checkpoints")
    settings = TrainingSettings(lora_rank=2, learning_rate=0.1)
    return Training(
        method=DpSgd(DpSgdStep(0.5, 1.0, 1.0, 4.0), steps, settings),
        read=read,
        base=base,
        base_name=base,
        folder=str(folder),
        journal=Journal(NullLedger(), "run", "attempt", checkpoints, steps=5, block_size=2),
    )


def test_an_interrupted_training_resumes_after_its_last_block(
    model_folder: str, tmp_path: Path
) -> None:
    """Without a ledger the checkpoint's name says which block it ends."""
    shown = list[int]()
    train_here(training(3, model_folder, tmp_path / "model"), shown.append)
    resumed = training(5, model_folder, tmp_path / "model")
    assert resumed.journal.steps_done() == 2
    train_here(resumed, shown.append)
    assert shown == [0, 1, 2, 2, 3, 4]
    assert resumed.journal.steps_done() == 5
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_checkpoint_takes_the_place_of_the_one_before_it_alone(tmp_path: Path) -> None:
    journal = Journal(NullLedger(), "run", "attempt", str(tmp_path), steps=4, block_size=2)
    # What NFS keeps of a file that is mapped cannot be removed either.
    (tmp_path / ".nfs0001").mkdir()
    (tmp_path / "steps-00000001-00000002-before.tmp").touch()
    for t in (1, 3):
        journal.keep(t - 1, t, [("weights/w", torch.ones(2))])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".nfs0001", "steps-00000003-00000004-attempt.safetensors"}


def test_a_rank_that_does_not_see_the_output_folder_makes_no_step(
    model_folder: str, tmp_path: Path
) -> None:
    """On another node, whose disk has no such folder, a step would be charged for nothing."""
    shown, folder = list[int](), tmp_path / "of_another_node" / "model"
    with pytest.raises(InputError, match=r"output\.path: a machine .* disk that all nodes share"):
        train_here(training(5, model_folder, folder), shown.append)
    assert not shown and not folder.parent.exists()


def test_a_step_without_noise_changes_no_weight() -> None:
    loss = PerExampleLoss(gpt2()).eval()
    before = flat(loss.model)
    step = DpSgdStep(0.3, 1.0, 0.7, expected_batch_size=6.0)
    trainer = ReferenceTrainer(step, TrainingSettings(optimizer="sgd"), loss, new_key())
    for _ in range(2):
        trainer.accumulate(texts(2), (2, 30), last=True)
        with pytest.raises(DprayError, match="without noise"):
            trainer.update()
    assert torch.equal(flat(loss.model), before)

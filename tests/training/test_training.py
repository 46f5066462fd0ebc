"""A training goes from the base model to the folder of the tuned one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpray.accounting.run_ledger import NullLedger
from dpray.config.training import TrainingSettings
from dpray.training.journal import Journal
from dpray.training.reference import train_here
from dpray.training.step import DpSgdStep
from dpray.training.training import Training
from dpray.types import InputError
from tests.training.tiny_gradients import texts

pytestmark = pytest.mark.usefixtures("one_thread")


class Steps:
    """Makes `steps` steps on the same texts."""

    def __init__(self, steps: int) -> None:
        self.steps, self.made = steps, list[int]()

    def __call__(
        self, trainer: Any, sampling: Any, before_step: Any, after_step: Any, start: int
    ) -> None:
        for t in range(start, self.steps):
            before_step(t)
            trainer.accumulate(texts(4), (4, 33), last=True)
            trainer.step(0.1)
            self.made.append(t)
            after_step(t)


def training(loop: Steps, base: str, folder: Path) -> Training:
    checkpoints = str(folder.parent / "checkpoints")
    return Training(
        step=DpSgdStep(0.5, 1.0, 1.0, 4.0),
        settings=TrainingSettings(lora_rank=2),
        base=base,
        base_name=base,
        loop=loop,
        folder=str(folder),
        journal=Journal(NullLedger(), "run", "attempt", checkpoints, steps=5, block_size=2),
    )


def test_an_interrupted_training_resumes_after_its_last_block(
    model_folder: str, tmp_path: Path
) -> None:
    """Without a ledger the checkpoint's name says which block it ends."""
    loop, shown = Steps(3), list[int]()
    train_here(training(loop, model_folder, tmp_path / "model"), shown.append)
    loop.steps = 5
    resumed = training(loop, model_folder, tmp_path / "model")
    assert resumed.journal.steps_done() == 2
    train_here(resumed, shown.append)
    assert loop.made == shown == [0, 1, 2, 2, 3, 4]
    assert resumed.journal.steps_done() == 5
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_rank_that_does_not_see_the_output_folder_makes_no_step(
    model_folder: str, tmp_path: Path
) -> None:
    """On another node, whose disk has no such folder, a step would be charged for nothing."""
    loop, folder = Steps(5), tmp_path / "of_another_node" / "model"
    with pytest.raises(InputError, match=r"output\.path: a rank .* disk that all nodes share"):
        train_here(training(loop, model_folder, folder), lambda t: None)
    assert not loop.made and not folder.parent.exists()

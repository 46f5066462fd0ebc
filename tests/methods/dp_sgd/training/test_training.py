"""The reference trainer makes single steps; a training goes from the base model to the folder of
the tuned one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpray.ledger.ledger import NullLedger
from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, Units
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.journal import Journal, shard_of
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.training import ReferenceTrainer, Training, train_here
from dpray.types import DprayError, InputError
from tests.methods.dp_sgd.training.tiny_gradients import flat, gpt2, texts

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


def kept(journal: Journal, first: int, t: int, ranks: int) -> None:
    """Store a state of three tensors, each with the number of steps in it, as ranks do together."""
    tensors = [(f"weights/{name}", torch.full((2,), float(t + 1))) for name in "abc"]
    shards = [shard_of(tensors, rank, ranks) for rank in range(ranks)]
    written = [journal.write(first, rank, shard) for rank, shard in enumerate(shards)]
    journal.publish(first, t, written)


def journal_in(folder: Path, attempt: str = "attempt") -> Journal:
    return Journal(NullLedger(), "run", attempt, str(folder), steps=4, block_size=2)


def test_a_checkpoint_takes_the_place_of_the_one_before_it_alone(tmp_path: Path) -> None:
    # What NFS keeps of a file that is mapped cannot be removed either.
    (tmp_path / ".nfs0001").mkdir()
    (tmp_path / "steps-00000001-00000002-before-00000.tmp").touch()
    for t in (1, 3):
        kept(journal_in(tmp_path), t - 1, t, ranks=2)
    names = {path.name for path in tmp_path.iterdir()}
    ends = (".json", "-00000.safetensors", "-00001.safetensors")
    assert names == {".nfs0001", *(f"steps-00000003-00000004-attempt{end}" for end in ends)}


def test_ranks_store_equal_shares_that_any_number_of_ranks_reads(tmp_path: Path) -> None:
    sizes = {"embedding": 90, "head": 90, "a": 40, "b": 40, "c": 40}
    tensors = [(name, torch.zeros(size)) for name, size in sizes.items()]
    shards = [shard_of(tensors, rank, 3) for rank in range(3)]
    assert [set(shard) for shard in shards] == [{"embedding"}, {"head"}, {"a", "b", "c"}]
    kept(journal_in(tmp_path), 0, 1, ranks=3)
    for ranks in (1, 2, 5):
        for rank in range(ranks):
            state = journal_in(tmp_path).latest(rank, ranks)
            assert state is not None and state.steps == 2
            assert {name: weight.tolist() for name, weight in state.weights.items()} == {
                name: [2.0, 2.0] for name in "abc"
            }


def test_a_shard_that_is_missing_changed_or_of_another_checkpoint_is_refused(
    tmp_path: Path,
) -> None:
    journal, other = journal_in(tmp_path), journal_in(tmp_path / "other")
    kept(other, 0, 1, ranks=2)
    kept(journal, 2, 3, ranks=2)
    [first, second] = sorted(tmp_path.glob("*.safetensors"))
    whole = first.read_bytes(), second.read_bytes()
    [earlier, _] = sorted((tmp_path / "other").glob("*.safetensors"))

    def refused(message: str) -> None:
        """Rank 1 of two reads the second shard."""
        with pytest.raises(DprayError, match=rf"{second.name}: {message}; .*put the file back"):
            journal.latest(1, 2)
        first.write_bytes(whole[0])
        second.write_bytes(whole[1])
        assert all(journal.latest(rank, 2) is not None for rank in range(2))

    second.unlink()
    refused("is missing")
    changed = "was changed, or is of another checkpoint"
    second.write_bytes(whole[1][:-1] + b"!")
    refused(changed)
    second.write_bytes(earlier.read_bytes())  # a shard of an earlier step
    refused(changed)
    second.write_bytes(whole[0])  # another rank's
    refused(changed)


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
    trainer = ReferenceTrainer(
        step, TrainingSettings(optimizer="sgd", learning_rate=1.0), loss, new_key()
    )
    for _ in range(2):
        trainer.accumulate(texts(2), (2, 30), last=True)
        with pytest.raises(DprayError, match="without noise"):
            trainer.update()
    assert torch.equal(flat(loss.model), before)


@pytest.mark.parametrize(
    ("keys", "rate"),
    [({}, 2e-3), ({"tuning": "full"}, 1e-4), ({"tuning": "full", "learning_rate": 0.5}, 0.5)],
)
def test_the_rate_of_adapters_is_not_that_of_all_weights(keys: dict[str, Any], rate: float) -> None:
    """AdamW's first step moves a weight by its rate, whatever the gradient."""
    loss = PerExampleLoss(gpt2()).eval()
    before = flat(loss.model)
    step = DpSgdStep(0.3, 1.0, 0.7, expected_batch_size=6.0)
    trainer = ReferenceTrainer(step, TrainingSettings(**keys), loss, new_key())
    trainer.accumulate(texts(2), (2, 30), last=True)
    trainer.add_noise()
    trainer.update()
    moved = (flat(loss.model) - before).abs()
    assert moved.max().item() == pytest.approx(rate, rel=1e-3)

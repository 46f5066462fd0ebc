"""Interrupted DP-SGD runs keep their checkpoints, and are charged for the steps they repeat."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from ray.exceptions import OutOfMemoryError

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.config.config import Config
from dpray.engines.base import EngineError
from dpray.io.formats import FilePart
from dpray.ledger.ledger import Ledger
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods import registry as methods
from dpray.methods.dp_sgd import release
from dpray.methods.dp_sgd.algorithm import DpSgd, fine_tune
from dpray.methods.dp_sgd.training import journal, training
from dpray.methods.dp_sgd.training.journal import TrainingState
from dpray.methods.dp_sgd.training.model import load_loss, put_weights
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep
from dpray.methods.dp_sgd.training.token_files import MappedUnits, write_names, write_shard
from dpray.methods.dp_sgd.training.training import GradientNoise, ReferenceTrainer
from dpray.types import BudgetRefused, DprayError, InputError, Progress, Resumable
from dpray.workers.rows import Row, record_rows
from tests.methods.dp_sgd.training.states import state_of
from tests.methods.dp_sgd.training.tiny_gradients import texts
from tests.workers.outcomes import open_budget

pytestmark = pytest.mark.usefixtures("one_thread")


def interrupt(run: Config, steps: int) -> None:
    """Run until so many steps are made, and interrupt the next one, whose block has begun."""

    def on_progress(progress: Progress) -> None:
        if (progress.activity, progress.completed) == ("training steps", steps):
            raise KeyboardInterrupt

    with pytest.raises(Resumable, match="from the last checkpoint: the steps after it, 2 at"):
        methods.run(run, on_progress)


def test_records_are_read_once_and_kept_until_the_model_is_published(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config()
    open_budget(run)
    read: list[str] = []

    def counted(part: FilePart, *arguments: Any, **named: Any) -> Iterator[Row]:
        read.append(part.file)
        yield from record_rows(part, *arguments, **named)

    monkeypatch.setattr(release, "record_rows", counted)
    tokens = Path(run.output.path) / "private" / "tokens"
    # Of a run with other keys, which stopped before it drew anything.
    tokens.mkdir(parents=True)
    write_names(tokens, [write_shard(tokens, [], 1)])
    interrupt(run, 3)
    _, first = sorted(tokens.iterdir(), key=Path.is_dir)
    assert len(MappedUnits(tokens, [first.name])) == 60
    report = methods.run(run)
    assert read == [run.data.path] and report["steps"]["repeated"] == 2
    assert not tokens.exists()


def test_token_ids_that_were_altered_stop_the_run_before_a_step_begins(
    config: Callable[..., Config],
) -> None:
    run = config()
    open_budget(run)
    interrupt(run, 3)
    tokens = Path(run.output.path) / "private" / "tokens"
    [ids] = tokens.glob("*/ids.bin")
    ids.write_bytes(ids.read_bytes()[:-4] + bytes(4))
    with pytest.raises(InputError, match="remove the folder; the run is charged: once that is"):
        methods.run(run)
    rmtree(tokens)
    assert methods.run(run)["steps"] == {"planned": 6, "repeated": 2, "charged": 8}


def test_a_bad_row_is_corrected_at_no_cost(
    config: Callable[..., Config], records_file: Path
) -> None:
    """It is found before a mechanism begins: the run has not drawn anything from the file."""
    run, good = config(), records_file.read_text()
    open_budget(run)
    lines = good.splitlines(keepends=True)
    lines[40] = '{"text": 7, "label": "a"}\n'
    records_file.write_text("".join(lines))
    with pytest.raises(InputError, match=r"row 41: .*; the run is charged: once that is fixed"):
        methods.run(run)
    records_file.write_text(good)
    assert methods.run(run)["steps"]["repeated"] == 0


def test_a_block_that_a_rank_given_up_for_lost_begins_is_paid_for(
    config: Callable[..., Config],
) -> None:
    """It belongs to an earlier attempt, lives on, and comes to the block that is under way."""
    run = config()
    ledger = open_budget(run)

    def begun_twice(progress: Progress) -> None:
        if (progress.activity, progress.completed) == ("training steps", 5):
            [key] = {row["key"] for row in ledger.export() if row["kind"] == "begin"}
            ledger.begin(key, "another-attempt", ["steps-00000005-00000006"])

    report = methods.run(run, begun_twice)
    assert report["steps"] == {"planned": 6, "repeated": 2, "charged": 8}
    account = ledger.account("notes")
    assert account is not None
    event = PoissonSubsampledGaussian(1 / 6, 0.8)
    assert [charge.event.terms()[event] for charge in account.charges] == [6, 2]
    assert ledger.verify() == []


@pytest.mark.parametrize("last", [0, 1, 5])
def test_a_training_that_has_a_notice_repeats_no_step(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """After the step `last` a machine will be taken away: it is the last one before the next start
    of the ranks, wherever in its block it is."""
    run = config()
    ledger = open_budget(run)
    steps = iter(range(7))
    made: list[int] = []
    starts: list[int] = []
    resumed = training._resumed

    def has_notice(trainer: ReferenceTrainer) -> bool:
        made.append(next(steps))
        return made[-1] == last

    def counted(*arguments: Any) -> tuple[ReferenceTrainer, int]:
        trainer, start = resumed(*arguments)
        starts.append(start)
        return trainer, start

    monkeypatch.setattr(ReferenceTrainer, "has_notice", has_notice)
    monkeypatch.setattr(training, "_resumed", counted)
    report = methods.run(run)
    assert made == [*range(6)] and starts == [0, last + 1][: 1 if last == 5 else 2]
    assert report["steps"] == {"planned": 6, "repeated": 0, "charged": 6}
    published = [unit for unit, _ in ledger.published(report["ledger"]["reservation"])]
    blocks = {"steps-00000001-00000002", "steps-00000003-00000004", "steps-00000005-00000006"}
    cut = {0: {"steps-00000002-00000002"}}.get(last, set())
    assert {*published} == blocks | cut | {"model"}
    assert ledger.verify() == []


def test_an_interrupted_run_resumes_with_fresh_noise_and_is_charged_for_repeats(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the third of six steps, the first two are kept and the third is repeated."""
    run = config()
    ledger = open_budget(run)
    keys: list[str] = []
    steps = 0
    restored: list[TrainingState] = []
    start, update = GradientNoise.__init__, ReferenceTrainer.update
    restore = ReferenceTrainer.restore

    def started(noise: GradientNoise, mechanism: Any, key: str) -> None:
        keys.append(key)
        start(noise, mechanism, key)

    def made(trainer: ReferenceTrainer) -> None:
        nonlocal steps
        steps += 1
        update(trainer)

    def was_restored(trainer: ReferenceTrainer, state: TrainingState) -> None:
        restored.append(state)
        restore(trainer, state)

    monkeypatch.setattr(GradientNoise, "__init__", started)
    monkeypatch.setattr(ReferenceTrainer, "update", made)
    monkeypatch.setattr(ReferenceTrainer, "restore", was_restored)
    interrupt(run, 3)
    report = methods.run(run)

    assert steps == 3 + 4
    assert len(set(keys)) == len(keys) == 2
    assert [state.steps for state in restored] == [2]
    assert set(restored[0].moments) == {"exp_avg", "exp_avg_sq"}
    assert report["steps"] == {"planned": 6, "repeated": 2, "charged": 8}
    event = PoissonSubsampledGaussian(1 / 6, 0.8)
    assert report["epsilon"] == cost(SelfComposed(event, 8), 1e-5).epsilon
    assert report["mechanisms"][0]["count"] == 8

    account = ledger.account("notes")
    assert account is not None
    assert [c.event.terms()[event] for c in account.charges] == [6, 2]
    whole = sum(c.reserved.epsilon for c in account.charges)
    assert account.spent.epsilon == pytest.approx(whole, rel=1e-12)
    assert account.spent.epsilon > report["epsilon"]
    assert ledger.verify() == []
    assert ledger.is_reserved(f"{report['ledger']['reservation']}/again-1")
    ledger.close()


def test_a_state_that_was_stored_steps_like_the_one_that_went_on(model_folder: str) -> None:
    """Without noise and with every unit in every batch, an interruption leaves no trace."""
    step = DpSgdStep(1.0, 1e-12, 1.0, 8.0)
    settings = TrainingSettings(lora_rank=2, micro_batch_size=4, learning_rate=0.01)
    plan = DpSgd(step, 4, settings)
    units = [[text] for text in texts(8)]

    def trained(start: int, end: int, state: TrainingState | None) -> TrainingState:
        loss = load_loss(model_folder, settings)
        if state is not None:
            put_weights(loss, state.weights)
        trainer = ReferenceTrainer(step, settings, loss, new_key())
        if state is not None:
            trainer.restore(state)
        until = replace(plan, steps=end)
        fine_tune(until, units, trainer, generator(new_key()), start=start)
        return state_of(trainer, end)

    whole = trained(0, 4, None)
    resumed = trained(2, 4, trained(0, 2, None))
    unrestored = trained(2, 4, replace(trained(0, 2, None), moments={}))
    for name, weight in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=1e-5)
    assert any((unrestored.weights[n] - w).abs().max() > 1e-4 for n, w in whole.weights.items())


def test_spare_steps_pay_for_an_interruption_and_not_for_two(config: Callable[..., Config]) -> None:
    run = config(method__spare_steps=2)
    planned = methods.make_plan(run).cost.epsilon
    for step in (2, 4):
        interrupt(run, step)
    # The budget that the run made for itself is just its plan: nothing is left for a second.
    with pytest.raises(BudgetRefused, match=r"4 of 6 steps were lost.*spare_steps") as refused:
        methods.run(run)
    assert refused.value.exit_code == 3
    ledger = Ledger.open(run.privacy.ledger)
    account = ledger.account("notes")
    assert account is not None and account.spent.epsilon == planned and len(account.charges) == 1
    ledger.close()
    assert not (Path(run.output.path) / "synthetic.jsonl").exists()


def test_repeated_steps_may_not_cost_more_than_the_run_may(
    config: Callable[..., Config],
) -> None:
    run = config(privacy__epsilon=methods.make_plan(config()).cost.epsilon)
    open_budget(run).close()
    interrupt(run, 1)
    with pytest.raises(BudgetRefused, match=r"privacy\.epsilon is .*repeated"):
        methods.run(run)


def test_a_checkpoint_that_was_altered_is_refused(config: Callable[..., Config]) -> None:
    """The ledger knows the manifest, and the manifest its shards (training/test_training.py)."""
    run = config(method__spare_steps=2)
    interrupt(run, 3)
    [path] = (Path(run.output.path) / "private" / "checkpoints").glob("*.json")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DprayError, match=rf"{path.name}: was changed, or is of another checkpoint"):
        methods.run(run)


def test_what_writes_the_texts_may_change_once_the_model_is_trained(
    config: Callable[..., Config],
) -> None:
    """As it may have to, where an engine cannot load the tuned model."""
    run, other = config(), {"method__temperature": 0.5, "engine__dtype": "float32"}
    open_budget(run)
    interrupt(run, 3)
    with pytest.raises(InputError, match=r"other now: engine\.dtype, method\.temperature\)"):
        methods.run(config(**other))

    def cannot_load(section: Any) -> Any:
        raise EngineError("it cannot be loaded")

    with pytest.raises(Resumable, match="cannot be loaded"):
        methods.run(run, build=cannot_load)
    for fixed in ({"engine__model": "smollm2"}, {"method__clip_norm": 0.5}):
        with pytest.raises(InputError, match=r"other now: \w+\.\w+\)"):
            methods.run(config(**fixed))
    report = methods.run(config(**other))
    assert report["sampling"]["changed_during_the_run"].startswith("engine.dtype, method.temp")


def test_a_training_whose_code_raised_is_never_repeated(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config()

    def broken(*_: Any) -> None:
        raise LookupError("Marlowe has a cough")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceTrainer, "update", broken)
        with pytest.raises(DprayError, match="the run stopped: LookupError") as caught:
            methods.run(run)
        assert "Marlowe" not in str(caught.value)
    with pytest.raises(DprayError, match="model failed with LookupError"):
        methods.run(run)


def raising(progress: Progress) -> None:
    """Stop before the fourth step. It is called between the mechanism's steps, but is no part."""
    if (progress.activity, progress.completed) == ("training steps", 3):
        raise ZeroDivisionError("a program's own")


def full_machine(*_: Any) -> None:
    raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("on_progress", "patched", "why"),
    [
        (raising, {}, r"ZeroDivisionError; .*: the same command"),
        (lambda _: None, {(ReferenceTrainer, "update"): full_machine}, "was low on memory"),
        (lambda _: None, {(journal, "save_file"): full_disk}, r"no space is left .*checkpoint"),
    ],
    ids=["progress", "memory", "disk"],
)
def test_what_is_no_fault_of_the_training_leaves_it_to_be_resumed_and_paid_for(
    config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    on_progress: Callable[[Progress], None],
    patched: dict[tuple[Any, str], Any],
    why: str,
) -> None:
    """By the next command, from the last block: whether private rows had a part in it or not, both
    are charged. What never fits does not pay by itself."""
    run = config()
    open_budget(run)
    with monkeypatch.context() as patch:
        for (owner, name), stop in patched.items():
            patch.setattr(owner, name, stop)
        with pytest.raises(Resumable, match=why):
            methods.run(run, on_progress)
    assert methods.run(run)["steps"] == {"planned": 6, "repeated": 2, "charged": 8}

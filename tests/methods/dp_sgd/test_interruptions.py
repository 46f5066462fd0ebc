"""DP-SGD runs that were cut off: what is kept, made again and charged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpray import registry as methods
from dpray.accounting.accountant import cost
from dpray.accounting.events import PoissonSubsampledGaussian, SelfComposed
from dpray.accounting.ledger import Ledger
from dpray.config.config import Config
from dpray.engines.base import EngineError, PlainPrompt
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd import release as dp_sgd_run
from dpray.methods.dp_sgd.algorithm import DpSgd, fine_tune
from dpray.runs.engine import build_engine
from dpray.training.gradient_noise import DpSgdStep, GradientNoise
from dpray.training.journal import Journal
from dpray.training.model import Tuning, load_loss
from dpray.training.reference import ReferenceTrainer
from dpray.training.state import TrainingState
from dpray.types import BudgetRefused, DprayError, InputError, Resumable
from tests.runs.outcomes import open_budget
from tests.training.tiny_gradients import texts

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def stopped_after(step: int) -> Iterator[None]:
    """Lets step number `step` be made, counted from 1, and stops whoever is about to make the next
    one. A block's intent is noted by then."""
    before_step = Journal.before_step

    def cut_off(journal: Journal, t: int) -> None:
        before_step(journal, t)
        if t == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "before_step", cut_off)
        with pytest.raises(Resumable, match="from the last checkpoint: the steps after it, 2 at"):
            yield


def test_a_run_that_was_cut_off_goes_on_with_fresh_noise_and_pays_again(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the third of six steps: the first two are kept, the third is made again."""
    run = config(method__schedule="linear")
    ledger = open_budget(run)
    keys: list[str] = []
    rates: list[float] = []
    restored: list[TrainingState] = []
    start, step = GradientNoise.__init__, ReferenceTrainer.step
    restore = ReferenceTrainer.restore

    def started(noise: GradientNoise, mechanism: Any, key: str) -> None:
        keys.append(key)
        start(noise, mechanism, key)

    def made(trainer: ReferenceTrainer, rate: float) -> None:
        rates.append(rate)
        step(trainer, rate)

    def was_restored(trainer: ReferenceTrainer, state: TrainingState) -> None:
        restored.append(state)
        restore(trainer, state)

    monkeypatch.setattr(GradientNoise, "__init__", started)
    monkeypatch.setattr(ReferenceTrainer, "step", made)
    monkeypatch.setattr(ReferenceTrainer, "restore", was_restored)
    with stopped_after(3):
        methods.run(run)
    report = methods.run(run)

    planned = [0.01 * (1 - t / 6) for t in range(6)]
    assert rates == pytest.approx([*planned[:3], *planned[2:]])
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
    assert account.spent.epsilon == sum(c.reserved.epsilon for c in account.charges)
    assert account.spent.epsilon > report["epsilon"]
    assert ledger.verify() == []
    assert ledger.is_reserved(f"{report['ledger']['reservation']}/again-1")
    ledger.close()


def test_a_state_that_was_stored_steps_like_the_one_that_went_on(model_folder: str) -> None:
    """Without noise and with every unit in every batch, an interruption leaves no trace."""
    step = DpSgdStep(1.0, 1e-12, 1.0, 8.0)
    plan = DpSgd(step, steps=4, micro_batch_size=4, learning_rate=0.01)
    units = [[text] for text in texts(8)]

    def trained(start: int, end: int, state: TrainingState | None) -> TrainingState:
        loss = load_loss(Tuning(model_folder, "lora", lora_rank=2))
        if state is not None:
            state.put_weights(loss)
        trainer = ReferenceTrainer(plan, loss, new_key())
        if state is not None:
            trainer.restore(state)
        until = replace(plan, steps=end)
        fine_tune(until, units, trainer, generator(new_key()), start=start)
        return trainer.state(end)

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
        with stopped_after(step):
            methods.run(run)
    # The budget that the run made for itself is just its plan: nothing is left for a second.
    with pytest.raises(BudgetRefused, match=r"4 of 6 steps were cut off.*spare_steps") as told:
        methods.run(run)
    assert told.value.exit_code == 3
    ledger = Ledger.open(run.privacy.ledger)
    account = ledger.account("notes")
    assert account is not None and account.spent.epsilon == planned and len(account.charges) == 1
    ledger.close()
    assert not (Path(run.output.path) / "synthetic.jsonl").exists()


def test_steps_made_again_may_not_cost_more_than_the_run_may(
    config: Callable[..., Config],
) -> None:
    run = config(privacy__epsilon=methods.make_plan(config()).cost.epsilon)
    open_budget(run).close()
    with stopped_after(1):
        methods.run(run)
    with pytest.raises(BudgetRefused, match=r"privacy\.epsilon is .*made again"):
        methods.run(run)


def test_a_checkpoint_that_was_altered_is_refused(config: Callable[..., Config]) -> None:
    run = config(method__spare_steps=2)
    with stopped_after(3):
        methods.run(run)
    [path] = (Path(run.output.path) / "private" / "checkpoints").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DprayError, match="not there, or altered"):
        methods.run(run)


def test_texts_that_were_written_are_kept_when_the_engine_stops(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(method__epochs=0.2)
    asked: list[PlainPrompt] = []

    class Stops:
        def __init__(self, engine: Any, left: int) -> None:
            self.engine, self.left = engine, left

        def generate(self, prompts: Any, sampling: Any, on_completion: Any) -> None:
            asked.extend(prompts[: self.left])
            few = prompts[: self.left], sampling[: self.left]
            self.engine.generate(*few, on_completion)
            if len(prompts) > self.left:
                raise EngineError("the engine stopped")

        def close(self) -> None:
            self.engine.close()

    with pytest.raises(Resumable, match="at no further cost"):
        methods.run(run, build=lambda section: Stops(build_engine(section), 4))
    monkeypatch.setattr(dp_sgd_run, "train_here", None)  # nothing is trained again
    report = methods.run(run, build=lambda section: Stops(build_engine(section), 99))
    assert len(asked) == report["calls"]["calls"] >= 6
    assert {prompt.user for prompt in asked} == {"label: a\n", "label: b\n"}


def test_a_bad_row_is_found_before_the_training_begins_and_can_be_mended(
    config: Callable[..., Config], records_file: Path
) -> None:
    run = config(method__epochs=0.2)
    good = records_file.read_text()
    records_file.write_text(good + '{"text": "Marlowe", "label": "c"}\n')
    with pytest.raises(InputError, match=r"records.jsonl, row 61: the label"):
        methods.run(run)
    records_file.write_text(good)
    assert methods.run(run)["records"] > 0


def test_a_training_whose_code_raised_is_never_repeated(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config()

    def broken(*_: Any) -> None:
        raise LookupError("Marlowe has a cough")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceTrainer, "step", broken)
        with pytest.raises(DprayError, match="the run stopped: LookupError") as caught:
            methods.run(run)
        assert "Marlowe" not in str(caught.value)
    with pytest.raises(DprayError, match="model failed with LookupError"):
        methods.run(run)


def test_a_rank_that_does_not_see_the_output_folder_costs_nothing(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    """As on another node, whose disk has no such folder: the run goes on once it has."""
    run = config(method__epochs=0.4, method__records=1)
    with pytest.MonkeyPatch.context() as patch:
        elsewhere = tmp_path / "of_another_node" / "private" / "model"
        patch.setattr(dp_sgd_run, "tuned_model", lambda session: elsewhere)
        with pytest.raises(InputError, match=r"output\.path: a rank .* disk that all nodes share"):
            methods.run(run)
    assert not elsewhere.parent.exists()
    report = methods.run(run)
    assert report["steps"] == {"planned": 3, "repeated": 0, "charged": 3}

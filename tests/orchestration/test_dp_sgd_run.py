"""DP-SGD runs in this process with a tiny model: what is charged, resumed, written and released."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpray.accounting.accountant import cost
from dpray.accounting.events import PoissonSubsampledGaussian, SelfComposed
from dpray.accounting.ledger import Ledger
from dpray.config import Config, parse_config
from dpray.engines.base import EngineError, PlainPrompt
from dpray.engines.text import TextCodec
from dpray.mechanisms.gradient_noise import DpSgdStep, GradientNoise
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd import DpSgd, fine_tune
from dpray.orchestration import methods
from dpray.orchestration.dp_sgd import run as dp_sgd_run
from dpray.orchestration.dp_sgd.codes import control_codes, draw_values
from dpray.orchestration.dp_sgd.data import load_units
from dpray.orchestration.training.journal import Journal
from dpray.orchestration.training.model import Tuning, load_loss
from dpray.orchestration.training.reference import ReferenceTrainer
from dpray.orchestration.training.state import TrainingState
from dpray.types import Budget, BudgetRefused, DprayError, InputError, Resumable
from tests.methods.tiny_gradients import texts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    """Six steps of about ten of the sixty records, in blocks of two; noise that costs eps 5.8."""

    def make(**changes: Any) -> Config:
        tree = settings()
        tree["method"] = {
            "name": "dp_sgd", "epochs": 1, "batch_size": 10, "micro_batch_size": 8,
            "max_length": 24, "lora_rank": 2, "learning_rate": 0.01, "records": 6,
            "noise_multiplier": 0.8, "checkpoint_steps": 2,
        }  # fmt: skip
        for name, value in changes.items():
            section, _, key = name.partition("__")
            tree[section][key] = value
        return parse_config(tree)

    return make


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


def open_budget(run: Config) -> Ledger:
    """With room for more than the run."""
    ledger = Ledger.create_or_open(run.privacy.ledger)
    ledger.create_dataset("notes", Budget(100, 1e-3), "record", "add_or_remove_one")
    return ledger


def lines(run: Config) -> list[dict[str, Any]]:
    path = Path(run.output.path) / "synthetic.jsonl"
    return [json.loads(line) for line in path.open()]


def test_a_run_from_data_to_release(
    config: Callable[..., Config], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = config()
    shown: list[Any] = []
    report = methods.run(run, shown.append)
    step = PoissonSubsampledGaussian(1 / 6, 0.8)
    assert report["epsilon"] == cost(SelfComposed(step, 6), 1e-5).epsilon
    assert report["steps"] == {"planned": 6, "repeated": 0, "charged": 6}
    assert [p.completed for p in shown if p.stage == "training steps"] == list(range(6))
    records = lines(run)
    assert len(records) == report["records"] <= 6
    assert set(records[0]) == {"text", "label"} and {r["label"] for r in records} == {"a", "b"}

    ledger = Ledger.open(run.privacy.ledger)
    units = [unit for unit, _ in ledger.published(report["ledger"]["reservation"])]
    blocks = [f"steps-{2 * i + 1:08d}-{2 * i + 2:08d}" for i in range(3)]
    assert sorted(units) == ["model", *blocks]
    assert ledger.verify() == []
    assert ledger.account("notes").spent.epsilon == report["epsilon"]  # type: ignore[union-attr]
    ledger.close()
    assert methods.run(run) == report

    # The word that every private text holds, and nothing else, is nowhere else.
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "records.jsonl":
            assert b"Marlowe" not in path.read_bytes(), path.name
    assert "Marlowe" not in "".join(capfd.readouterr())
    assert not list((Path(run.output.path) / "private").rglob("*.safetensors"))


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_released_model_loads_with_plain_libraries_and_is_the_tuned_one(
    config: Callable[..., Config], tuning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained: list[dict[str, torch.Tensor]] = []
    checkpointed: list[bool] = []
    weights = ReferenceTrainer.weights

    def noted(trainer: ReferenceTrainer) -> dict[str, torch.Tensor]:
        trained.append(weights(trainer))
        checkpointed.append(trainer._loss.checkpointing)
        return trained[-1]

    monkeypatch.setattr(ReferenceTrainer, "weights", noted)
    changes = {"method__tuning": tuning, "method__gradient_checkpointing": tuning == "full"}
    run = config(**changes, method__records=1, method__epochs=0.4)
    report = methods.run(run)
    folder = Path(run.output.path) / "model"
    assert json.loads((folder / "privacy_report.json").read_text()) == report
    assert {p.name for p in folder.iterdir()} == {*report["model"], "privacy_report.json"}
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder if tuning == "full" else run.engine.model
    )
    if tuning == "lora":
        named = json.loads((folder / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == run.engine.model
        model = PeftModel.from_pretrained(model, folder)
    found = {name: p for name, p in model.named_parameters() if name in trained[-1]}
    assert set(found) == set(trained[-1])
    assert set(checkpointed) == {tuning == "full"}
    assert all((found[name] == weight).all() for name, weight in trained[-1].items())


def test_the_plan_is_the_one_of_the_literature(config: Callable[..., Config]) -> None:
    """METHODS.md: q 0.01, sigma 0.8, 1000 steps, delta 1e-6 cost eps 3.71."""
    changes = {
        "data__public_size": 10_000, "privacy__delta": 1e-6, "privacy__epsilon": 3.71,
        "method__batch_size": 100, "method__epochs": 10,
    }  # fmt: skip
    given = methods.make_plan(config(**changes)).summary()
    assert given["epsilon"] == pytest.approx(3.71, abs=0.005)
    assert (given["method"]["steps"], given["method"]["spare_steps"]) == (1000, 0)
    assert given["method"]["sampling_probability"] == 0.01
    assert given["noise_multiplier"] == 0.8 and given["accountant"]["bound"] == "pld"
    assert given["mechanisms"][0]["count"] == 1000


@pytest.mark.parametrize(("delta", "warned"), [(0.02, True), (0.016, False)])
def test_a_delta_too_large_for_the_data_is_warned_of(
    config: Callable[..., Config], delta: float, warned: bool
) -> None:
    """Of sixty records."""
    warnings = methods.make_plan(config(privacy__delta=delta)).summary()["warnings"]
    assert any("privacy.delta is above 1 / data.public_size" in text for text in warnings) is warned


def test_noise_from_epsilon_pays_for_a_block_made_again(config: Callable[..., Config]) -> None:
    """With all units in every batch: their cost has a closed form."""
    whole = {"method__batch_size": 60, "method__epochs": 6, "method__noise_multiplier": None}
    one = methods.make_plan(config(**whole, privacy__epsilon=4.0))
    assert 0.999 * 4.0 < one.cost.epsilon <= 4.0
    summary = one.summary()
    assert summary["method"]["spare_steps"] == 2 and summary["mechanisms"][0]["count"] == 8


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
    build = dp_sgd_run.build_engine

    class Stops:
        def __init__(self, engine: Any, left: int) -> None:
            self.engine, self.left, self.encode = engine, left, engine.encode

        def generate(self, prompts: Any, sampling: Any, on_completion: Any) -> None:
            asked.extend(prompts[: self.left])
            few = prompts[: self.left], sampling[: self.left]
            self.engine.generate(*few, on_completion)
            if len(prompts) > self.left:
                raise EngineError("the engine stopped")

        def close(self) -> None:
            self.engine.close()

    with monkeypatch.context() as patch:
        patch.setattr(dp_sgd_run, "build_engine", lambda config: Stops(build(config), 4))
        with pytest.raises(Resumable, match="at no further cost"):
            methods.run(run)
        patch.setattr(dp_sgd_run, "train_here", None)  # nothing is trained again
        patch.setattr(dp_sgd_run, "build_engine", lambda config: Stops(build(config), 99))
        report = methods.run(run)
    assert len(asked) == report["calls"]["calls"] >= 6
    assert {prompt.user for prompt in asked} == {"label: a\n", "label: b\n"}


def test_a_run_without_noise_is_stamped_and_charges_nothing(config: Callable[..., Config]) -> None:
    changes = {"privacy__epsilon": float("inf"), "method__noise_multiplier": None}
    run = config(**changes)
    report = methods.run(run)
    assert report["not_private"] is True and report["epsilon"] is None
    assert report["noise_multiplier"] == 0 and "none" in report["noise_source"]
    assert all(record["not_private"] is True for record in lines(run))
    assert not (Path(run.output.path).parent / "ledger.db").exists()
    given = {"privacy__epsilon": float("inf")}
    with pytest.raises(InputError, match=r"method\.noise_multiplier"):
        methods.make_plan(config(**given))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy__epsilon": 1.0}, r"method\.noise_multiplier: 0\.8 costs eps"),
        ({"method__batch_size": 61}, r"method\.batch_size: 61 is more than data\.public_size 60"),
        ({"method__max_length": 400}, r"method\.max_length: 400 is more than the context .* 256"),
        ({"engine__max_model_len": 16}, r"method\.max_length: 24 is more than the context .* 16"),
        ({"method__max_length": 3}, r"method\.max_length: 3 leaves nothing for a text"),
        ({"engine__kind": "openai"}, r"engine\.kind"),
        ({"method__control_columns": {"stars": "Stars"}}, r"control_values: gives no .* stars"),
        ({"method__control_values": {"stars": {"1": 1}}}, r"stars is not in method\.control_col"),
        ({"method__control_values": {"label": {"1": 1}}}, r"label is data\.label"),
        ({"method__control_values": {"stars": {"1": 0.4}}}, r"shares of stars .* sum to 1"),
        (
            {"method__gradient_checkpointing": True, "method__zero_stage": 3},
            r"gradient_checkpointing: not with zero_stage 3",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    config: Callable[..., Config], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        methods.run(config(**changes))
    assert not (tmp_path / "ledger.db").exists()


STARS = {
    "method__control_columns": {"label": "Kind", "stars": "Review Stars"},
    "method__control_values": {"stars": {5.0: 0.25, 1.0: 0.75}},
}


def test_control_columns_stand_in_every_code(
    config: Callable[..., Config], records_file: Path
) -> None:
    rows = [json.loads(line) | {"stars": 5.0} for line in records_file.read_text().splitlines()]
    rows[7]["stars"] = 1.0
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = config(**STARS, method__epochs=0.2, method__records=8, method__max_length=40)
    codec = TextCodec(run.engine.model, None)
    units = load_units(run, control_codes(run.data, run.method))  # type: ignore[arg-type]
    assert len(units) == 60
    code = "Kind: b | Review Stars: 1.0\n"
    [text] = units[7]
    assert text.ids[: text.given] == codec.encode(PlainPrompt(code))
    assert codec.tokenizer.decode(text.ids[1:]).startswith(code)
    methods.run(run)
    records = lines(run)
    stars = [record["control"]["stars"] for record in records]
    assert len(records) == 8 and (stars.count("5.0"), stars.count("1.0")) == (2, 6)

    rows[3]["stars"] = 4.0
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"row 4: the value of column 'stars'"):
        load_units(run, control_codes(run.data, run.method))  # type: ignore[arg-type]


def not_a_number(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def without_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        none = {key: None for key in ("eos_token", "eos_token_id") if key in values}
        (folder / name).write_text(json.dumps(values | none))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (not_a_number, r"engine\.model: .*: not finite: some weights of .*model\.norm\.weight"),
        (without_end, r"engine\.model: .* has no end-of-sequence token"),
        (shutil.rmtree, r"engine\.model: no such folder"),
    ],
)
def test_a_model_that_cannot_be_tuned_costs_nothing(
    config: Callable[..., Config],
    model_folder: str,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "spoilt")
    spoil(folder)
    run = config(engine__model=str(folder))
    ledger = open_budget(run)
    with pytest.raises(DprayError, match=message):
        methods.run(run)
    account = ledger.account("notes")
    ledger.close()
    assert account is not None and account.spent.epsilon == 0


def test_a_code_begins_as_in_training_where_there_is_no_bos(config: Callable[..., Config]) -> None:
    run = config()
    codec = TextCodec(run.engine.model, None)
    assert codec.encode(PlainPrompt("label: a\n"))[0] == codec.tokenizer.bos_token_id == 1
    codec.tokenizer.bos_token = None
    assert codec.encode(PlainPrompt("label: a\n"))[0] == codec.tokenizer.eos_token_id == 2


def test_a_unit_brings_its_records_together(
    config: Callable[..., Config], records_file: Path
) -> None:
    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    rows = [row | {"user": f"u{i % 7}"} for i, row in enumerate(rows)]
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows + rows[:1]))
    run = config(data__unit="user", data__max_records_per_unit=4)
    units = load_units(run, control_codes(run.data, run.method))  # type: ignore[arg-type]
    assert [len(unit) for unit in units] == [4] * 7
    # Without units, a record that is there twice is two.
    assert len(load_units(config(), control_codes(run.data, run.method))) == 61  # type: ignore[arg-type]


def test_the_values_of_columns_are_drawn_as_their_shares_say(config: Callable[..., Config]) -> None:
    import numpy as np

    shares = {"label": {"a": 0.5, "b": 0.5}, "stars": {"1": 0.2, "5": 0.8}}
    drawn = draw_values(shares, 100, np.random.default_rng(0))
    counts = {(v["label"], v["stars"]): 0 for v in drawn}
    for values in drawn:
        counts[values["label"], values["stars"]] += 1
    assert counts["a", "1"] + counts["b", "1"] == 20
    assert counts["a", "1"] + counts["a", "5"] == 50
    assert 3 <= counts["a", "1"] <= 17


def test_the_label_mix_is_measured_and_charged(config: Callable[..., Config]) -> None:
    every = {"method__batch_size": 60, "method__epochs": 1, "method__records": 2}
    run = config(data__label_proportions="measured", privacy__epsilon_labels=8.0, **every)
    report = methods.run(run)
    names = {m["name"] for m in report["mechanisms"]}
    assert names == {"discrete_laplace", "poisson_subsampled_gaussian"}
    assert report["sampling"]["control_values"]["label"] == report["sampling"]["label_mix"]

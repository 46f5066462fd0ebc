"""DP-SGD runs in this process with a tiny model are charged, written and released."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.config.config import Config, EngineConfig
from dpray.engines.model_path import resolve_model
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.dp_sgd.training.step import SUM_ROUNDING
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from dpray.runs.released import model_name
from tests.workers.outcomes import lines

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_from_data_to_release(
    config: Callable[..., Config], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = config(method__records=6)
    shown: list[Any] = []
    private = Path(run.output.path) / "private"

    def show(progress: Any) -> None:
        shown.append(progress)
        training = progress.activity == "training steps" and progress.completed > 0
        assert not training or list((private / "tokens").glob("*/ids.bin"))

    report = methods.run(run, show)
    step = PoissonSubsampledGaussian(1 / 6, 0.8)
    assert report["epsilon"] == cost(SelfComposed(step, 6), 1e-5).epsilon
    assert report["steps"] == {"planned": 6, "repeated": 0, "charged": 6}
    assert report["not_covered"].count(SUM_ROUNDING) == 1
    assert [p.completed for p in shown if p.activity == "training steps"] == list(range(6))
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
    assert not list(private.rglob("*.safetensors")) and not (private / "tokens").exists()


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_released_model_loads_with_plain_libraries_and_is_the_tuned_one(
    config: Callable[..., Config], tuning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained: list[dict[str, torch.Tensor]] = []
    tensors = ReferenceTrainer.tensors

    def noted(trainer: ReferenceTrainer) -> Iterator[tuple[str, torch.Tensor]]:
        weights = trainer._loss.trainable_parameters()
        trained.append({name: weight.detach().clone() for name, weight in weights.items()})
        return tensors(trainer)

    monkeypatch.setattr(ReferenceTrainer, "tensors", noted)
    run = config(method__tuning=tuning, method__records=1, method__epochs=0.4)
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
        assert named["base_model_name_or_path"] == model_name(run.engine.model)
        model = PeftModel.from_pretrained(model, folder)
    found = {name: p for name, p in model.named_parameters() if name in trained[-1]}
    assert set(found) == set(trained[-1])
    assert all((found[name] == weight).all() for name, weight in trained[-1].items())


def test_the_plan_is_the_one_of_the_literature(config: Callable[..., Config]) -> None:
    """With q 0.01, sigma 0.8 and delta 1e-6, 1000 steps cost eps 3.71."""
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
    warnings = methods.make_plan(config(privacy__delta=delta)).summary()["warnings"]
    assert any("privacy.delta is above 1 / data.public_size" in text for text in warnings) is warned


def test_noise_from_epsilon_pays_for_a_repeated_block(config: Callable[..., Config]) -> None:
    """All units are in every batch, so that the cost has a closed form."""
    whole = {"method__batch_size": 60, "method__epochs": 6, "method__noise_multiplier": None}
    one = methods.make_plan(config(**whole, privacy__epsilon=4.0))
    assert 0.999 * 4.0 < one.cost.epsilon <= 4.0
    summary = one.summary()
    assert summary["method"]["spare_steps"] == 2 and summary["mechanisms"][0]["count"] == 8


def test_a_released_model_is_tuned_again(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is tuned on public records first, and then on the private ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    public = config(
        privacy__epsilon=math.inf, privacy__dataset="public", method__noise_multiplier=None,
        method__epochs=0.4,
    )  # fmt: skip
    methods.run(public)
    monkeypatch.chdir(tmp_path)
    released = str((Path(public.output.path) / "model").relative_to(tmp_path))
    run = config(engine__model=released, output__path=str(tmp_path / "again"), method__epochs=0.4)
    signal, warning = methods.make_plan(run).summary()["warnings"]
    assert signal.startswith("signal ")
    assert "the records that it was tuned on have to be public" in warning
    assert methods.make_plan(public).summary()["warnings"] == []
    report = methods.run(run)
    assert report["epsilon"] > 0 and report["steps"]["planned"] > 0
    assert report["not_covered"].count(warning) == 1
    adapters = json.loads((Path(run.output.path) / "model" / "adapter_config.json").read_text())
    assert adapters["base_model_name_or_path"].startswith("model (sha256 ")
    assert lines(run)
    monkeypatch.chdir("/")
    again = run.model_copy(update={"engine": EngineConfig(model=f"{run.output.path}/model")})
    assert resolve_model(again.engine.model)
    assert methods.make_plan(again).summary()["warnings"][1:] == [warning]

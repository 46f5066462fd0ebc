"""A DP-SGD run refuses what cannot be before it costs anything."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpray.config.config import Config
from dpray.methods import registry as methods
from dpray.methods.dp_sgd.plan import DpSgdPlan
from dpray.types import DprayError, InputError
from dpray.workers.engine import build_engine
from dpray.workers.engine_pool import check_loads
from tests.workers.outcomes import open_budget

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy__epsilon": 1.0}, r"method\.noise_multiplier: 0\.8 costs eps"),
        ({"privacy__epsilon": math.inf}, r"method\.noise_multiplier"),
        (
            {"method__optimizer": "sgd", "method__learning_rate": None},
            r"method\.learning_rate: sgd has no default",
        ),
        ({"method__batch_size": 61}, r"method\.batch_size: 61 is more than data\.public_size 60"),
        ({"method__max_length": 400}, r"method\.max_length: 400 is more than the context .* 256"),
        ({"engine__max_model_len": 16}, r"method\.max_length: 24 is more than the context .* 16"),
        ({"method__max_length": 3}, r"method\.max_length: 3 leaves nothing for a text"),
        ({"engine__kind": "openai"}, r"engine\.kind"),
        ({"method__control_columns": {"stars": "Stars"}}, r"control_values: gives no .* stars"),
        ({"method__control_values": {"stars": {"1": 1}}}, r"stars is not in method\.control_col"),
        ({"method__control_values": {"label": {"1": 1}}}, r"label is data\.label"),
        ({"method__control_values": {"stars": {"1": 0.4}}}, r"shares of stars .* sum to 1"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    config: Callable[..., Config], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        methods.run(config(**changes))
    assert not (tmp_path / "ledger.db").exists()


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


def test_lengths_are_checked_where_the_model_is_before_the_charge(
    config: Callable[..., Config],
) -> None:
    """The plan of a model that is on a hub cannot know its context."""
    plan = methods.make_plan(config())
    assert isinstance(plan, DpSgdPlan)
    longer = plan.settings.model_copy(update={"max_length": 400})
    load = replace(plan, settings=longer).loader(build_engine)
    with pytest.raises(InputError, match=r"max_length: 400 is more than the context"):
        check_loads(plan.config, load, lambda progress: None)

"""vLLM's second model runner, and those that dpray does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import DeviceLost, EngineError
from dpray.engines.vllm.engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_installed")]

HERE = Path(__file__).parent

SHARED = (
    "selectors_are_called_once or row_that_is_lost or row_lost_in_the_middle or over_several_steps"
    " or prefilled_in_part or with_other_tokens or row_that_comes_twice or stays_behind"
    " or on_second_runner"
)
"""Tests of the first runner that the second one has to pass too, and its own."""


def test_lockstep_decoding_in_the_second_runner() -> None:
    """In vLLM's own runner, scheduler and sampler, whose kernels Triton's interpreter runs."""
    files = ["on_second_runner", "test_conformance", "test_vllm", "test_parts"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"),
            *(
                "-p",
                "tests.engines.interpreted",
                "-k",
                f"not transformers and not lanes and ({SHARED})",
            ),
            *(str(HERE / f"{name}.py") for name in files),
        ],
        cwd=HERE.parents[1],
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "20 passed" in done.stdout.split("\n")[-2], done.stdout[-300:]


OTHERS: list[tuple[str, Any]] = [
    ("none", SimpleNamespace()),
    ("first", SimpleNamespace(input_batch=SimpleNamespace(logitsprocs=SimpleNamespace(all=[1])))),
    ("second", SimpleNamespace(sampler=SimpleNamespace(logits_processors=[1]))),
    ("custom sampler", SimpleNamespace(sampler=SimpleNamespace())),
]


@pytest.mark.parametrize(
    "runner", [runner for _, runner in OTHERS], ids=[name for name, _ in OTHERS]
)
def test_a_runner_that_calls_no_processor_of_ours_is_refused_at_the_start(
    model_folder: str, runner: Any
) -> None:
    from dpray.engines.vllm.lockstep import LockstepWorker

    class Elsewhere(VllmEngine):
        def _load(self, *_: Any) -> Any:
            worker = LockstepWorker()
            worker.model_runner = runner
            return SimpleNamespace(collective_rpc=lambda name, args: [getattr(worker, name)(*args)])

    with pytest.raises(EngineError, match=r"runner that dpray does not know.*MODEL_RUNNER=0"):
        Elsewhere(EngineConfig(model=model_folder), private_rows=True)


@pytest.mark.parametrize("second", [False, True])
def test_a_start_asks_for_the_processor_of_the_runner_and_names_the_other(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, second: bool
) -> None:
    import vllm

    asked: dict[str, Any] = {}

    def fails(model: str, **options: Any) -> None:
        asked.update(options)
        raise ValueError("Model Runner V2 requires Triton.")

    monkeypatch.setattr(vllm, "LLM", fails)
    monkeypatch.setattr(vllm.envs, "VLLM_USE_V2_MODEL_RUNNER", second, raising=False)
    with pytest.raises(EngineError, match="requires Triton") as caught:
        VllmEngine(EngineConfig(model=model_folder))
    assert ("VLLM_USE_V2_MODEL_RUNNER=0 takes" in str(caught.value)) is second
    assert asked["async_scheduling"] is second
    [name] = asked["logits_processors"]
    assert name.endswith("SecondRunnerProcessor" if second else "FirstRunnerProcessor")


@pytest.mark.parametrize("split", ["pipeline_parallel_size", "enable_batch_sharded_sampling"])
def test_rows_that_are_split_are_refused(split: str) -> None:
    from dpray.engines.vllm.second_runner import SecondRunnerProcessor

    parallel = {"pipeline_parallel_size": 1, "enable_batch_sharded_sampling": False} | {split: 2}
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
    with pytest.raises(ValueError, match="all layers and all rows on every rank"):
        SecondRunnerProcessor(config, SimpleNamespace())  # type: ignore[arg-type]


def test_a_part_that_is_late_is_not_added_to_the_next_token() -> None:
    """A step that is under way may hold rows of a token that is drawn already."""
    import numpy as np
    import torch

    from dpray.engines.finite_rows import FiniteRows
    from dpray.engines.vllm.first_runner import FirstRunnerProcessor
    from dpray.engines.vllm.lockstep import _PartedGroup

    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    processor = FirstRunnerProcessor(config, torch.device("cpu"), False)
    added: list[int] = []
    selector: Any = SimpleNamespace(add=lambda logits: added.append(len(logits.private)))
    finite = FiniteRows(2, torch.device("cpu"))
    group = _PartedGroup(size=2, finite=finite, selector=selector, public=torch.zeros(4))
    processor.parted["a"] = group
    processor.unfinished_prefill = np.zeros(2, dtype=bool)

    def row(at: int) -> Any:
        return SimpleNamespace(extra_args={"dpray": {"group": "a", "row": 0, "at": at}})

    group.tokens = [7]
    for at in (0, 1):
        member = processor._join(row(at), None)
        assert member is not None
        processor._locate({1: member})
        processor.force(torch.zeros(2, 4))
    assert added == [1]


@pytest.mark.parametrize(("number", "kind"), [(214, DeviceLost), (710, EngineError)])
def test_an_error_of_the_device_ends_all_groups_of_its_step_and_no_draw_is_made_again(
    number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device does not say whose it was. Groups that were over before have their texts."""
    import numpy as np
    import torch

    from dpray.engines.vllm.engine import agreed
    from dpray.engines.vllm.first_runner import FirstRunnerProcessor
    from dpray.methods.private_prediction import token
    from dpray.methods.private_prediction.mechanism import SELECTOR, PrivateToken

    error = torch.AcceleratorError("CUDA error: Marlowe")
    error.error_code = number
    calls: list[int] = []

    def draw(groups: list[Any]) -> torch.Tensor:
        calls.append(len(groups))
        if len(calls) == 3:
            raise error
        return torch.full((len(groups), 1), 7)

    monkeypatch.setattr(token, "_draw_by", lambda mechanism: draw)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    processor = FirstRunnerProcessor(config, torch.device("cpu"), False)
    processor.unfinished_prefill = np.zeros(9, dtype=bool)
    values = PrivateToken(2, 9, "recentred", 1.0, 1.0, 1.0).values
    outputs: list[list[int]] = [[] for _ in range(9)]
    for place, output in enumerate(outputs):
        name, row = f"group {place // 3}", place % 3
        ticket = {"group": name, "row": row, "size": 3, "eos": 2}
        if row == 2:
            arguments = {"mechanism": values, "key": str(place) * 64}
            ticket |= {"prompt": [1], "factory": SELECTOR, "arguments": arguments, "stop": False}
        params = SimpleNamespace(
            extra_args={"dpray": ticket}, stop_token_ids=[2], max_tokens=2 if place < 3 else 5
        )
        processor._members[place] = processor._join(params, output) or ("", 0)
    processor._locate(processor._members)
    for step in range(5):
        forced = processor.force(torch.zeros(9, 50)).argmax(dim=1).tolist()
        assert forced == [7] * 9 if step < 2 else set(forced[3:]) == {2}
        for output, given in zip(outputs, forced, strict=True):
            output.append(given)
    assert calls == [3, 3, 2], "one call a step, and none after the error"
    first, *others = (group.report() for group in processor.groups.values())
    assert agreed([first])["tokens"] == [7, 7]
    for other in others:
        with pytest.raises(EngineError) as caught:
            agreed([other])
        assert type(caught.value) is kind and "Marlowe" not in str(caught.value)

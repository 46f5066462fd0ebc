"""Private decoding on a GPU: rows that do not see each other, ranks that agree, and its speed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpray.config.sections import EngineConfig
from dpray.engines.row_variation import row_variation
from dpray.engines.transformers import TransformersEngine
from tests.conftest import ROOT
from tests.engines.tensor_parallel import SIZES, tokens_of_two_ranks
from tests.engines.test_conformance import decode, make_group
from tests.gpu.decoding import probed

LARGEST = {"float32": 0.05, "bfloat16": 1.0}
"""With kernels that depend on the batch, rounding moves a small model's logits by less, in nats."""


@pytest.fixture
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM for this GPU")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_transformers_hardly_move(dtype: Any, device: str, model_folder: str) -> None:
    engine = TransformersEngine(EngineConfig(model=model_folder, dtype=dtype), device=device)
    assert row_variation(engine, 40) < LARGEST[dtype]
    engine.close()


def tokens_on(engine: TransformersEngine) -> dict[str, tuple[int, ...]]:
    groups = [make_group(engine, str(n), size, seed=n) for n, size in enumerate(SIZES)]
    found = {name: result.token_ids for name, result in decode(engine, *groups).items()}
    engine.close()
    return found


def test_every_device_draws_the_hosts_tokens(device: str, model_folder: str) -> None:
    config = EngineConfig(model=model_folder)
    found = tokens_on(TransformersEngine(config, device=device, max_rows=5))
    assert found == tokens_on(TransformersEngine(config, device="cpu"))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_a_gpu_replays_the_passes_of_groups_side_by_side(model_folder: str) -> None:
    config = EngineConfig(model=model_folder)
    engine = TransformersEngine(config, group=(max(SIZES) + 1, 128))
    lanes = engine._lanes
    assert lanes is not None and lanes.count > 1
    assert [one._run.__name__ for one in (lanes.private, lanes.public)] == ["replay", "replay"]
    assert tokens_on(engine) == tokens_on(TransformersEngine(config, device="cpu"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("gpu", "vllm")
@pytest.mark.parametrize("kernels", ["invariant", "ordinary"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_vllm_do_not_see_each_other(
    dtype: str, kernels: str, model_folder: str, show: Callable[[str], None]
) -> None:
    if kernels == "invariant" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no batch-invariant kernels for this GPU")
    row = probed(model_folder, dtype, kernels)
    found, invariant = row["logits moved, nats"], kernels == "invariant"
    show(f"rows move by {found:.2g} nats, {dtype}, {kernels} kernels, {row['attention']}")
    assert row["invariant"] == invariant
    assert found == 0.0 if invariant else found < LARGEST[dtype]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("gpu", "vllm")
def test_two_gpus_draw_the_same_tokens(model_folder: str) -> None:
    """The engine compares what the ranks drew, and stops where they differ."""
    if torch.cuda.device_count() < 2:
        pytest.skip("no second GPU")
    [(found, _)] = tokens_of_two_ranks(model_folder, (2, 1))
    assert {name: len(tokens) for name, tokens in found.items()} == {"0": 12, "1": 12, "2": 12}


def lockstep_ratios(*options: str) -> dict[str, dict[str, float]]:
    """Return each way's tokens a second, and their ratio to plain sampling's."""
    command = [sys.executable, "-m", "benchmarks.bench_lockstep", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"vocabulary"')]
    ways: dict[str, dict[str, float]] = json.loads(line)["ways"]
    return ways


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("gpu", "vllm")
def test_lockstep_is_not_much_slower_than_plain_sampling(show: Callable[[str], None]) -> None:
    ways = lockstep_ratios("--vocabulary", "49152", "--groups", "16")
    for way, found in ways.items():
        speed, ratio = found["tokens_per_second"], found["ratio"]
        show(f"{way}: {speed:,.0f} tokens a second, {ratio:.2f} of plain sampling")
    assert ways["recentred"]["ratio"] > 0.4 and ways["dclip"]["ratio"] > 0.4

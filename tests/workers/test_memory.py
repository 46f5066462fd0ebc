"""Ray reserves an actor's memory by public sizes, and never by a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.config.config import Config
from dpray.engines.kv_cache import GIB
from dpray.methods.config import parse_config
from dpray.workers.memory import Role, lacks_size, reserved
from tests.io.test_hub import a_hub, be_asked

AUG_PE, DP_KPS = {"name": "aug_pe"}, {"name": "dp_kps"}
DP_SGD = {"name": "dp_sgd", "micro_batch_size": 64, "max_length": 512}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 1 GiB in bfloat16, in two files of which nobody reads a byte."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, size in (("1", GIB * 5 // 8), ("2", GIB * 3 // 8)):
        with open(folder / f"model-{name}.safetensors", "wb") as file:
            file.truncate(size)
    sizes = {
        "torch_dtype": "bfloat16", "vocab_size": 2**16, "max_position_embeddings": 4096,
        "num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]], model: Path) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        terms = model / "terms"
        with open(terms, "wb") as file:
            file.truncate(GIB // 64)
        if changes.get("method") == DP_KPS:
            changes["method"] = DP_KPS | {"vocabulary": str(terms)}
        folder = str(model)
        ours = {"engine__model": folder, "embedder": {"model": folder}}
        return parse_config(settings(**(ours | changes)))

    return make


@pytest.mark.parametrize(
    ("role", "changes", "gib"),
    [
        # The libraries; 2 GiB of weights in float32, 1 GiB of cache and 256 MiB of logits.
        (Role.ENGINE, {"engine__kv_cache_gib": 1.0}, 0.75 + 2 + 1 + 1 / 4 + 1 / 8),
        (Role.ENGINE, {"engine__kind": "vllm"}, 0.75 + 2 + 2 + 1 / 4 + 1 / 8),
        # 256 rows of 4,096 tokens of 16 KiB would be 16 GiB, which only a key gives.
        (Role.ENGINE, {}, 0.75 + 2 + 2 + 1 / 4 + 1 / 8),
        (Role.ENGINE, {"engine__max_model_len": 256}, 0.75 + 2 + 1 + 1 / 4 + 1 / 8),
        # The weights go to the GPU file by file.
        (Role.ENGINE, {"runtime__gpus_per_actor": 1}, 0.75 + 5 / 8 + 1 / 8),
        (Role.ENGINE, {"engine__kind": "vllm", "engine__model": "on/a-hub"}, 0.75 + 2 + 1 / 8),
        # Two copies of a model of 1 GiB, and a fourth of the records, 2 KiB each, twice.
        (Role.VOTER, {"method": AUG_PE, "data__public_size": 2**22, "runtime__actors": 4}, 6.75),
        (Role.COUNTER, {"method": DP_KPS}, 0.25 + 0.5),
        (Role.COUNTER, {}, 0.25),
        # Half of it are weights, half are the logits of 32,768 tokens.
        (Role.RANK, {"method": DP_SGD}, 0.75 + 2 + 4 * 8),
        (Role.RANK, {"method": DP_SGD | {"tuning": "full"}}, 0.75 + 4 * 2 + 4 * 8),
        (Role.RANK, {"method": DP_SGD, "runtime__gpus_per_actor": 1}, 0.75 + 5 / 8),
        (Role.RANK, {"method": DP_SGD, "runtime__memory_per_actor": 0.3}, 0.3),
        (Role.ENGINE, {"runtime__memory_per_actor": 0}, 0.0),
    ],
)
def test_a_reservation_is_the_sum_of_public_sizes(
    config: Callable[..., Config], role: Role, changes: dict[str, Any], gib: float
) -> None:
    assert reserved(config(**changes), role) / GIB == pytest.approx(gib, abs=1e-9)


def test_a_model_on_a_hub_is_counted_by_what_the_hub_tells(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a.safetensors": GIB * 5 // 8, "b.safetensors": GIB * 3 // 8}
    others = {"pytorch_model.bin": GIB, "onnx/model.safetensors": GIB}
    made = config(engine__model="hub/tells", engine__kind="vllm")
    with a_hub(200, files=files | others) as endpoint:
        be_asked(monkeypatch, endpoint)
        assert reserved(made, Role.ENGINE) / GIB == 0.75 + 2 + 2 + 1 / 4 + 1 / 8
        assert not lacks_size(made)
    with a_hub(401, "RepoNotFound") as endpoint:
        be_asked(monkeypatch, endpoint)
        assert reserved(made, Role.ENGINE) / GIB == 0.75 + 2 + 1 / 8
        assert lacks_size(made)
        assert not lacks_size(config(engine__model="hub/tells", runtime__memory_per_actor=9))


@pytest.mark.parametrize(
    "config_json",
    [
        '{"text_config": "nothing", "vocab_size": -1, "max_position_embeddings": "many"}',
        '{"num_attention_heads": 0, "hidden_size": 8, "num_hidden_layers": 4}',
        '{"num_attention_heads": 8, "hidden_size": null, "num_key_value_heads": [1, 2]}',
        "[",
    ],
)
def test_a_damaged_model_is_the_engine_s_to_refuse(
    config: Callable[..., Config], model: Path, config_json: str
) -> None:
    (model / "config.json").write_text(config_json)
    (model / "model-3.safetensors").symlink_to(model / "removed")
    for method in ({"name": "private_prediction"}, DP_SGD):
        assert reserved(config(method=method), Role.ENGINE) >= 0.75 * GIB
        assert reserved(config(method=method), Role.RANK) >= 0.25 * GIB


def test_an_embedder_with_adapters_is_no_language_model(
    config: Callable[..., Config], model: Path
) -> None:
    adapters = {"peft_type": "LORA", "task_type": "FEATURE_EXTRACTION"}
    adapters["base_model_name_or_path"] = "an/embedder"
    (model / "adapter_config.json").write_text(json.dumps(adapters))
    made = config(method=AUG_PE, data__public_size=1024)
    assert reserved(made, Role.VOTER) == 0.75 * GIB


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("method", [{"name": "private_prediction"}, AUG_PE, DP_KPS, DP_SGD])
def test_no_record_has_a_part_in_it(
    config: Callable[..., Config], records_file: Path, method: dict[str, Any], role: Role
) -> None:
    made = config(method=method)
    before = reserved(made, role)
    with open(records_file, "r+b") as file:
        file.truncate(GIB)  # a row that is long
    assert reserved(made, role) == before > 0
    records_file.unlink()
    assert reserved(made, role) == before

"""The files that `dpray serve` reads and writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import deployment as serve_deployment
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from dpray.commands.serve import _show, serve
from dpray.io.settings_file import parse
from dpray.serving.applications import scaling, serve_config
from dpray.serving.settings import ServeFile, load_serve_config
from dpray.terminal import Terminal
from dpray.types import InputError
from tests.serving.front import KEY, hashed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree() -> dict[str, Any]:
    return {
        "engine": {"model": "owner/model", "api_key": "secret", "max_in_flight": 3},
        "embedder": {"model": "sentence-transformers/all-MiniLM-L6-v2"},
        "serve": {"keys": [hashed(KEY)]},
    }


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("serve", {"keys": []}, "serve.keys: give the hash of a key"),
        ("serve", {"keys": [KEY]}, "serve.keys: entry 1 is not"),
        ("serve", {"keys": [hashed(KEY), "sha256:12"]}, "serve.keys: entry 2 is not"),
        ("serve", {"keys": KEY}, "serve.keys: a list"),
        ("serve", {"auth": "none"}, "serve.keys: are not asked for"),
        ("serve", {"auth": "none", "keys": [], "host": "0.0.0.0"}, "serve.host: .* 127.0.0.1"),
        ("serve", {"prot": 3}, "serve.prot: there is no such key"),
        ("serve", {"gateways": 0}, "serve.gateways"),
        ("serve", {"llm": None, "embedder": None}, "serve: nothing to serve"),
        ("serve", {"llm": {"name": "x"}, "embedder": {"name": "x"}}, "serve.llm.name"),
        ("serve", {"llm": {"min_replicas": 2}}, "serve.llm.max_replicas"),
        ("serve", {"llm": {"target_ongoing_requests": 99}}, "serve.llm.target_ongoing_requests"),
        ("serve", {"llm": {"downscale_delay_seconds": -1}}, "serve.llm.downscale_delay_seconds"),
        ("serve", {"limits": {"requests_per_minute_per_key": 0}}, "serve.limits.requests_per"),
        ("engine", {"kind": "transformers"}, "engine.kind: only vllm"),
        ("engine", {"tensor_parallel_size": 2}, "serve.llm.gpus_per_replica"),
        ("engine", {"pipeline_parallel_size": 2}, "engine.pipeline_parallel_size"),
        ("runtime", {"ray_address": "none"}, "runtime.ray_address"),
        ("data", {"path": "x"}, "data: there is no such key"),
    ],
)
def test_a_wrong_file_names_its_key_and_shows_no_key_of_a_caller(
    tree: dict[str, Any], section: str, changes: dict[str, Any], message: str
) -> None:
    tree[section] = tree.get(section, {}) | changes
    with pytest.raises(InputError, match=f"^{message}") as caught:
        parse(ServeFile, tree)
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_either_model_can_be_left_out(tree: dict[str, Any]) -> None:
    both = parse(ServeFile, tree)
    assert (both.llm_name, both.embedder_name) == (
        "owner/model",
        "sentence-transformers/all-MiniLM-L6-v2",
    )
    for section, off in (("engine", "llm"), ("embedder", "embedder")):
        by_section = parse(ServeFile, {k: v for k, v in tree.items() if k != section})
        by_flag = parse(ServeFile, tree | {"serve": tree["serve"] | {off: None}})
        for one in (by_section, by_flag):
            assert [bool(one.llm_name), bool(one.embedder_name)] == [
                off != "llm",
                off != "embedder",
            ]


def test_a_folder_is_served_under_its_name(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["engine"]["model"] = str(tmp_path)
    assert parse(ServeFile, tree).llm_name == tmp_path.name


def strict(schema: Any, tree: Any, at: str = "") -> None:
    """`schema` accepts `tree`, and every key is one of its: it lets unknown ones pass by itself."""
    loaded = schema.model_validate(tree)
    unknown = set(tree) - set(schema.model_fields)
    assert not unknown, f"{at}: {unknown}"
    for name in tree:
        inner = getattr(loaded, name)
        if hasattr(type(inner), "model_fields") and isinstance(tree[name], dict):
            strict(type(inner), tree[name], f"{at}.{name}")
        elif isinstance(inner, list) and inner and hasattr(type(inner[0]), "model_fields"):
            for each, value in zip(inner, tree[name], strict=True):
                strict(type(each), value, f"{at}.{name}")


def test_the_file_for_serve_deploy_says_the_same_and_no_secret(tree: dict[str, Any]) -> None:
    file = parse(ServeFile, tree)
    made = serve_config(file)

    strict(ServeDeploySchema, made)
    assert "secret" not in json.dumps(made)
    (application,) = made["applications"]
    again = parse(ServeFile, application["args"])
    assert (again.serve, again.embedder, again.llm_name) == (
        file.serve,
        file.embedder,
        "owner/model",
    )
    with pytest.raises(AssertionError, match="applicatons"):
        strict(ServeDeploySchema, made | {"applicatons": []})
    with pytest.raises(AssertionError, match="http_options"):
        strict(ServeDeploySchema, made | {"http_options": {"hots": "x"}})


def test_the_packaged_files_are_what_the_command_takes_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    gpu = load_serve_config("jobs/serve_gpu.yaml")
    cpu = load_serve_config("jobs/serve_cpu.yaml")
    assert (
        gpu.serve.llm is not None
        and gpu.serve.llm.gpus_per_replica >= 1
        and gpu.serve.auth == "keys"
    )
    assert (
        cpu.serve.llm is not None
        and cpu.serve.llm.gpus_per_replica == 0
        and cpu.serve.auth == "none"
    )
    serve("jobs/serve_gpu.yaml", dry_run=True)
    written = yaml.safe_load(capsys.readouterr().out)
    strict(ServeDeploySchema, written)
    assert yaml.safe_load((ROOT / "cluster" / "serve.yaml").read_text()) == written
    serve("jobs/serve_gpu.yaml", ["serve.port=8123"], dry_run=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["http_options"]["port"] == 8123


def test_a_replica_that_is_taken_away_has_as_long_as_a_request_may_take(
    tree: dict[str, Any],
) -> None:
    tree["serve"] |= {
        "limits": {"request_timeout_seconds": 300},
        "llm": {"min_replicas": 0, "max_replicas": 3, "downscale_delay_seconds": 60},
    }
    file = parse(ServeFile, tree)
    assert file.serve.llm is not None
    options = scaling(file.serve.llm, file.serve.limits)
    deployed = serve_deployment(name="llm", **options)(lambda: None)
    found = deployed._deployment_config
    assert found.graceful_shutdown_timeout_s == 300
    scales: AutoscalingConfig | None = found.autoscaling_config
    assert scales is not None
    assert (scales.min_replicas, scales.initial_replicas, scales.max_replicas) == (0, 1, 3)
    assert (scales.upscale_delay_s, scales.downscale_delay_s) == (30, 60)


def test_the_example_is_a_call_that_the_model_takes(
    tree: dict[str, Any], model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_template = Path(shutil.copytree(model_folder, tmp_path / "chats"))
    (with_template / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for folder, call in (
        (model_folder, 'client.completions.create(model="tiny", prompt="...", max_tokens=64)'),
        (with_template, 'client.chat.completions.create(model="chats", messages=[{"role": "user"'),
    ):
        file = parse(ServeFile, tree | {"engine": {"model": str(folder)}})
        _show(file, "http://127.0.0.1:8000/v1", Terminal())
        assert call in " ".join(capsys.readouterr().out.split())

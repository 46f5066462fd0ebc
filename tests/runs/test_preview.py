"""A preview shows what public prompts give, and opens no data."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

import pytest

import dpray
from dpray.cli import run_command
from dpray.commands.plan import Speed
from dpray.commands.preview import show_preview
from dpray.config.config import Config, EngineConfig
from dpray.engines.base import Completion, Sampling
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.release import records_of
from dpray.methods.registry import make_plan
from dpray.runs.forecast import rates_here
from dpray.runs.preview import (
    FEW,
    MEASURED,
    MOST_BITS,
    USUAL,
    documents,
    preview,
    released_text,
    spread_labels,
)
from dpray.terminal import Terminal
from dpray.types import Progress, Prompt, no_progress

DEMO = Path(dpray.__file__).parent / "demo" / "model"
DATA = {
    "path": "there-is-no-such-file.jsonl",
    "label": "label",
    "labels": ["1", "2"],
    "public_size": 4000,
}
PRIVACY = {"epsilon": 4.0, "delta": 1e-5, "ledger": "sqlite:///none.db", "dataset": "notes"}
METHODS: dict[str, dict[str, Any]] = {
    "private_prediction": {
        "clip": "dclip", "clip_bound": 3.0, "temperature": 1.0, "batch_size": 8,
        "candidates": "top_k_plus", "k": 50, "max_tokens": 16, "max_records": 10,
    },
    "aug_pe": {"records": 20, "iterations": 2, "max_tokens": 16},
    "dp_kps": {"records": 20, "vocabulary": "terms.txt", "label_in_prompt": True},
    "dp_sgd": {"records": 20, "batch_size": 100, "max_length": 32},
}  # fmt: skip


def config_of(folder: Path, method: str, **data: Any) -> Config:
    """Write a configuration of the packaged model whose data does not exist."""
    (folder / "terms.txt").write_text("\n".join(f"term{number}" for number in range(40)))
    keys = METHODS[method] | {"name": method}
    if "vocabulary" in keys:
        keys["vocabulary"] = str(folder / "terms.txt")
    written = {
        "data": DATA | data,
        "privacy": PRIVACY,
        "method": keys,
        "engine": {"kind": "transformers", "model": str(DEMO), "max_model_len": 256},
        "output": {"path": str(folder / "out")},
    }
    (folder / "c.yaml").write_text(json.dumps(written))
    return dpray.load(folder / "c.yaml")


class Writer:
    """Answers with texts that are given."""

    context_length = 256

    def __init__(self, answers: Sequence[tuple[str, int]]) -> None:
        self.answers, self.prompts = answers, list[Prompt]()

    def generate(
        self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], on_completion: Any
    ) -> list[Completion]:
        self.prompts = list(prompts)
        made = [
            Completion(text, 7, tokens, "length" if tokens > 99 else "stop")
            for text, tokens in islice(cycle(self.answers), len(prompts))
        ]
        for place, each in enumerate(made):
            on_completion(place, each)
        return made

    def close(self) -> None:
        pass


@pytest.mark.parametrize("method", ["aug_pe", "dp_kps", "dp_sgd"])
def test_every_method_shows_its_public_prompts(tmp_path: Path, method: str) -> None:
    about = {"about": "letters of guests", "label_about": {"1": "praise", "2": "complaints"}}
    config = config_of(tmp_path, method, **about)
    writer = Writer([("One.", 3), ("Two, cut", 999)])
    shown: list[Progress] = []
    found = preview(make_plan(config), 4, lambda *_, **__: writer, shown.append, False)
    assert [each["label"] for each in found["texts"]] == ["1", "2", "1", "2"]
    assert [each["cut"] for each in found["texts"]] == [False, True] * 2
    assert (found["cut"], found["empty"]) == (2, 0)
    words = " ".join(prompt.user for prompt in writer.prompts)
    assert "praise" in words and "complaints" in words
    assert ("letters of guests" in words) == (method != "dp_sgd")
    assert [p.completed for p in shown if p.activity == "texts"] == [0, 1, 2, 3, 4]
    assert found["bits"] is None
    cut = [line for line in found["advice"] if line.startswith("50% of the texts reach method.max")]
    assert len(cut) == (0 if method == "dp_sgd" else 1), "a training changes how long texts are"
    assert not any("data." in line for line in found["advice"])
    assert found["tunes"] == (method == "dp_sgd") and found["forecast"]
    assert not (tmp_path / "out").exists() and not (tmp_path / "none.db").exists()


def test_a_preview_ends_texts_where_a_run_does(tmp_path: Path) -> None:
    config = config_of(tmp_path, "private_prediction")
    settings = config.method.model_copy(update={"stop": ("\n\n",)})
    plan = make_plan(config.model_copy(update={"method": settings}))
    assert isinstance(plan, PrivatePredictionPlan)
    asked = plan.public_calls(["1"]).requests[0].sampling
    assert asked.stop == plan.method.stop == ("\n\n", "\nText:")


@pytest.mark.parametrize(
    ("answers", "text", "tokens"),
    [
        ([("The cat sat on", 100), (" the mat. It", 101)], "The cat sat on the mat.", 201),
        ([("The cat sat on", 100), (" the mat", 9)], "The cat sat on the mat", 109),
        ([("The cat sat on", 100), (" the mat", 101)], "The cat sat on", 100),
        ([("It is one. The cat sat on", 100)], "It is one.", 100),
        ([("The cat", 9)], "The cat", 9),
    ],
)
def test_a_preview_ends_a_cut_text_as_a_run_does(
    tmp_path: Path, answers: list[tuple[str, int]], text: str, tokens: int
) -> None:
    """Also if the context has no room for all of `end_tokens`: a run needs none."""
    config = config_of(tmp_path, "private_prediction")
    settings = config.method.model_copy(update={"end_tokens": 900, "public_temperature": 0.7})
    plan = make_plan(config.model_copy(update={"method": settings}))
    calls, left = plan.public_calls(["1"]), [*answers]

    class InTurn(Writer):
        def generate(self, prompts: Sequence[Prompt], *others: Any) -> list[Completion]:
            self.answers = [left.pop(0)]
            [sampling] = others[0]
            if len(left) == len(answers) - 1:
                assert (sampling.max_tokens, sampling.top_k) == (16, 50)
            else:
                assert prompts[0].prefix.endswith(answers[0][0])
                assert 100 < sampling.max_tokens < 256
                assert (sampling.temperature, sampling.top_k) == (0.7, 0)
            return super().generate(prompts, *others)

    [answer] = documents(InTurn([]), calls, no_progress)  # type: ignore[arg-type]
    assert (released_text(calls, answer, calls.requests[0]), answer.completion_tokens) == (
        text, tokens,
    )  # fmt: skip
    assert left == []


def test_a_document_is_joined_and_prompted_as_a_run_does(tmp_path: Path) -> None:
    """A cut section loses its last sentence where it stands, the whole document no other; and the
    prompts of a section show this section of the examples."""
    examples = tmp_path / "examples.jsonl"
    text = "# Fall\\nHit the arm.\\n\\n# Pain\\nNone at all."
    examples.write_text(f'{{"text": "{text}"}}\n')
    config = config_of(tmp_path, "private_prediction")
    update = {"sections": 2, "few_shot": str(examples), "few_shot_examples": 1}
    settings = config.method.model_copy(update=update)
    config = config.model_copy(update={"method": settings})
    made = [("Fell. Hit the", 999), ("No pain", 3)]

    class InTurn(Writer):
        asked: ClassVar[list[str]] = []

        def generate(self, prompts: Sequence[Prompt], *others: Any) -> list[Completion]:
            self.answers = [made[len(self.asked)]]
            self.asked.append(prompts[0].user)
            return super().generate(prompts, *others)

    writer, plan = InTurn([]), make_plan(config)
    calls = plan.public_calls(["1"])
    [answer] = documents(writer, calls, no_progress)  # type: ignore[arg-type]
    found = released_text(calls, answer, calls.requests[0])
    examples_drawn = [["Fell. Hit the", "length", 16], ["No pain", "stop", 3]]
    [record] = records_of(plan, {"batch": "0/0", "examples": examples_drawn})  # type: ignore[arg-type]
    assert found == record["text"] == "Fell.\n\nNo pain"
    assert answer.finish_reason == record["finish_reason"] == "length"
    assert answer.completion_tokens == 999 + 3
    shown = [("Hit the arm" in user, "None at all" in user) for user in writer.asked]
    assert shown == [(True, False), (False, True)]


def test_advice_names_what_the_prompts_lack(tmp_path: Path) -> None:
    config = config_of(tmp_path, "aug_pe")
    writer = Writer([("Same.", 3), ("", 0)])
    found = preview(make_plan(config), 4, lambda *_, **__: writer, no_progress, False)
    keys = [line.partition(":")[0] for line in found["advice"]]
    assert keys == [
        "data.about", "data.label_about", "method.temperature", "method.template",
        "method.temperature",
    ]  # fmt: skip


def test_the_packaged_model_previews_private_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path, "private_prediction", about="clinic notes")
    stars = ["data.attributes.stars=[717, 929]", "data.label_proportions=measured"]
    command = ["preview", str(tmp_path / "c.yaml"), "--records", "3", "--write", "--json", *stars]
    assert run_command(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"]["user"].startswith("Here are clinic notes of the kind: 1.")
    assert all(each["attributes"]["stars"] in {717, 929} for each in found["texts"])
    floor = tmp_path / "out" / "floor.jsonl"
    assert found["floor"] == str(floor) and found["forecast"]["hours"] > 0
    written = [json.loads(line) for line in floor.read_text().splitlines()]
    assert written == [
        {"text": each["text"], "label": each["label"]} for each in found["texts"] if each["text"]
    ]
    show_preview(found, command[1:2], Terminal())
    assert "--floor" in capsys.readouterr().out


def test_a_model_that_does_not_know_the_language_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a public sentence, or by public examples: the packaged model knows the demo's."""
    config_of(tmp_path, "private_prediction", language="ar")
    command = ["preview", str(tmp_path / "c.yaml"), "--records", "1", "--json"]
    assert run_command(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits"]["of"] == "a public sentence in Arabic"
    assert found["bits"]["per_byte"] > found["bits"]["most"] == MOST_BITS
    [line] = [line for line in found["advice"] if line.startswith("engine.model: ")]
    assert "Arabic" in line and "take a model that was trained on it" in line
    assert " in Arabic" in found["prompt"]["user"]
    show_preview(found, command[1:2], Terminal())
    assert "bits for a byte of a public sentence in Arabic" in capsys.readouterr().out

    examples = f"method.few_shot={DEMO.parent / 'data' / 'public.jsonl'}"
    assert run_command([*command, examples]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits"]["of"] == "method.few_shot" and found["bits"]["per_byte"] < MOST_BITS
    assert not any(line.startswith("engine.model: ") for line in found["advice"])


def test_what_cannot_be_previewed_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path, "dp_kps")
    silent = ["preview", str(tmp_path / "c.yaml"), "engine.kind=none"]
    assert run_command(silent) == 2
    assert "writes no texts" in capsys.readouterr().err
    config_of(tmp_path, "aug_pe")
    assert run_command(["preview", str(tmp_path / "c.yaml"), "engine.model=nowhere/model"]) == 2
    assert "engine.model" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "aug_pe")
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(dpray.InputError, match=r"output\.path"):
        preview(make_plan(config), 1, None, no_progress, True)  # type: ignore[arg-type]
    with pytest.raises(dpray.InputError, match="one text at least"):
        dpray.preview(config, records=0)


def test_a_text_that_is_not_unicode_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, "dp_sgd")
    writer = Writer([("lone \ud800 surrogate", 120)])
    preview(make_plan(config), 1, lambda *_, **__: writer, no_progress, True)
    assert "lone ? surrogate" in (tmp_path / "out" / "floor.jsonl").read_text()


@pytest.mark.parametrize("method", ["dp_sgd", "dp_kps"])
def test_the_next_command_has_the_settings_of_this_one(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, method)
    writer = Writer([("A text.", 3)])
    found = preview(make_plan(config), 1, lambda *_, **__: writer, no_progress, False)
    show_preview(found, ["my job.yaml", "privacy.epsilon=2"], Terminal())
    shown = capsys.readouterr().out
    assert "bits for a byte" not in shown
    first, *_, last = shown.splitlines()[1:]
    assert first.startswith("Prompt, as ") and first.endswith(" gets it:")
    command = ": dpray run 'my job.yaml' privacy.epsilon=2"
    assert last.endswith(command if method == "dp_sgd" else f"{command}; if not: docs/bad_texts.md")
    assert ("before it is tuned" in last) == (method == "dp_sgd")
    assert "The run, time: " in shown


@pytest.mark.parametrize("method", ["aug_pe", "dp_kps", "dp_sgd"])
def test_a_text_is_shown_with_its_attributes(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"attributes": {"stars": [717, 929]}, "label_proportions": "measured"}
    writer = Writer([("A text.", 3)])
    plan = make_plan(config_of(tmp_path, method, **data))
    found = preview(plan, 2, lambda *_, **__: writer, no_progress, False)
    shown = [each["attributes"]["stars"] for each in found["texts"]]
    for value, prompt in zip(shown, writer.prompts, strict=True):
        assert value in {717, 929} and str(value) in f"{prompt.user} {prompt.prefix}"
    show_preview(found, ["job.yaml"], Terminal())
    assert f"1, stars: {shown[0]}: A text." in capsys.readouterr().out


def test_a_preview_warns_as_the_plan_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever skips the plan learns here what is wrong with it."""
    config_of(tmp_path, "dp_kps", public_size=50)
    plan = make_plan(dpray.load(tmp_path / "c.yaml", "method.estimator=rff"))
    found = preview(plan, 1, lambda *_, **__: Writer([("A text.", 3)]), no_progress, False)
    assert found["warnings"] and found["warnings"] == plan.method_summary()["warnings"]
    show_preview(found, ["job.yaml"], Terminal())
    shown = capsys.readouterr().out
    assert f"warning: {found['warnings'][0]}" in shown
    assert "as fast as this machine was just now" in shown


def test_a_process_that_ends_at_once_has_printed_everything() -> None:
    code = (
        "import atexit; from dpray.commands.preview import end_process\n"
        "atexit.register(print, 'taken apart'); print('a text'); end_process()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "a text\n", "")


def test_labels_by_their_shares() -> None:
    assert spread_labels({"a": 0.6, "b": 0.4}, 5) == ["a", "b", "a", "b", "a"]
    assert spread_labels({"": 1.0}, 2) == ["", ""]


def test_a_speed_that_cannot_be_measured_is_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a longer measurement may take less time than a short one."""
    config = config_of(tmp_path, "private_prediction")
    monkeypatch.setattr("dpray.runs.preview.measure_rates", lambda *_: None)
    found = preview(
        make_plan(config), 1, lambda *_, **__: Writer([("One.", 3)]), no_progress, False
    )
    usual = rates_here(config)
    assert usual is not None and found["forecast"]["rates"] == asdict(usual)


def test_transformers_writes_a_few_texts_where_vllm_would_run_on_a_cpu(
    tmp_path: Path, vllm_installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forecast is that of vLLM, and the page names the engine. Many texts, and models that
    transformers loads in another way, are left to vLLM."""
    config_of(tmp_path, "dp_kps")
    changed = {
        "plain": {},
        "quantised": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "stateful": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    }
    for name, keys in changed.items():
        file = Path(shutil.copytree(DEMO, tmp_path / name)) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    def previewed(model: str, records: int) -> tuple[list[str], dict[str, Any], Config]:
        keys = ("engine.kind=vllm", f"engine.model={tmp_path / model}")
        config, kinds = dpray.load(tmp_path / "c.yaml", *keys), list[str]()

        def build(engine: EngineConfig, **_: object) -> Any:
            kinds.append(engine.kind)
            return Writer([("One.", 3)])

        return kinds, preview(make_plan(config), records, build, no_progress, False), config

    kinds, found, config = previewed("plain", FEW)
    usual = rates_here(config)
    assert (kinds, found["engine"]) == (["transformers"], "transformers")
    assert usual is not None and found["forecast"]["rates"] == asdict(usual)
    show_preview(found, ["job.yaml"], Terminal())
    shown = capsys.readouterr().out
    assert " s each, by transformers;" in shown and USUAL in shown and MEASURED not in shown
    for model, records in (("plain", FEW + 1), ("quantised", 1), ("stateful", 1)):
        kinds, found, _ = previewed(model, records)
        assert (kinds, found["engine"], found["speed"]) == (["vllm"], "vllm", MEASURED)


@pytest.mark.parametrize("gpus", [None, 0, 0.5])
def test_a_preview_and_a_plan_count_the_same_gpus(tmp_path: Path, gpus: float | None) -> None:
    """Of a machine whose GPU the configuration describes."""
    config_of(tmp_path, "dp_kps")
    engine = "engine.gpu_memory_gib=80"
    runtime = f"runtime.gpus_per_actor={json.dumps(gpus)}"
    made = make_plan(dpray.load(tmp_path / "c.yaml", engine, runtime))
    found = preview(made, 1, lambda *_, **__: Writer([("One.", 3)]), no_progress, False)["forecast"]
    planned = Speed(tokens_per_second="100,20").forecast(made.config, made.work)
    each = 1 if gpus is None else gpus
    assert planned is not None
    assert planned.gpu_hours == (each * planned.engine_hours if each else None)
    assert found["gpu_hours"] == (each * found["engine_hours"] if each else None)

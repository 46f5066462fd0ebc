"""The proposal of a clip from public texts: what is measured, what it affords, what is refused."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpray.cli import run_command
from dpray.config.config import Config, EngineConfig, parse_config
from dpray.engines.base import EngineError
from dpray.engines.transformers import TransformersEngine
from dpray.io.template_file import Template
from dpray.methods.private_prediction.gains import (
    GainMeter,
    Gains,
    continuation,
    measure,
    sampled,
)
from dpray.methods.private_prediction.prompts import PromptTemplate, load_template
from dpray.methods.private_prediction.resolved import PrivatePredictionPlan
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.private_prediction.token import PrivateToken
from dpray.methods.private_prediction.tuning import (
    Setting,
    batch_options,
    divided,
    propose,
    tune_clip,
)
from dpray.registry import make_plan
from dpray.types import InputError
from tests.engines.tiny_model import sentence

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engine(model_folder: str) -> Iterator[TransformersEngine]:
    made = TransformersEngine(EngineConfig(model=model_folder, dtype="float32"), device="cpu")
    yield made
    made.close()


@pytest.fixture
def public_file(tmp_path: Path) -> Path:
    rng = random.Random(2)
    path = tmp_path / "public.jsonl"
    rows = [{"text": sentence(rng, 8), "label": "ab"[n % 2]} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    return lambda **changes: parse_config(settings(**changes))


def mechanism(rows: int, **changes: Any) -> PrivateToken:
    values: dict[str, Any] = {"clip": "dclip", "clip_bound": 1.0, "temperature": 1.0}
    return PrivateToken(
        **values | {"batch_size": rows, "private_tokens": 9, "public_temperature": 1.0} | changes
    )


def test_an_unclipped_gain_is_that_of_the_mean_of_log_probabilities(
    engine: TransformersEngine,
) -> None:
    """The reference reads each prompt and the text in one pass of the model, without a cache."""
    rows, text, template = ["the old bridge near", "market shares fell"], "cough and fever", "texts"
    made = load_template(template)
    texts = {"": (rows, [text])}
    gains = measure(engine, mechanism(2), made, texts, (512, 9), [1000.0], [1.0, 2.0])
    ids = engine.ids(f" {text}")
    prompts = [made.private_prompt(row, "") for row in rows]
    logs = []
    for prompt in (*prompts, made.public_prompt("")):
        before = list(engine.encode(prompt))
        with torch.inference_mode():
            logits = engine._model(input_ids=torch.tensor([before + ids])).logits[0]
        logs.append(logits[len(before) - 1 : -1].double().log_softmax(-1))
    mean, public = torch.stack(logs[:-1]).mean(0), logs[-1]
    chosen = range(len(ids)), ids
    wanted = [
        float(((mean / tau).log_softmax(-1)[chosen] - public[chosen]).mean()) for tau in (1.0, 2.0)
    ]
    assert gains.tokens == len(ids) == 3 and gains.error(0) is None
    assert gains.means_G == pytest.approx(wanted, abs=1e-5)
    assert abs(wanted[0]) > 1e-2


def test_tokens_after_the_end_of_a_text_do_not_count_and_a_text_without_any_is_left_out(
    engine: TransformersEngine,
) -> None:
    """A public text may hold the word that ends one; the model's would be cut there, too."""
    end = engine.tokenizer.convert_ids_to_tokens(engine.eos_ids[0])
    held_out = ["cough", f"cough {end} and fever and cough", "{"]
    made = PromptTemplate(Template({"user": "{text}", "prefix": "{{"}))
    gains = measure(engine, mechanism(1), made, {"": (["fever"], held_out)}, (512, 9), [1.0], [1.0])
    one, two = (len(engine.ids(text)) for text in ("cough", f"cough {end}"))
    assert gains.lengths.tolist() == [one, two]


def test_logits_that_are_no_numbers_are_an_error(engine: TransformersEngine) -> None:
    bias = engine._model.get_output_embeddings().weight
    kept = bias.detach().clone()
    try:
        with torch.no_grad():
            bias.fill_(float("nan"))
        texts = {"": (["a"], ["b"])}
        with pytest.raises(EngineError, match="no numbers"):
            measure(engine, mechanism(1), load_template("texts"), texts, (512, 9), [1.0], [1.0])
    finally:
        with torch.no_grad():
            bias.copy_(kept)


def test_standard_errors_are_those_of_other_samples_of_texts() -> None:
    """Texts of very different lengths, and two settings that rise and fall together."""
    rng = np.random.default_rng(0)

    def drawn() -> Gains:
        tokens_T = rng.integers(1, 40, 60)
        shared_T, own_TG = rng.normal(0, 2, 60), rng.normal(0, 0.3, (60, 2))
        return Gains(0.1 * tokens_T[:, None] + shared_T[:, None] + own_TG, tokens_T)

    samples = [drawn() for _ in range(2000)]
    means = np.array([sample.means_G for sample in samples])
    means_of = [(None, means[:, 0]), (1, means[:, 0] - means[:, 1])]
    for other, found in means_of:
        errors = [sample.error(0, other) or 0.0 for sample in samples]
        assert np.mean(errors) == pytest.approx(found.std(), rel=0.05)
    assert means_of[1][1].std() < 0.3 * means_of[0][1].std()
    assert samples[0].error(0, 0) == 0.0


@pytest.mark.parametrize(
    ("fewest", "labels", "size", "wanted"),
    [
        (2, 1, 127, (1, 1)),
        (3, 1, 127, (1, 2)),
        (40, 1, 127, (20, 20)),
        (500, 1, 127, (32, 32)),
        (500, 4, 127, (32, 8)),
        (500, 100, 127, (32, 1)),
        (20, 2, 5, (5, 15)),
    ],
)
def test_as_many_texts_are_held_out_as_the_file_has(
    fewest: int, labels: int, size: int, wanted: tuple[int, int]
) -> None:
    assert divided(fewest, labels, size) == wanted


def read(meter: GainMeter, private: torch.Tensor, public: torch.Tensor) -> np.ndarray:
    selection = meter.select(private, public)
    gains = next(selection)
    with pytest.raises(StopIteration):
        selection.send(gains.double())
    return np.array(meter.state()["sums"]).reshape(3, 2)


def planted(token: int, **changes: Any) -> np.ndarray:
    """Return the gains of a token that the rows, not the public prompt, hold likely: 3."""
    private, public = torch.zeros(4, 20), torch.zeros(20)
    private[:, 3], public[:10] = 4.0, 1.0
    return read(
        GainMeter(vars(mechanism(4, **changes)), [token], [1e-6, 1.0, 10.0], [0.5, 1.0]),
        private,
        public,
    )


def test_what_the_other_texts_share_is_gained_and_a_clip_of_nothing_gains_nothing() -> None:
    found = planted(3)
    assert found[0, 1] == pytest.approx(0.0, abs=1e-5)
    assert 0.5 < found[1, 1] < found[2, 1] and found[2, 0] > found[2, 1]
    assert planted(4)[2, 1] < 0


def test_the_configured_clip_and_candidates_count() -> None:
    flat = planted(3, clip="recentred")[0, 1]
    assert flat == pytest.approx(np.log(1 / 20) - np.log(np.e / (10 * np.e + 10)), abs=1e-4)
    few = {"candidates": "top_k", "k": 10}
    assert (planted(12, **few) == 0).all(), "such a token can be drawn by nobody"
    assert planted(3, **few)[0, 1] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("prefix", "text", "written"),
    [
        ("Text:", "cough", " cough"),
        ("", "cough", "cough"),
        ("```\n{", '{"year": 1}', '"year": 1}'),
        ('Text: "', "cough", "cough"),
    ],
)
def test_a_text_goes_on_from_its_prefix(prefix: str, text: str, written: str) -> None:
    assert continuation(prefix, text) == written


def test_held_out_texts_are_in_no_row() -> None:
    rows, held_out = sampled({"a": list("abcdefgh")}, 5, 3)["a"]
    assert sorted(rows + held_out) == list("abcdefgh") and len(rows) == 5
    assert sampled({"a": list("abcdefgh")}, 5, 3)["a"] == (rows, held_out)


GRID = [Setting("dclip", 1000.0, 0.5, 0.4), Setting("dclip", 1.0, 1.0, 0.2),
        Setting("dclip", 0.1, 2.0, 0.1), Setting("dclip", 0.1, 3.0, -0.1)]  # fmt: skip


def proposal(config: Config, wanted: int) -> tuple[list[Setting], Setting | None]:
    assert isinstance(config.method, PrivatePredictionSettings)
    template = load_template(config.method.template)
    options = batch_options(config, config.method, template, wanted)
    return propose(config, config.method, template, GRID, options, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["auto", "disjoint", "poisson"])
def test_a_proposal_affords_the_wanted_texts_within_epsilon(
    config: Callable[..., Config], batches: str
) -> None:
    made = config(
        data__public_size=4000, privacy__epsilon=2.0, method__batches=batches,
        method__batch_size=32, method__max_records=60,
    )  # fmt: skip
    found, best = proposal(made, 60)
    assert best is not None and best.texts is not None and best.texts >= 60
    assert found[0].texts is not None and found[0].texts < 60, "it is too dear"
    assert best is found[1] and found[2].texts is found[3].texts is None
    changes = {key.removeprefix("method."): value for key, value in best.keys.items()}
    plan = make_plan(made.model_copy(update={"method": made.method.model_copy(update=changes)}))
    assert isinstance(plan, PrivatePredictionPlan)
    assert plan.cost.epsilon <= 2.0 and plan.expected_records == 60


@pytest.mark.slow
def test_the_nearest_is_named_where_nothing_affords_the_texts(
    config: Callable[..., Config],
) -> None:
    made = config(method__max_tokens=100, method__batch_size=16, privacy__epsilon=0.5)
    found, nearest = proposal(made, 10**6)
    assert nearest is not None and nearest.affordable < 10**6
    assert nearest.affordable == max(each.affordable for each in found)
    assert found[3].texts is None, "it gains nothing"


def test_the_whole_proposal(
    config_file: Callable[..., str],
    public_file: Path,
    records_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command opens no private data, makes no ledger and answers people and programs."""
    records_file.unlink()
    command = ["plan", config_file(method__clip="dclip"), "--tune-clip", str(public_file)]
    assert run_command([*command, "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out)
    assert tuned["wanted_texts"] == 24 and tuned["wanted_from_plan"] is False
    assert (tuned["rows"], tuned["texts"], tuned["tokens"]) == (5, 30, 120)
    gains = [each["gain"] for each in tuned["gains"]]
    best, *others = tuned["gains"]
    assert best["standard_error"] > 0 and best["standard_error_below_best"] == 0.0
    assert all(each["standard_error_below_best"] > 0 for each in others)
    assert len(gains) == 30 and gains == sorted(gains, reverse=True)
    assert {each["clip"] for each in tuned["gains"]} == {"dclip"}
    assert run_command(command) == 0
    shown = capsys.readouterr().out
    assert "no private data was opened" in shown
    assert f"{best['gain']:.3f} +- {best['standard_error']:.3f}" in shown
    if tuned["settings"] is not None:
        assert ("within two standard errors of 0" in shown) != tuned["above_noise"]
    if tuned["settings"] is not None:
        assert " ".join(f"{k}={v}" for k, v in tuned["settings"].items()) in shown
    assert not (public_file.parent / "ledger.db").exists()


@pytest.mark.slow
def test_without_a_number_of_texts_the_plans_own_is_wanted(
    config: Callable[..., Config], public_file: Path
) -> None:
    made = config(method__max_records=None, method__max_tokens=2)
    tuned = tune_clip(made, str(public_file))
    assert tuned["wanted_from_plan"] is True
    plan = make_plan(made)
    assert isinstance(plan, PrivatePredictionPlan)
    assert tuned["wanted_texts"] == plan.whole_texts


def test_bad_input_is_refused_by_the_options_name(
    config: Callable[..., Config], public_file: Path, records_file: Path
) -> None:
    def refused(match: str, file: Path | str, **changes: Any) -> None:
        with pytest.raises(InputError, match=match) as error:
            tune_clip(config(**changes), str(file))
        assert "Marlowe" not in str(error.value)

    refused("--tune-clip: .* is data.path itself", records_file)
    link = records_file.with_name("link.jsonl")
    os.link(records_file, link)
    refused("--tune-clip: .* is data.path itself", link)
    refused("--tune-clip: .* is data.path itself", f"file://{records_file}")
    refused("--tune-clip: .* is data.path itself", records_file, data__path=f"file://{link}")
    hub = {"data__path": "hf://someone/notes"}
    refused("--tune-clip: .* is data.path itself", "hf://someone/notes#train", **hub)
    refused("--tune-clip: no such file", records_file.with_name("none.jsonl"))
    refused("--tune-clip: .*not one of data.labels", public_file, data__labels=["a", "c"])
    refused("--tune-clip: .*row 1: no column 'note'", public_file, data__text="note")
    empty = public_file.with_name("empty.jsonl")
    empty.touch()
    refused("--tune-clip: empty.jsonl holds no rows", empty)
    one = public_file.read_text().splitlines()[0]
    public_file.write_text(f"{one}\n{one}\n")
    refused("--tune-clip: .* has 1 texts of the label a; 2 or more", public_file)
    refused("private_prediction, not aug_pe", public_file, method={"name": "aug_pe"})

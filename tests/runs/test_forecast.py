"""The tokens of a plan, rates, and the forecast of `dpray plan`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import dpray
from dpray.cli import app
from dpray.engines.rates import DECODED_TOKENS, Rates, measure_rates, rates_of
from dpray.engines.text import codec_of
from dpray.io.files import read_json
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.runs.call_cache import CALLS, Call, CallCache
from dpray.runs.forecast import Forecast, Work, _parameters, given_rates, rates_here, rates_of_run
from dpray.runs.session import Session
from dpray.types import InputError, Progress


def test_prefilling_and_decoding_take_turns_or_the_same_time() -> None:
    rates = Rates(100.0, 10.0)
    assert rates.seconds(300, 40) == 7.0
    assert replace(rates, together=True).seconds(300, 40) == 4.0
    assert replace(rates, train=5.0).seconds(300, 40, 10) == 9.0


def test_a_forecast_counts_engines_actors_gpus_and_money(settings: Callable[..., Any]) -> None:
    on_ray = {"ray_address": "auto", "actors": 4, "gpus_per_actor": 2.0}
    model = settings()["engine"]["model"]
    two = {"kind": "vllm", "model": model, "tensor_parallel_size": 2}
    config = parse_config(settings(runtime=on_ray, engine=two))
    work, rates = Work(3600 * 100, 3600 * 10), Rates(100.0, 10.0)
    found = Forecast.of(work, rates, config, 1.5)
    assert (found.engine_hours, found.hours, found.gpu_hours, found.price) == (2.0, 0.5, 4.0, 3.0)
    assert found.lines() == {
        "time": "about 2.0 h of one engine, 4.0 h of a GPU; 30 min with all of runtime.actors",
        "price": "about 3.00",
    }
    here = parse_config(settings())
    somewhere = parse_config(settings(engine=two, engine__gpu_memory_gib=80.0))
    assert Forecast.of(work, rates, somewhere).gpu_hours == 4.0
    assert Forecast.of(work, rates, here).lines() == {"time": "about 2.0 h of one engine"}


def test_a_rate_is_measured_by_the_tokens_that_the_engine_gets(engine: Any) -> None:
    times: Iterator[float] = iter([0.0, 2.0, 0.0, 1.0, 0.0, 5.0])
    measure_rates(engine, 6, lambda: next(times))
    rates = rates_of(engine)
    assert rates is not None
    assert rates.decode == 7 * DECODED_TOKENS / 4.0
    assert 2 * rates.prefill >= 1024  # the rows of a measurement, with their first words
    assert not rates.together


def test_the_rates_of_calls_are_those_of_one_engine(tmp_path: Path) -> None:
    config = SimpleNamespace(
        runtime=SimpleNamespace(actors=2, uses_ray=True), engine=SimpleNamespace(is_local=True)
    )
    folder: Any = SimpleNamespace(private=tmp_path)
    plan: Any = SimpleNamespace(config=config)
    CallCache(tmp_path / CALLS).put(Call("of an earlier attempt", "text", 999, 999))
    session: Any = Session(plan, folder, None, "", "", None, None)  # type: ignore[arg-type]
    assert session.rates is None
    session._seconds_asked = 4.0
    assert session.rates is None  # an endpoint that counts no tokens
    session._calls.put(Call("1", "text", 100, 50))
    session._calls.put(Call("2", "text", 60, 30))
    assert session.rates == Rates(20.0, 10.0, together=True)


def test_private_prediction_counts_the_rows_of_all_batches(settings: Callable[..., Any]) -> None:
    def work(**changes: Any) -> tuple[Any, Work]:
        plan = dpray.plan(parse_config(settings(**changes)))
        return plan, plan.work

    plan, found = work()
    codec = codec_of(plan.config.engine.model, None)
    public = max(len(codec.encode(plan.template.public_prompt(x))) for x in plan.proportions)
    row, s = plan.memory.row_tokens - 4, 5
    batches, texts = plan.batches_decoded, plan.expected_texts
    assert found == Work(batches * (s * row + public), texts * (s + 1) * 4)
    _, with_cache = work(engine={"kind": "vllm", "model": plan.config.engine.model})
    assert with_cache.decode == found.decode
    saved = found.prefill - with_cache.prefill
    assert saved % (batches * (s - 1)) == 0
    elsewhere, unknown = work(engine={"kind": "vllm", "model": "owner/name"})
    assert elsewhere.memory is None
    assert unknown.decode == found.decode


def test_the_calls_of_the_other_methods_are_counted(
    settings: Callable[..., Any], sequences: dict[str, Any]
) -> None:
    tree = settings(**sequences)
    assert dpray.plan(parse_config(tree)).work == Work()
    tree["engine"] = {"kind": "transformers", "model": settings()["engine"]["model"]}
    plan: Any = dpray.plan(parse_config(tree))
    prompt = len(codec_of(plan.config.engine.model, None).encode(plan._trial("a")))
    assert plan.work == Work(8 * prompt, 8 * plan.settings.max_tokens)

    method = {"name": "aug_pe", "records": 6, "iterations": 2, "variations": 3, "max_tokens": 9}
    pe: Any = dpray.plan(parse_config(settings(method=method)))
    assert pe.work.decode == pe.method.llm_calls * 9
    assert pe.work.prefill > pe.method.calls_by_purpose["variations"] * 9

    method = {"name": "dp_sgd", "max_length": 32, "batch_size": 10, "records": 7, "epochs": 2}
    sgd: Any = dpray.plan(parse_config(settings(method=method)))
    assert sgd.work.train == sgd.method.steps * 10 * 32
    assert sgd.work.prefill + sgd.work.decode == 7 * 32


def test_the_options_of_a_forecast(
    config_file: Callable[..., str], sequences: dict[str, Any], tmp_path: Path
) -> None:
    file = config_file()

    def answer(*options: str) -> str:
        result = CliRunner().invoke(app, ["plan", file, *options])
        return result.stdout if result.exception is None else str(result.exception)

    plain = json.loads(answer("--json"))
    plan = dpray.plan(dpray.load(file))
    assert plain.pop("tokens") == asdict(plan.work)
    usual = plain.pop("forecast")
    assert usual["engine_hours"] == pytest.approx(
        3600**-1 * Rates(**usual["rates"]).seconds(*astuple(plan.work))
    )
    assert plain == json.loads(json.dumps(plan.summary()))
    given = json.loads(answer("--json", "--tokens-per-second", "100,20", "--per-hour", "2"))
    seconds = plan.work.prefill / 100 + plan.work.decode / 20
    assert given["forecast"]["engine_hours"] == pytest.approx(seconds / 3600)
    assert given["forecast"]["price"] == pytest.approx(2 * seconds / 3600)

    here = str(tmp_path)
    for options, said in (
        (("--per-hour", "1"), "--per-hour: a price needs a speed"),
        (("--rate-from", here, "--tokens-per-second", "1,1"), "not both"),
        (("--rate-from", here), "--rate-from: cannot read"),
        (("--tokens-per-second", "1"), "--tokens-per-second: two numbers above 0"),
        (("--tokens-per-second", "1,0"), "--tokens-per-second: two numbers above 0"),
        (("--tokens-per-second", "1,nan"), "--tokens-per-second: two numbers above 0"),
        (("--compare", "--per-hour", "1"), "--per-hour: is for the plan of one method"),
        (("--tokens-per-second", "1,1", "--per-hour", "-1"), "--per-hour: a price of at least 0"),
    ):
        assert said in answer(*options)


def test_a_cpu_has_usual_rates_and_any_other_engine_is_unknown(
    config_file: Callable[..., str], settings: Callable[..., Any]
) -> None:
    here = parse_config(settings())
    rates = rates_here(here)
    assert rates is not None and rates.train is not None
    assert rates.prefill > rates.decode > rates.train > 0
    elsewhere = "HuggingFaceTB/SmolLM2-1.7B-Instruct"
    assert rates_here(parse_config(settings(engine__model=elsewhere))) is None
    assert rates_here(parse_config(settings(engine__gpu_memory_gib=80.0))) is None
    shown = CliRunner().invoke(app, ["plan", config_file()]).stdout
    assert "on two CPU cores, at most" in " ".join(shown.split())
    shown = CliRunner().invoke(app, ["plan", config_file(), f"engine.model={elsewhere}"]).stdout
    assert "unknown on this engine" in " ".join(shown.split())


def test_a_larger_model_is_forecast_to_be_slower() -> None:
    """The parameters that the configuration of SmolLM2-135M stands for are counted from it."""
    sizes = SimpleNamespace(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152,
    )  # fmt: skip
    assert _parameters(sizes) == pytest.approx(134.5e6, rel=0.01)


def test_a_training_needs_a_rate_of_its_own() -> None:
    work = Work(1, 1, 1)
    with pytest.raises(InputError, match="add a third number"):
        given_rates("1,2", work)
    assert given_rates("1,2,3", work) == Rates(1.0, 2.0, 3.0)


def test_the_rates_of_another_run_are_refused(settings: Callable[..., Any], tmp_path: Path) -> None:
    config = parse_config(settings())
    engine = {"kind": "transformers", "model": "tiny (sha256 0123456789abcdef)"}
    run: dict[str, Any] = {
        "config": {"engine": engine, "method": {"name": "private_prediction"}},
        "rates": asdict(Rates(1.0, 2.0)),
    }

    def found(**changes: Any) -> Rates:
        (tmp_path / "run.json").write_text(json.dumps(run | changes))
        return rates_of_run(str(tmp_path), config, Work(1, 1))

    assert found() == Rates(1.0, 2.0)
    for changes, said in (
        ({"config": {"method": {"name": "aug_pe"}}}, "is a run of aug_pe"),
        ({"config": []}, r"config\.method\.name in run"),
        ({"config": {"method": ["aug_pe"]}}, r"config\.method\.name in run"),
        ({"config": run["config"] | {"engine": "vllm"}}, r"config\.engine\.kind in run"),
        ({"config": run["config"] | {"engine": engine | {"model": 3}}}, r"engine\.model in run"),
        ({"config": run["config"] | {"engine": engine | {"model": "other"}}}, "used other by"),
        ({"config": run["config"] | {"engine": engine | {"kind": "vllm"}}}, "used tiny by vllm"),
        ({"rates": None}, "has no rates"),
        ({"rates": [1.0, 2.0]}, r"rates\.prefill in run"),
        *(
            ({"rates": run["rates"] | {name: wrong}}, rf"rates\.{name} in run\.json is not")
            for name in ("prefill", "decode", "together")
            for wrong in (0.0, -1.0, math.inf, math.nan, 10**400, "fast", None, {}, [1.0])
        ),
    ):
        with pytest.raises(InputError, match=f"^--rate-from: .*{said}"):
            found(**changes)
    with pytest.raises(InputError, match="records no rate of its training"):
        rates_of_run(str(tmp_path), config, Work(1, 1, 1))


def test_the_rates_of_private_prediction_are_measured_before_its_data_is_opened(
    settings: Callable[..., Any], tmp_path: Path
) -> None:
    """The rates that run.json has before the charge, when the files are hashed, stay in it. The
    most time that a run shows is that of its plan by them: it does not move with the rows."""
    config = parse_config(settings())
    before: list[Any] = []
    shown: set[str] = set()

    def look(progress: Progress) -> None:
        if progress.activity == "hashing files":
            before.append(read_json(tmp_path / "out" / "run.json")["rates"])
        if progress.activity in ("sorting records into batches", "batches"):
            shown.add(progress.detail.rpartition(", ")[2])

    registry.run(config, look)
    after = read_json(tmp_path / "out" / "run.json")["rates"]
    time = Forecast.of(dpray.plan(config).work, Rates(**after), config).duration
    assert shown == {f"the loaded model takes up to about {time} in all"}
    assert before
    assert all(rates == after for rates in before)
    assert rates_of_run(str(tmp_path / "out"), config, Work(1, 1)) == Rates(**after)


def test_a_model_of_unusual_sizes_has_no_usual_rates(
    settings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3n has a list of inner sizes. A run of it is not to end for want of a forecast."""
    for sizes in ({"intermediate_size": [1, 2]}, {"num_attention_heads": None}, {}):
        usual = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
        model = SimpleNamespace(**usual | {"vocab_size": 9} | sizes if sizes else {})
        codec = SimpleNamespace(model_config=model)
        monkeypatch.setattr("dpray.runs.forecast.codec_of", lambda *_, codec=codec: codec)
        assert rates_here(parse_config(settings())) is None

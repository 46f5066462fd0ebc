"""`dpray plan` shows the cost and the expected output of a configuration; it opens no data."""

from __future__ import annotations

import gc
import json
import math
import re
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import dpray
from dpray.engines import text
from dpray.engines.kv_cache import may_have_gpu
from dpray.engines.model_path import is_at_hand
from dpray.io.yaml_text import dump_yaml
from dpray.report.tables import person_in_words
from dpray.runs.forecast import (
    PRICE,
    RATE_FROM,
    RATES,
    Forecast,
    Work,
    given_rates,
    may_be_on_gpu,
    rates_here,
    rates_of_run,
)
from dpray.runs.privacy_report import Guarantee
from dpray.terminal import Terminal, add_or_remove, progress_bar, titled_table
from dpray.types import InputError, Json, Progress, ReadOnlyJson
from dpray.workers.memory import lacks_size
from dpray.workers.needs import needs

if TYPE_CHECKING:
    from dpray.config.config import Config
    from dpray.evaluation.compare import Chosen, Comparison

ConfigFile = Annotated[str, typer.Argument(help="A YAML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.sub=value settings.", metavar="[KEY=VALUE]...")
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")]
PublicFile = Annotated[
    str, typer.Option(help="PUBLIC records of the same kind, with the same columns and labels.")
]


def plan(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare all methods for the same number of texts, and recommend one; "
            "method.name=auto does the same.",
        ),
    ] = False,
    write: Annotated[
        str | None,
        typer.Option(
            help="Write the configuration of the recommended method to this new file.",
            metavar="FILE",
        ),
    ] = None,
    rate_from: Annotated[
        str | None,
        typer.Option(
            help="Forecast hours at the speed of this finished run, of the same method and model.",
            metavar="RUN_DIR",
        ),
    ] = None,
    tokens_per_second: Annotated[
        str | None,
        typer.Option(
            help="Forecast hours at this speed of one engine; dp_sgd also needs TRAIN.",
            metavar="PREFILL,DECODE[,TRAIN]",
        ),
    ] = None,
    per_hour: Annotated[
        float | None,
        typer.Option(help="The price of one engine's machine for an hour.", metavar="PRICE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run will cost and make: epsilon, delta, texts, calls, hours. Opens no data."""
    loaded = dpray.load(config, *overrides or [])
    prepare_to_plan(context, may_be_on_gpu(loaded))
    speed = Speed(rate_from, tokens_per_second, per_hour)
    if compare or loaded.method.name == "auto":
        for name, value in zip((RATE_FROM, RATES, PRICE), astuple(speed), strict=True):
            if value is not None:
                raise InputError(f"{name}: is for the plan of one method, not for a comparison")
        _compare(loaded, write, as_json)
        return
    if write is not None:
        raise InputError("--write: is for --compare, or for method.name auto")
    speed.check()
    _plan_one(loaded, speed, as_json)


def prepare_to_plan(context: typer.Context, on_gpu: bool | None = None) -> None:
    """Make the plans of this process faster, if it ends with them."""
    alone = is_alone(context)
    # The parameters of a model for a GPU are counted by torch.
    text.LOADS_NO_MODEL = alone and not (may_have_gpu() if on_gpu is None else on_gpu)
    if alone:
        gc.disable()  # a tenth of the time would be collections


def is_alone(context: typer.Context) -> bool:
    """Return whether the process ends with this command."""
    return bool((context.obj or {}).get("alone", False))


@dataclass(frozen=True)
class Speed:
    """The options for a forecast, as they were given."""

    rate_from: str | None = None
    tokens_per_second: str | None = None
    per_hour: float | None = None

    @property
    def is_given(self) -> bool:
        return self.rate_from is not None or self.tokens_per_second is not None

    def check(self) -> None:
        if self.rate_from is not None and self.tokens_per_second is not None:
            raise InputError(f"{RATE_FROM}: give it or {RATES}, not both")
        if self.per_hour is None:
            return
        if not self.is_given:
            raise InputError(f"{PRICE}: a price needs a speed; give {RATE_FROM} or {RATES}")
        if not 0 <= self.per_hour < math.inf:
            raise InputError(f"{PRICE}: a price of at least 0")

    def forecast(self, config: Config, work: Work) -> Forecast | None:
        if self.tokens_per_second is not None:
            rates = given_rates(self.tokens_per_second, work)
        elif self.rate_from is not None:
            rates = rates_of_run(self.rate_from, config, work)
        elif work == Work() or (usual := rates_here(config)) is None:
            return None
        else:
            rates = usual
        return Forecast.of(work, rates, config, self.per_hour)


def _time(forecast: Forecast | None, is_given: bool, work: Work) -> dict[str, str]:
    """Return the lines of the time, and of the price, by a rate that was given or a usual one."""
    if forecast is None:
        better = f"{RATE_FROM} a small finished run says, or {RATES}"
        return {} if work == Work() else {"time": f"unknown on this engine: {better}"}
    lines = forecast.lines()
    if not is_given:
        lines["time"] += f" on two CPU cores, at most; {RATE_FROM} a finished run knows better"
    return lines


EMPTY = {
    "refuse": "an error in the file (data.empty: refuse)",
    "skip": "left out (data.empty: skip)",
}

UNSAID = "nothing about the texts"


def _plan_one(loaded: Config, speed: Speed, as_json: bool) -> None:
    with progress_bar("planning") as on_progress:
        if loaded.engine.is_local and is_at_hand(loaded.engine.model):
            on_progress(Progress("finding the model"))
        made = dpray.plan(loaded)
        work = made.work
    forecast = speed.forecast(loaded, work)
    summary = made.summary()
    if as_json:
        tokens: Json = {"tokens": asdict(work)}
        if forecast is not None:
            tokens["forecast"] = asdict(forecast)
        typer.echo(json.dumps(summary | tokens))
        return
    console = Terminal()
    table = Table(title="Plan (no data was opened)", show_header=False, title_justify="left")
    table.add_row("guarantee", _guarantee(summary))
    table.add_row("a person", person_in_words(Guarantee.model_validate(summary)))
    table.add_row("method", summary["method"]["name"])
    for name, value in (_presets(summary) | made.lines()).items():
        table.add_row(name, value)
    if work != Work():
        table.add_row("tokens", work.describe(loaded))
    for name, value in _time(forecast, speed.is_given, work).items():
        table.add_row(name, value)
    table.add_row("empty texts", EMPTY[made.config.data.empty])
    rule = made.config.data.after
    table.add_row("rows", f"those with {rule}" if rule else "all of data.path")
    table.add_row("public in prompts", str(made.about) or UNSAID)
    if made.config.runtime.uses_ray:
        table.add_row("on Ray", _place_in_words(made.config))
    console.print(table)
    for mechanism in summary["mechanisms"]:
        words = _mechanism_in_words({"type": mechanism["name"]} | mechanism["parameters"])
        count, epsilon = mechanism["count"], mechanism["cost"]["epsilon_alone"]
        whose = "its" if count == 1 else "their"
        console.print(f"{count} x {words}: eps {epsilon:.4f} on {whose} own")
    for warning in summary["warnings"]:
        console.note("warning", "yellow", warning)


def _presets(summary: ReadOnlyJson) -> dict[str, str]:
    """Return the line of each method's preset, with the keys that it sets, if there is any."""
    words = [
        f"{of['preset']} of {name}: {json.dumps(of['keys'])[1:-1]}".replace('"', "")
        for name, of in summary.get("presets", {}).items()
    ]
    return {"preset": "\n".join(words)} if words else {}


def _mechanism_in_words(event: ReadOnlyJson) -> str:
    """Describe a mechanism, from its JSON form."""
    match event["type"]:
        case "parallel":
            parts = list(dict.fromkeys(map(_mechanism_in_words, event["events"])))
            return parts[0] if len(parts) == 1 else f"the most expensive of {' and '.join(parts)}"
        case "self_composed":
            return f"{event['count']} x {_mechanism_in_words(event['event'])}"
        case "composed":
            return f"({' and '.join(map(_mechanism_in_words, event['events']))})"
        case name:
            words = str(name).replace("_", " ")
            return re.sub("gaussian|laplace|poisson", lambda found: found[0].title(), words)


def _place_in_words(config: Config) -> str:
    """Return what a run asks of its cluster."""
    runtime = config.runtime
    needed = str(needs(config)) or "no CPU and no GPU"
    if runtime.gpus_per_actor is None and config.engine.is_local:
        needed += f" (and {config.engine.gpus} GPU an engine, if the cluster has GPUs)"
    if lacks_size(config):
        needed += " (without engine.model, whose size is not known here: runtime.memory_per_actor)"
    waits = f"waits for room for {needed}, {runtime.wait:g} s at most (runtime.wait)"
    return f"{waits}; uses room for {runtime.actors} (runtime.actors)"


def _guarantee(summary: Json) -> str:
    if summary["not_private"]:
        return "none: privacy.epsilon is infinite, no noise is added"
    return (
        f"({summary['epsilon']:.4f}, {summary['delta']:g})-DP by the "
        f"{summary['accountant']['bound']} bound, {add_or_remove(summary['privacy_unit'])}"
    )


def _compare(config: Config, write: str | None, as_json: bool) -> None:
    check_new(write)
    with progress_bar() as on_progress:
        comparison = dpray.compare(config, on_progress)
    summary = comparison.summary()
    best = comparison.recommended
    if write is not None and best is not None:
        write_config(write, comparison.tree(best))
    if as_json:
        typer.echo(json.dumps(summary))
        return
    _show_comparison(comparison, Terminal())
    written = "" if write is None else f", in {write}"
    none = "none: no method's signal stands above its noise"
    style = "yellow" if best is None else "green"
    Terminal().note("recommended", style, none if best is None else best + written)


def _show_comparison(comparison: Comparison, console: Terminal) -> None:
    privacy, size = comparison.config.privacy, comparison.config.data.public_size
    title = (
        f"{comparison.records:,} texts of {size:,} records at eps {privacy.epsilon:g}, delta "
        f"{privacy.delta:g} (no data was opened)"
    )
    columns = ("method", "texts", "LLM calls", "signal", "enough")
    rows = [_answer(name, answer) for name, answer in comparison.answers.items()]
    console.print(titled_table(title, columns, rows))
    for name, answer in comparison.answers.items():
        if answer.choice is None:
            console.note(name, "yellow", answer.why_not or "")
            continue
        if answer.choice.signal is not None:
            console.say(f"{name}: signal: {answer.choice.signal.meaning}")
        for reason in answer.choice.reasons:
            console.say(f"{name}: {reason}")


def _answer(name: str, answer: Chosen) -> list[str]:
    """Return a method's row of the comparison."""
    if answer.choice is None:
        return [name, "none", "", "", ""]
    summary, signal = answer.choice.plan.summary(), answer.choice.signal
    figures = ["?", "?"] if signal is None else [f"{signal.value:,.3g}", f"{signal.enough:,g}"]
    return [name, f"{summary['records']:,}", f"{summary['llm_calls']:,}", *figures]


def check_new(write: str | None) -> None:
    """Raise InputError if the file exists, before the work instead of after it."""
    if write is not None and Path(write).exists():
        raise InputError(f"--write: {write} is there already")


def write_config(file: str, tree: Json) -> None:
    """Write a configuration to a new file."""
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(dump_yaml(tree))
    except OSError as error:
        raise InputError(f"--write: {file} cannot be written: {error.strerror}") from None

"""`dpray demo` runs private prediction on packaged texts and evaluates the result."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

import dpray
from dpray.commands.plan import AsJson
from dpray.commands.run import has_finished, present_account, run_with_progress, show_run
from dpray.config.config import Config
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.io.files import read_json, refuse_cloud, write_durably
from dpray.io.records import read_rows
from dpray.methods.config import load_config
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.report.page import write_report
from dpray.report.tables import plus_minus
from dpray.runs.privacy_report import parse_report
from dpray.terminal import Terminal, printable, titled_table
from dpray.types import Json

EVALUATED = 600
"""Private texts, and test texts, in the evaluation: a laptop embeds them in seconds."""

Labelled = list[tuple[str, str]]


@dataclass(frozen=True)
class Demo:
    """The file of a demo's configuration, the folders of its texts and of its model (None if the
    configuration names the model), and a description."""

    config: str
    texts: str
    model: str | None
    description: str


DEMOS = {
    "packaged": Demo(
        "demo.yaml", "data", "model", "fictional clinic notes, a small packaged model"
    ),
    "smollm2": Demo(
        "messages.yaml",
        "messages",
        None,
        "real messages of a bank's customers (BANKING77, CC BY 4.0), SmolLM2-135M-Instruct, "
        "about ten minutes on two cores",
    ),
}


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="The demo's folder; by default out/demo or out/demo-smollm2."),
    ] = None,
    model: Annotated[
        Literal["packaged", "smollm2"],
        typer.Option(help="smollm2 writes real English, and takes longer."),
    ] = "packaged",
    as_json: AsJson = False,
) -> None:
    """Run private prediction on packaged, fictional clinic notes: a few minutes on a laptop.

    With `--model smollm2` a larger model writes messages of a bank's customers, from real ones.
    """
    chosen = DEMOS[model]
    out = out or Path("out/demo" if chosen.model else f"out/demo-{model}")
    refuse_cloud(out, "--out")
    folder = Path(str(resources.files("dpray.demo")))
    config = demo_config(folder, out, chosen)
    console = Terminal(stderr=as_json)
    console.note(
        "dpray demo",
        "bold",
        f"{config.data.public_size} {chosen.description}, engine {config.engine.kind}. "
        "They stand in for private data.",
    )
    before = has_finished(config)
    report = run_with_progress(config, as_json)
    evaluation = _evaluation(config, folder / chosen.texts, out)
    _, private_page = write_report(out, public=False)
    if as_json:
        typer.echo(json.dumps(report | {"output": str(out), "evaluation": evaluation}))
        return
    _show_records(out, console)
    account = present_account(config)
    show_run(parse_report(report), out, console, account, finished_before=before)
    _show_use(evaluation, console)
    console.plain(
        f"The page with the evaluation; do not share it if the data is real: {private_page}"
    )


def demo_config(folder: Path, out: Path, chosen: Demo) -> Config:
    """Return the packaged configuration with this machine's engine and paths."""
    kind = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    places = {
        "data.path": folder / chosen.texts / "private.jsonl",
        "engine.kind": kind,
        "privacy.ledger": f"sqlite:///{out.absolute()}/private/ledger.db",
        "output.path": out,
    }
    if chosen.model is not None:
        places["engine.model"] = folder / chosen.model
    return load_config(folder / chosen.config, [f"{key}={value}" for key, value in places.items()])


def _evaluation(config: Config, texts: Path, out: Path) -> dict[str, object]:
    """Evaluate the synthetic texts; the floor are texts of the model without private ones."""
    path = out / "private" / "evaluation.json"
    if path.exists():
        return read_json(path)
    from dpray.evaluation.evaluate import evaluate

    result = evaluate(
        _labelled(texts / "test.jsonl")[:EVALUATED],
        _labelled(out / "synthetic.jsonl"),
        SentenceTransformerEmbedder(config.embedder.model),
        train=_labelled(texts / "private.jsonl")[:EVALUATED],
        floor=_floor(config),
    )
    write_durably(path, json.dumps(result, indent=2) + "\n", private=True)
    return result


def _floor(config: Config) -> Labelled:
    """Make `max_records` texts from the public prompts only."""
    assert isinstance(config.method, PrivatePredictionSettings)
    shown = dpray.preview(config, records=config.method.max_records or len(config.data.labels))
    return [(each["text"], each["label"]) for each in shown["texts"] if each["text"]]


def _labelled(path: Path) -> Labelled:
    return [(str(row["text"]), str(row["label"])) for _, row in read_rows(str(path))]


def _show_records(out: Path, console: Terminal) -> None:
    shown: defaultdict[str, list[str]] = defaultdict(list)
    for text, label in _labelled(out / "synthetic.jsonl"):
        shown[label].append(text)
    for label, texts in shown.items():
        for text in texts[:2]:
            name = Text(printable(str(label)), "bold")
            console.say(name, text, sep=": ", highlight=False)
    console.print()


def _show_use(evaluation: Json, console: Terminal) -> None:
    names = {
        "ceiling": "the private texts themselves",
        "synthetic": "the synthetic texts",
        "floor": "what the model writes without private texts",
    }
    accuracies = {key: evaluation["downstream"][key]["accuracy"] for key in names}
    rows = [(names[key], plus_minus(found, 3)) for key, found in accuracies.items()]
    title = "Accuracy of a classifier on real test texts"
    console.print(titled_table(title, ("trained on", "accuracy"), rows))

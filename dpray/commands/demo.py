"""`dpray demo` runs private prediction on packaged notes and evaluates the result."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from dpray.commands.plan import AsJson
from dpray.commands.run import run_with_progress, show_run
from dpray.config.config import Config, load_config
from dpray.io.files import read_json, refuse_cloud, write_durably
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.report.figures import plus_minus
from dpray.terminal import Terminal, printable, titled_table

# Texts per label that are made from the public prompt alone: as many in all as the run makes.
FLOOR_RECORDS = 75

# Private and test notes that the evaluation reads, so that a laptop embeds them in seconds.
EVALUATED = 600

Labelled = list[tuple[str, str]]


def demo(
    out: Annotated[Path, typer.Option(help="The demo's folder.")] = Path("out/demo"),
    as_json: AsJson = False,
) -> None:
    """Run private prediction on packaged, fictional clinic notes: a few minutes on a laptop."""
    refuse_cloud(out, "--out")
    folder = Path(str(resources.files("dpray.demo")))
    config = demo_config(folder, out)
    console = Terminal(stderr=as_json)
    console.note(
        "dpray demo",
        "bold",
        f"{config.data.public_size} fictional clinic notes, a small packaged model, engine "
        f"{config.engine.kind}. The notes play the private data.",
    )
    report = run_with_progress(config)
    evaluation = _evaluation(config, folder, out)
    from dpray.report.write import write_report

    _, private_page = write_report(out, public=False)
    if as_json:
        typer.echo(json.dumps(report | {"output": str(out), "evaluation": evaluation}))
        return
    _show_records(out, console)
    show_run(report, out, console)
    _show_use(evaluation, console)
    console.print(
        f"The page with the evaluation, not for release where the data is real: {private_page}",
        highlight=False,
        soft_wrap=True,
    )


def demo_config(folder: Path, out: Path) -> Config:
    """Return the packaged configuration with this machine's engine and paths."""
    kind = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    places = {
        "data.path": folder / "data" / "private.jsonl",
        "engine.model": folder / "model",
        "engine.kind": kind,
        "privacy.ledger": f"sqlite:///{out.absolute()}/private/ledger.db",
        "output.path": out,
    }
    return load_config(folder / "demo.yaml", [f"{key}={value}" for key, value in places.items()])


def _evaluation(config: Config, folder: Path, out: Path) -> dict[str, Any]:
    """Evaluate the synthetic notes beside real ones and the model's without private notes."""
    path = out / "private" / "evaluation.json"
    if path.exists():
        return read_json(path)
    from dpray.engines.embedder import SentenceTransformerEmbedder
    from dpray.evaluation.evaluate import evaluate

    result = evaluate(
        _labelled(folder / "data" / "test.jsonl")[:EVALUATED],
        _labelled(out / "synthetic.jsonl"),
        SentenceTransformerEmbedder(config.embedder.model),
        train=_labelled(folder / "data" / "private.jsonl")[:EVALUATED],
        floor=_floor(config),
    )
    write_durably(path, json.dumps(result, indent=2) + "\n", private=True)
    return result


def _floor(config: Config) -> Labelled:
    from dpray.engines.base import Sampling
    from dpray.engines.transformers import TransformersEngine
    from dpray.methods.private_prediction.prompts import load_template

    assert isinstance(config.method, PrivatePredictionSettings)
    template = load_template(config.method.template)
    labels = [label for label in config.data.labels for _ in range(FLOOR_RECORDS)]
    prompts = [template.public_prompt(label) for label in labels]
    sampling = Sampling(max_tokens=config.method.max_tokens)
    with closing(TransformersEngine(config.engine)) as engine:
        made = engine.generate(prompts, [sampling] * len(prompts))
    texts = [(template.released(c.text), label) for c, label in zip(made, labels, strict=True)]
    return [(text, label) for text, label in texts if text]


def _labelled(path: Path) -> Labelled:
    from dpray.io.records import read_rows

    return [(row["text"], row["label"]) for _, row in read_rows(str(path))]


def _show_records(out: Path, console: Terminal) -> None:
    shown: defaultdict[str, list[str]] = defaultdict(list)
    for text, label in _labelled(out / "synthetic.jsonl"):
        shown[label].append(text)
    for label, texts in shown.items():
        for text in texts[:2]:
            name = Text(printable(str(label)), "bold")
            console.print(name, text, sep=": ", highlight=False, soft_wrap=True)
    console.print()


def _show_use(evaluation: dict[str, Any], console: Terminal) -> None:
    names = {
        "ceiling": "the private notes themselves",
        "synthetic": "the synthetic notes",
        "floor": "what the model writes without private notes",
    }
    accuracies = {key: evaluation["downstream"][key]["accuracy"] for key in names}
    rows = [(names[key], plus_minus(found, 3)) for key, found in accuracies.items()]
    title = "A classifier of real test notes, by what trained it"
    console.print(titled_table(title, ("trained on", "accuracy"), rows))

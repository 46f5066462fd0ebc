"""The pages of a run (its privacy report), of a ledger and of a rehearsal.

Each is one HTML file that needs no network and no script.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpray.io.columns import text_of
from dpray.io.files import read_json, write_durably
from dpray.io.languages import code_of
from dpray.io.records import read_rows
from dpray.report import pictures
from dpray.report.answers import answers_of
from dpray.report.tables import SYNTHETIC, bound, evaluation_tables, number
from dpray.runs.privacy_report import REPORT, PrivacyReport, read_report
from dpray.types import InputError, Json, ReadOnlyJson, valid_unicode

PAGE = "privacy_report.html"

RUNS_SHOWN = 200
"""The table of a data set on a ledger's page lists only this many last runs; its chart has all."""

SAMPLES = 20
SAMPLES_PER_LABEL = 5

# The page shows these sections of the resolved configuration. The others have paths and addresses,
# and the report itself has `privacy`.
CONFIG_SECTIONS = ("data", "method", "engine", "embedder")
CONFIG_PLACES = frozenset({"path", "api_key", "base_url"})


def write_report(run_dir: Path, public: bool) -> tuple[Path, Path | None]:
    """Write the public page of a run. If the run was evaluated, and unless `public`, also write a
    page with the evaluation into the folder's `private`. Return the path of each, or None.

    Raises InputError if the folder is not that of a finished run.
    """
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: no such folder")
    report = read_report(run_dir / REPORT)
    samples = _samples(run_dir / "synthetic.jsonl")
    run = read_json(run_dir / "run.json")

    path = run_dir / PAGE
    page = render_report(report, samples, None, run, public=True)
    path.write_text(valid_unicode(page), encoding="utf-8")

    evaluation_path = run_dir / "private" / "evaluation.json"
    if public or not evaluation_path.exists():
        return path, None
    evaluation = read_json(evaluation_path)
    page = render_report(report, samples, evaluation, run, public=False)
    private_path = evaluation_path.with_suffix(".html")
    write_durably(private_path, valid_unicode(page), private=True)
    return path, private_path


def render_report(
    report: PrivacyReport,
    samples: Sequence[Mapping[str, object]],
    evaluation: Mapping[str, object] | None,
    run: ReadOnlyJson,
    public: bool,
) -> str:
    """Return the page of a run.

    `run` and `evaluation` (or None) are the contents of the JSON files with these names; `samples`
    are synthetic records (`text`, `label`, other public fields). The numbers of `evaluation` are
    computed from private data. They are in a part of their own, between BEGIN PRIVATE and END
    PRIVATE, which a `public` page does not have. A public page does not show the iterations of a
    run that is not private, because their counts have no noise.

    Raises InputError for files in the format of another version of dpray.
    """
    template = templates().get_template("report.html.j2")
    try:
        return template.render(
            **_values(report, public),
            samples=samples,
            evaluation=None if public else evaluation,
            tables={} if public else evaluation_tables(evaluation or {}),
            synthetic_row=SYNTHETIC,
            made_on=str(run.get("created", ""))[:10],
            language=code_of(run.get("config", {}).get("data", {}).get("language")),
            config=_shown_config(run.get("config", {}), report.method),
        )
    except Exception as error:
        # The error's message may hold a value.
        raise InputError(
            "evaluation.json, run.json: not as this version of dpray writes "
            f"them ({type(error).__name__})"
        ) from None


def _values(report: PrivacyReport, public: bool) -> dict[str, object]:
    """Return the values that the template shows of a privacy report."""
    methods = {method["name"]: method for method in report.methods}
    return {
        "report": report,
        "answers": answers_of(report),
        "ledger": report.ledger,
        "batch_kind": methods.get("private_prediction", {}).get("batches"),
        "selection": methods.get("aug_pe", {}).get("selection", "rank"),
        "iterations": None if public and report.not_private else report.iterations,
        "pictures": pictures,
    }


def render_ledger(shown: Mapping[str, object], made_at: str) -> str:
    """Return the page of all budgets of a ledger. `shown` is the result of `Ledger.show`; `made_at`
    is the time of the page, in UTC and ISO 8601, and the end of its charts."""
    page = templates().get_template("ledger.html.j2")
    return page.render(**shown, made_at=made_at, pictures=pictures, runs_shown=RUNS_SHOWN)


def write_rehearsal(folder: Path, summary: Mapping[str, object]) -> None:
    """Write `rehearsal.json` and `rehearsal.html`, from the summary of a `Rehearsal`."""
    write_durably(folder / "rehearsal.json", json.dumps(summary, indent=2) + "\n")
    write_durably(folder / "rehearsal.html", render_rehearsal(summary))


def render_rehearsal(summary: ReadOnlyJson) -> str:
    """Return the page of a rehearsal, with the curve of each method over epsilon."""
    measure = summary["score"]
    curves: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for tried in summary["epsilons"]:
        for name, method in tried["methods"].items():
            if method["scores"] is not None:
                score = method["scores"][measure]
                curves[name].append((tried["epsilon"], score["mean"], score["deviation"]))
    real = summary["real_records"][measure]["mean"]
    picture = pictures.curves_svg(curves, real) if curves else None
    return templates().get_template("rehearsal.html.j2").render(**summary, picture=picture)


def templates() -> Environment:
    """Return the templates, in which a missing value is an error, and HTML is escaped."""
    environment = Environment(
        loader=PackageLoader("dpray.report", "templates"),
        autoescape=lambda name: name is None or ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `words` makes `noise multiplier` of the key `noise_multiplier`.
    environment.filters |= {
        "number": number,
        "bound": bound,
        "json": json.dumps,
        "words": lambda key: key.replace("_", " "),
        # In code, within a cell of a Markdown table.
        # Quotes stay: Markdown has no need of entities for them.
        "markdown": lambda text: escape(text, quote=False),
        "cell": lambda text: " ".join(text.replace("`", "'").replace("|", "/").split()),
    }
    return environment


def _shown_config(config: ReadOnlyJson, method: ReadOnlyJson) -> dict[str, Json]:
    """Return the sections without places, with the method's resolved keys."""
    sections = {name: config[name] for name in CONFIG_SECTIONS if config.get(name)}
    return {
        name: {k: v for k, v in keys.items() if k not in CONFIG_PLACES}
        for name, keys in (sections | {"method": method}).items()
    }


def _samples(path: Path) -> list[dict[str, object]]:
    """Return the first records of each label, which take turns in the order of their names."""
    by_label: defaultdict[str, list[dict[str, object]]] = defaultdict(list)
    for where, row in read_rows(str(path)):
        text_of(row, "text", where)
        kept = by_label[str(row.get("label"))]
        if len(kept) < SAMPLES_PER_LABEL:
            kept.append(row)
    turns = zip_longest(*(rows for _, rows in sorted(by_label.items())))
    return [row for turn in turns for row in turn if row is not None][:SAMPLES]

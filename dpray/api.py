"""The command line only calls this Python API. Nothing here prints or exits.

Every function raises `InputError` for bad input, naming the key or the row, `BudgetRefused` where
the ledger refuses a charge, and `Resumable` for a run that the same call goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpray.extras import require
from dpray.io.files import read_json
from dpray.types import InputError, OnProgress

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import ray.data

    from dpray.config.config import Config
    from dpray.engines.base import Engine
    from dpray.planning.compare import Comparison
    from dpray.planning.pace import Pace
    from dpray.planning.rehearse import Rehearsal
    from dpray.runs.plan import Plan

# Imports within a function here load torch, Ray or scikit-learn, for which the other functions
# should not have to wait.


def load(path: str | Path, *overrides: str) -> Config:
    """Read a configuration from a YAML file, with `key.sub=value` overrides.

    config = dpray.load("notes.yaml", "privacy.epsilon=2", "output.path=out/eps2")
    """
    from dpray.config.config import load_config

    return load_config(path, list(overrides))


def plan(config: Config) -> Plan:
    """Return the plan of a run of `config`: what it makes and costs. Opens no data.

    planned = dpray.plan(config)
    planned.cost.epsilon, planned.summary()["records"]
    """
    from dpray.registry import make_plan

    return make_plan(config)


def check(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    *,
    write: bool = False,
) -> dict[str, Any]:
    """Read all rows as a run of `config` will, for their owner alone: errors by row, types,
    lengths, labels, texts that will be cut, and keys to set. Charges nothing.

    The counts are exact and NOT private. With `write` they go into `private/check.json` in the
    output folder, too.

    found = dpray.check(config)
    found["refused"], found["errors"], found["proposals"]
    """
    from dpray.io.files import make_private, write_durably
    from dpray.row_check import check_rows

    found = check_rows(config, on_progress)
    if write:
        folder = Path(config.output.path) / "private"
        try:
            make_private(folder)
            text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
            write_durably(folder / "check.json", text, private=True)
        except OSError as error:
            raise InputError(f"output.path: {folder}: {error.strerror}") from None
    return found


def compare(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    *,
    public: str | Path | None = None,
    **sizes: int,
) -> Comparison:
    """Ask every method, and the configured chains, for as many texts at the same epsilon, and
    recommend one. Opens no data.

    With `public`, a file of records of the same shape, short runs measure how long each method
    takes here (`bench`), and the answers say so; `sizes` are `records` and `texts` of these runs.

    compared = dpray.compare(config)
    compared.recommended, compared.summary()["methods"]["aug_pe"]["signal"]
    """
    from dpray.planning.compare import compare as compare_methods
    from dpray.planning.compare import with_paces

    compared = compare_methods(config, on_progress)
    if public is not None:
        return with_paces(compared, str(public), on_progress, **sizes)
    if sizes:
        raise InputError(f"{', '.join(sizes)}: are for short runs, on `public` records")
    return compared


def explore(
    config: Config,
    page: str | Path,
    on_progress: OnProgress = lambda progress: None,
    *,
    epsilons: Sequence[float] = (),
    rehearsal: str | Path | None = None,
    rate: float | None = None,
) -> dict[str, Any]:
    """Compare the methods at several epsilons, by default a quarter to four times
    `privacy.epsilon` and those of the `rehearsal`, and write one HTML page with the curves. Opens
    no data. `rehearsal` is the folder of one, whose scores are drawn; an hour costs `rate`.

    explored = dpray.explore(config, "methods.html", rehearsal="out/rehearsal")
    explored["epsilons"][0]["epsilon"], explored["epsilons"][0]["recommended"]
    """
    from dpray.io.files import check_writable, write_durably
    from dpray.planning.compare import explore as explore_methods
    from dpray.planning.compare import ladder
    from dpray.report.comparison_page import read_rehearsal, render_comparison, scored_epsilons

    check_writable(Path(page), "--html")
    rehearsed = None if rehearsal is None else read_rehearsal(Path(rehearsal))
    if not epsilons:
        epsilons = [*ladder(config), *(scored_epsilons(rehearsed) if rehearsed else ())]
    explored = explore_methods(config, epsilons, on_progress).summary(rate)
    Path(page).parent.mkdir(parents=True, exist_ok=True)
    write_durably(Path(page), render_comparison(explored, rehearsed))
    return explored


def rehearse(
    config: Config,
    public: str | Path,
    out: str | Path,
    on_progress: OnProgress = lambda progress: None,
    **options: Any,
) -> Rehearsal:
    """Try the methods out on public records of the same shape, with true noise, and score them:
    opens no private data, charges no budget. The folder `out` holds the runs, `rehearsal.json` and
    `rehearsal.html`. `options` are those of `dpray.planning.rehearse.rehearse`.

    rehearsed = dpray.rehearse(config, "public.jsonl", "out/rehearsal", epsilons=[1.0, 4.0])
    rehearsed.best(1.0), rehearsed.summary()["epsilons"][0]["methods"]["aug_pe"]["scores"]
    """
    from dpray.evaluation.files import load_embedder
    from dpray.planning.rehearse import rehearse as rehearse_methods
    from dpray.report.rehearsal_page import write_rehearsal

    parts: dict[str, Any] = {"run": run, "load_embedder": load_embedder} | options
    rehearsed = rehearse_methods(
        config, str(public), out=Path(out), on_progress=on_progress, **parts
    )
    write_rehearsal(Path(out), rehearsed.summary())
    return rehearsed


def bench(
    config: Config,
    public: str | Path,
    on_progress: OnProgress = lambda progress: None,
    **options: Any,
) -> Pace:
    """Measure how long a configuration takes on this machine, by three short runs on public records
    of the same shape: opens no private data, charges no budget. `dpray plan` shows it from then
    on. `options` are those of `dpray.planning.pace.bench`. All methods at once: `compare` with
    `public`.

    pace = dpray.bench(config, "public.jsonl")
    pace.seconds(dpray.plan(config)) / 3600
    """
    from dpray.planning.pace import bench as measure_pace

    return measure_pace(config, str(public), on_progress=on_progress, **options)


def run(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    build: Callable[..., Engine] | None = None,
) -> SyntheticData:
    """Charge the ledger and make synthetic records, or go on with an unfinished run.

    `build` makes an engine from a section of the configuration in the place of `build_engine`.

    with dpray.progress_bar() as show:
        synthetic = dpray.run(config, on_progress=show)
    synthetic.to_pandas()
    """
    from dpray import registry
    from dpray.report.write import write_report
    from dpray.runs.standing import Standing
    from dpray.workers.engine import build_engine

    registry.run(config, on_progress, build or build_engine)
    folder = Path(config.output.path)
    with Standing(config).said():
        write_report(folder, public=True)
    return SyntheticData(folder)


def evaluate(
    real: str | Path,
    synthetic: str | Path,
    out: str | Path | None = None,
    on_progress: OnProgress = lambda progress: None,
    **settings: Any,
) -> dict[str, Any]:
    """Measure synthetic records against real ones, and write `evaluation.json` into the folder
    `out`. The result is NOT private. `settings` are the keys of `EvaluationSettings`, the options
    of `dpray evaluate`.

    measured = dpray.evaluate("test.jsonl", "out/run", out="out/run/private", seeds=3)
    measured["fidelity"]["measures"]["mauve"]
    """
    from dpray.config.loading import parse
    from dpray.evaluation.settings import EvaluationSettings

    settings |= {"real": real, "synthetic": synthetic}
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in settings.items()}
    parsed = parse(EvaluationSettings, plain | {"out": out})
    require("dpray evaluate", "torch", "sentence_transformers", "jsonschema", extra="eval")
    # Imported after a wrong key was found.
    from dpray.evaluation.files import evaluate_files

    return evaluate_files(parsed, on_progress)


def audit(
    config: Config, on_progress: OnProgress = lambda progress: None, **options: Any
) -> dict[str, Any]:
    """Bound the epsilon of a configuration's mechanisms from below by their real code; opens no
    data, unless asked to. `options` are those of `dpray.auditing.audit.audit`.

    found = dpray.audit(config, trials=2000)
    found["holds"]
    """
    from dpray.auditing.audit import audit as audit_config

    return audit_config(config, run=run, on_progress=on_progress, **options)


@dataclass(frozen=True)
class SyntheticData:
    """A `SyntheticData` is the release in a finished run's folder: its records and privacy report.

    synthetic = dpray.SyntheticData("out/run")
    synthetic.records[0], synthetic.report["epsilon"]
    """

    folder: Path
    report: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        object.__setattr__(self, "report", read_json(self.folder / "privacy_report.json"))

    @property
    def path(self) -> Path:
        """Return the file of the records: JSON lines with `text`, `label` and public metadata."""
        return self.folder / "synthetic.jsonl"

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records."""
        with open(self.path, encoding="utf-8") as lines:
            return list(map(json.loads, lines))

    def to_pandas(self) -> pd.DataFrame:
        """Return the records as a data frame."""
        import pandas as pd

        return pd.DataFrame(self.records)

    def to_ray(self) -> ray.data.Dataset:
        """Return the records as a Ray Dataset. Raises InputError for labels of several types."""
        import pyarrow as pa
        import ray.data

        return ray.data.from_arrow(pa.Table.from_pylist(self._of_one_type("to_ray")))

    def to_datasets(self) -> datasets.Dataset:
        """Return the records as a Dataset of Hugging Face. Raises InputError without `datasets`,
        and for labels of several types."""
        try:
            import datasets
        except ImportError:
            raise InputError("to_datasets: needs the package `datasets`") from None
        return datasets.Dataset.from_list(self._of_one_type("to_datasets"))

    def _of_one_type(self, asked: str) -> list[dict[str, Any]]:
        """Return the records for a table of Arrow, which would make 0 of false, or 1.0 of 1."""
        records = self.records
        if len({type(record["label"]) for record in records}) > 1:
            raise InputError(
                f"{asked}: the labels are of several types, and a column of Arrow has one; "
                "`to_pandas` and `records` keep them"
            )
        return records

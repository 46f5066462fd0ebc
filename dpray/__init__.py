"""dpray: differentially private synthetic texts, on a laptop or a Ray cluster.

    import dpray

    config = dpray.load("notes.yaml", "privacy.epsilon=2")
    print(dpray.plan(config).cost.epsilon)
    synthetic = dpray.run(config)
    synthetic.to_pandas()

This is the Python API, which the command line calls, too. Nothing here prints or exits. Every
function raises `InputError` for bad input, which names the key or the row, `BudgetRefused` if the
ledger refuses a charge, and `Resumable` if the same call resumes the run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpray.synthetic_data import SyntheticData
from dpray.types import (
    Budget,
    BudgetRefused,
    DprayError,
    InputError,
    OnProgress,
    Progress,
    Resumable,
    no_progress,
)
from dpray.version import __version__

if TYPE_CHECKING:
    from dpray.config.config import Config
    from dpray.engines.base import Engine
    from dpray.evaluation.compare import Comparison
    from dpray.evaluation.rehearse import Rehearsal
    from dpray.ledger.ledger import Ledger
    from dpray.runs.plan import Plan
    from dpray.terminal import progress_bar

__all__ = [
    "Budget",
    "BudgetRefused",
    "Config",
    "DprayError",
    "InputError",
    "Ledger",
    "Progress",
    "Resumable",
    "SyntheticData",
    "__version__",
    "audit",
    "check",
    "compare",
    "evaluate",
    "load",
    "plan",
    "preview",
    "progress_bar",
    "rehearse",
    "run",
]

# Every function imports its modules itself: nobody waits for torch or Ray before they are used.


def load(path: str | Path, *overrides: str) -> Config:
    """Read a configuration from a YAML file, with `key.sub=value` overrides.

    config = dpray.load("notes.yaml", "privacy.epsilon=2", "output.path=out/eps2")
    """
    from dpray.methods.config import load_config

    return load_config(path, overrides)


def plan(config: Config) -> Plan:
    """Return the plan of `config`: the cost of a run, and what it will make. Opens no data.

    planned = dpray.plan(config)
    planned.cost.epsilon, planned.summary()["records"]
    """
    from dpray.methods.registry import make_plan

    return make_plan(config)


def preview(
    config: Config,
    on_progress: OnProgress = no_progress,
    *,
    records: int = 5,
    write: bool = False,
    build: Callable[..., Engine] | None = None,
) -> dict[str, Any]:
    """Return texts that the run's model writes by the public prompts alone, with their time and
    what to change. Opens no data and charges nothing. With `write`, they are also written to
    `floor.jsonl` in the output folder, as the floor of an evaluation.

        shown = dpray.preview(config, records=3)
        [each["text"] for each in shown["texts"]], shown["advice"]
    """
    from dpray.methods.registry import make_plan
    from dpray.runs.preview import preview as preview_texts
    from dpray.workers.engine import build_engine

    planned = make_plan(config)
    return preview_texts(planned, records, build or build_engine, on_progress, write)


def check(
    config: Config, on_progress: OnProgress = no_progress, *, write: bool = False
) -> dict[str, Any]:
    """Read all rows as a run of `config` will, for the owner of the data only. Charges nothing.

    The counts are exact and NOT private. With `write`, they are also written to
    `private/check.json` in the output folder.

        found = dpray.check(config)
        found["refused"], found["errors"], found["proposals"]
    """
    from dpray.evaluation.row_check import check_rows, write_check

    found = check_rows(config, on_progress)
    if write:
        write_check(config, found)
    return found


def compare(config: Config, on_progress: OnProgress = no_progress) -> Comparison:
    """Plan every method for the same number of texts at the same epsilon, and recommend one. Opens
    no data.

        compared = dpray.compare(config)
        compared.recommended, compared.summary()["methods"]["aug_pe"]["signal"]
    """
    from dpray.evaluation.compare import compare as compare_methods

    return compare_methods(config, on_progress)


def rehearse(
    config: Config,
    public: str | Path,
    out: str | Path,
    on_progress: OnProgress = no_progress,
    **options: Any,
) -> Rehearsal:
    """Try the methods on public records of the same shape, with true noise, and score them. Opens
    no private data and charges no budget. The folder `out` gets the runs, `rehearsal.json` and
    `rehearsal.html`. `options` are those of `dpray.evaluation.rehearse.rehearse`.

        rehearsed = dpray.rehearse(config, "public.jsonl", "out/rehearsal", epsilons=[1.0, 4.0])
        rehearsed.best(1.0)
    """
    from dpray.evaluation.files import load_embedder
    from dpray.evaluation.rehearse import rehearse as rehearse_methods
    from dpray.report.page import write_rehearsal

    parts: dict[str, Any] = {"run": run, "load_embedder": load_embedder} | options
    rehearsed = rehearse_methods(
        config, str(public), out=Path(out), on_progress=on_progress, **parts
    )
    write_rehearsal(Path(out), rehearsed.summary())
    return rehearsed


def run(
    config: Config,
    on_progress: OnProgress = no_progress,
    build: Callable[..., Engine] | None = None,
) -> SyntheticData:
    """Charge the ledger and make synthetic records, or resume an unfinished run. `build` makes an
    engine from a section of the configuration, in place of `build_engine`.

        with dpray.progress_bar() as show:
            synthetic = dpray.run(config, on_progress=show)
    """
    from dpray.methods import registry
    from dpray.report.bucket_copy import check_copy, copy_release
    from dpray.report.page import write_report
    from dpray.runs.failures import explain_charge
    from dpray.workers.engine import build_engine

    folder, bucket = Path(config.output.path), config.output.copy_to
    if bucket is not None:
        with explain_charge(config):
            check_copy(folder, bucket)
    registry.run(config, on_progress, build or build_engine)
    with explain_charge(config):
        write_report(folder, public=True)
        if bucket is not None:
            on_progress(Progress("copying the release"))
            copy_release(folder, bucket)
    return SyntheticData(folder)


def evaluate(
    real: str | Path,
    synthetic: str | Path,
    out: str | Path | None = None,
    on_progress: OnProgress = no_progress,
    **settings: Any,
) -> dict[str, Any]:
    """Measure synthetic records against real ones, and write `evaluation.json` into the folder
    `out`. The result is NOT private. `settings` are the keys of `EvaluationSettings`, the options
    of `dpray evaluate`.

        measured = dpray.evaluate("test.jsonl", "out/run", out="out/run/private", seeds=3)
        measured["fidelity"]["measures"]["mauve"]
    """
    from dpray.evaluation.settings import EvaluationSettings
    from dpray.extras import require
    from dpray.io.settings_file import parse

    settings |= {"real": real, "synthetic": synthetic}
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in settings.items()}
    parsed = parse(EvaluationSettings, plain | {"out": out})
    needed = ("torch", "sentence_transformers", "jsonschema", "phonenumbers")
    require("dpray evaluate", *needed, extra="eval")
    # Imported after a wrong key was found.
    from dpray.evaluation.files import evaluate_files

    return evaluate_files(parsed, on_progress)


def audit(config: Config, on_progress: OnProgress = no_progress, **options: Any) -> dict[str, Any]:
    """Bound the epsilon of a configuration's mechanisms from below, by draws from their real code.
    Opens no data unless asked to. `options` are those of `dpray.evaluation.audit.audit`.

        dpray.audit(config, trials=2000)["holds"]
    """
    from dpray.evaluation.audit import audit as audit_config

    return audit_config(config, run=run, on_progress=on_progress, **options)


_IMPORTED_LATE = {
    "Config": "dpray.config.config",
    "Ledger": "dpray.ledger.ledger",
    "progress_bar": "dpray.terminal",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_LATE:
        raise AttributeError(f"module 'dpray' has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_LATE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

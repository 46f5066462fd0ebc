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

from dpray.extras import Late, require
from dpray.synthetic_data import SyntheticData
from dpray.types import (
    Budget,
    BudgetRefused,
    DprayError,
    InputError,
    Json,
    OnProgress,
    Progress,
    Resumable,
    no_progress,
)
from dpray.version import __version__

if TYPE_CHECKING:
    from dpray.config.config import Config
    from dpray.engines.base import Engine
    from dpray.evaluation import audit as _audit
    from dpray.evaluation import compare as _compare
    from dpray.evaluation import files as _files
    from dpray.evaluation import rehearse as _rehearse
    from dpray.evaluation import row_check as _row_check
    from dpray.evaluation import settings as _settings
    from dpray.evaluation.compare import Comparison
    from dpray.evaluation.rehearse import Rehearsal
    from dpray.io import settings_file as _settings_file
    from dpray.ledger.ledger import Ledger
    from dpray.methods import config as _config
    from dpray.methods import registry as _registry
    from dpray.report import bucket_copy as _bucket_copy
    from dpray.report import page as _page
    from dpray.runs import failures as _failures
    from dpray.runs import preview as _preview
    from dpray.runs.plan import Plan
    from dpray.terminal import progress_bar
    from dpray.workers import engine as _engine
else:  # Nobody waits for torch or Ray before they are used.
    _audit, _compare, _files, _rehearse, _row_check, _settings = (
        Late(f"dpray.evaluation.{name}")
        for name in ("audit", "compare", "files", "rehearse", "row_check", "settings")
    )
    _config, _registry = Late("dpray.methods.config"), Late("dpray.methods.registry")
    _failures, _preview = Late("dpray.runs.failures"), Late("dpray.runs.preview")
    _engine, _page = Late("dpray.workers.engine"), Late("dpray.report.page")
    _bucket_copy = Late("dpray.report.bucket_copy")
    _settings_file = Late("dpray.io.settings_file")

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


def load(path: str | Path, *overrides: str) -> Config:
    """Read a configuration from a YAML file, with `key.sub=value` overrides.

    config = dpray.load("notes.yaml", "privacy.epsilon=2", "output.path=out/eps2")
    """
    return _config.load_config(path, overrides)


def plan(config: Config) -> Plan:
    """Return the plan of `config`: the cost of a run, and what it will make. Opens no data.

    planned = dpray.plan(config)
    planned.cost.epsilon, planned.summary()["records"]
    """
    return _registry.make_plan(config)


def preview(
    config: Config,
    on_progress: OnProgress = no_progress,
    *,
    records: int = 5,
    write: bool = False,
    build: Callable[..., Engine] | None = None,
) -> Json:
    """Return texts that the run's model writes by the public prompts alone, with their time and
    what to change. Opens no data and charges nothing. With `write`, they are also written to
    `floor.jsonl` in the output folder, as the floor of an evaluation.

        shown = dpray.preview(config, records=3)
        [each["text"] for each in shown["texts"]], shown["advice"]
    """
    planned = _registry.make_plan(config)
    build = build or _engine.build_engine
    return _preview.preview(planned, records, build, on_progress, write)


def check(config: Config, on_progress: OnProgress = no_progress, *, write: bool = False) -> Json:
    """Read all rows as a run of `config` will, for the owner of the data only. Charges nothing.

    The counts are exact and NOT private. With `write`, they are also written to
    `private/check.json` in the output folder.

        found = dpray.check(config)
        found["refused"], found["errors"], found["proposals"]
    """
    found = _row_check.check_rows(config, on_progress)
    if write:
        _row_check.write_check(config, found)
    return found


def compare(config: Config, on_progress: OnProgress = no_progress) -> Comparison:
    """Plan every method for the same number of texts at the same epsilon, and recommend one. Opens
    no data.

        compared = dpray.compare(config)
        compared.recommended, compared.summary()["methods"]["aug_pe"]["signal"]
    """
    return _compare.compare(config, on_progress)


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
    parts: dict[str, Any] = {"run": run, "load_embedder": _files.load_embedder} | options
    rehearsed = _rehearse.rehearse(
        config, str(public), out=Path(out), on_progress=on_progress, **parts
    )
    _page.write_rehearsal(Path(out), rehearsed.summary())
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
    folder, bucket = Path(config.output.path), config.output.copy_to
    if bucket is not None:
        with _failures.explain_charge(config):
            _bucket_copy.check_copy(folder, bucket)
    _registry.run(config, on_progress, build or _engine.build_engine)
    with _failures.explain_charge(config):
        _page.write_report(folder, public=True)
        if bucket is not None:
            on_progress(Progress("copying the release"))
            _bucket_copy.copy_release(folder, bucket)
    return SyntheticData(folder)


def evaluate(
    real: str | Path,
    synthetic: str | Path,
    out: str | Path | None = None,
    on_progress: OnProgress = no_progress,
    **settings: Any,
) -> Json:
    """Measure synthetic records against real ones, and write `evaluation.json` into the folder
    `out`. The result is NOT private. `settings` are the keys of `EvaluationSettings`, the options
    of `dpray evaluate`.

        measured = dpray.evaluate("test.jsonl", "out/run", out="out/run/private", seeds=3)
        measured["fidelity"]["measures"]["mauve"]
    """
    settings |= {"real": real, "synthetic": synthetic}
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in settings.items()}
    parsed = _settings_file.parse(_settings.EvaluationSettings, plain | {"out": out})
    needed = ("torch", "sentence_transformers", "jsonschema", "phonenumbers")
    require("dpray evaluate", *needed, extra="eval")
    return _files.evaluate_files(parsed, on_progress)


def audit(config: Config, on_progress: OnProgress = no_progress, **options: Any) -> Json:
    """Bound the epsilon of a configuration's mechanisms from below, by draws from their real code.
    Opens no data unless asked to. `options` are those of `dpray.evaluation.audit.audit`.

        dpray.audit(config, trials=2000)["holds"]
    """
    return _audit.audit(config, run=run, on_progress=on_progress, **options)


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

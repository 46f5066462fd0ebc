"""The methods by their names in the configuration: each one's folder holds its plan and release.

A method is imported when it is asked for: a plan needs no other method, and neither torch nor Ray.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from dpray.config.config import Config
from dpray.engines.model_path import check_model_path
from dpray.io.records import list_files
from dpray.runs.engine import BuildEngine, build_engine
from dpray.runs.plan import Plan

if TYPE_CHECKING:
    from dpray.runs.runner import OnProgress

RUNS = {
    "private_prediction": "PrivatePredictionRun",
    "aug_pe": "AugPeRun",
    "dp_kps": "DpKpsRun",
    "dp_sgd": "DpSgdRun",
}


def make_plan(config: Config) -> Plan:
    """Resolve everything that is null. Raises InputError where the keys together cost more than
    `privacy.epsilon`."""
    name = config.method.name
    plan: Plan = resolve_name(f"dpray.methods.{name}.plan:make_{name}_plan")(config)
    return plan


def run(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    build: BuildEngine = build_engine,
) -> dict[str, Any]:
    """Run or resume `config`; returns the privacy report that it wrote. `build` makes the engine of
    a section of the configuration, here or on an actor.

    Raises InputError (2), BudgetRefused (3: the data was not opened), Resumable (4).
    """
    from dpray.runs.cluster import is_local
    from dpray.runs.folder import ReleaseFolder

    list_files(config.data.path)
    if is_local(config) and config.engine.is_local:
        check_model_path(config.engine.model)
    plan = make_plan(config)
    name = config.method.name
    make_run = resolve_name(f"dpray.methods.{name}.release:{RUNS[name]}")
    with ReleaseFolder(config.output.path) as folder:
        report: dict[str, Any] = make_run(plan, folder, on_progress, build).execute()
        return report

"""The plan and the run of each method, by its name in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpray.config.config import Config
from dpray.engines.model_path import check_model_path
from dpray.io.records import list_files
from dpray.methods.aug_pe.plan import make_aug_pe_plan
from dpray.methods.aug_pe.release import AugPeRun
from dpray.methods.dp_kps.plan import make_dp_kps_plan
from dpray.methods.dp_kps.release import DpKpsRun
from dpray.methods.dp_sgd.plan import make_dp_sgd_plan
from dpray.methods.dp_sgd.release import DpSgdRun
from dpray.methods.private_prediction.plan import make_private_prediction_plan
from dpray.methods.private_prediction.release import PrivatePredictionRun
from dpray.runs.cluster import is_local
from dpray.runs.engine import BuildEngine, build_engine
from dpray.runs.folder import ReleaseFolder
from dpray.runs.plan import Plan
from dpray.runs.runner import OnProgress, Run

PLANS: dict[str, Callable[[Config], Plan]] = {
    "private_prediction": make_private_prediction_plan,
    "aug_pe": make_aug_pe_plan,
    "dp_kps": make_dp_kps_plan,
    "dp_sgd": make_dp_sgd_plan,
}
RUNS: dict[str, Callable[[Any, ReleaseFolder, OnProgress, BuildEngine], Run[Any]]] = {
    "private_prediction": PrivatePredictionRun,
    "aug_pe": AugPeRun,
    "dp_kps": DpKpsRun,
    "dp_sgd": DpSgdRun,
}


def make_plan(config: Config) -> Plan:
    """Resolve everything that is null. Raises InputError where the keys together cost more than
    `privacy.epsilon`."""
    return PLANS[config.method.name](config)


def run(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    build: BuildEngine = build_engine,
) -> dict[str, Any]:
    """Run or resume `config`; returns the privacy report that it wrote. `build` makes the engine of
    a section of the configuration, here or on an actor.

    Raises InputError (2), BudgetRefused (3: the data was not opened), Resumable (4).
    """
    list_files(config.data.path)
    if is_local(config) and config.engine.kind in ("vllm", "transformers"):
        check_model_path(config.engine.model)
    plan = make_plan(config)
    with ReleaseFolder(config.output.path) as folder:
        return RUNS[config.method.name](plan, folder, on_progress, build).execute()

"""The registry finds the plan and the release of a method by the method's name."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from dpray.config.config import Config, DataConfig
from dpray.engines.model_path import resolve_model
from dpray.extras import Late, require
from dpray.io.bucket import pinned, without_pin
from dpray.io.file_list import list_files
from dpray.io.files import read_json
from dpray.methods import load_module
from dpray.runs.folder import CONFIG, MODEL, ReleaseFolder
from dpray.runs.plan import Choice, LossesOf, Plan
from dpray.types import InputError, Json, OnProgress, Progress
from dpray.workers.engine import BuildEngine, build_engine

if TYPE_CHECKING:
    from dpray.io import snapshot
    from dpray.runs import failures, runner
    from dpray.workers import cluster
else:  # A plan does not wait for Ray and SQLAlchemy.
    snapshot = Late("dpray.io.snapshot")
    failures, runner = Late("dpray.runs.failures"), Late("dpray.runs.runner")
    cluster = Late("dpray.workers.cluster")

NEEDS = {
    "private_prediction": ("torch",),
    "aug_pe": ("torch", "sentence_transformers"),
    "dp_sgd": ("deepspeed", "peft", "torch"),
}
"""The optional modules that a run of a method imports with any engine. A plan needs none."""


def make_plan(config: Config) -> Plan:
    """Return the plan, with every null resolved. Raises InputError if the keys together cost more
    than `privacy.epsilon`."""
    _check_chosen(config)
    plan: Plan = load_module(config.method.name, "plan").make_plan(config, config.method)
    return plan


def choose(config: Config, records: int) -> Choice:
    """Choose the free parameters of the method for this number of records. Raises InputError if the
    method has no plan."""
    name = config.method.name
    module = load_module(name, "choice" if name == "private_prediction" else "plan")
    chosen: Choice = module.choose(config, config.method, records)
    return chosen


def released_losses(plan: Plan, folder: Path) -> LossesOf | None:
    """Return the losses by the model that the run in `folder` released, or None if the method
    releases texts only."""
    if plan.settings.name != "dp_sgd":
        return None
    model = load_module("dp_sgd", "audit")
    losses: LossesOf = model.released_losses(plan.config, plan.settings, folder / MODEL)
    return losses


def run(
    config: Config,
    on_progress: OnProgress = lambda progress: None,
    build: BuildEngine = build_engine,
) -> Json:
    """Run or resume `config`, and return its privacy report. `build` makes an engine from a section
    of the configuration, in this process or in an actor.

    Raises InputError, BudgetRefused (the data was not opened) and Resumable. Each error says
    whether the run is charged and how to continue.
    """
    with failures.explain_charge(config):
        _check_chosen(config)
        is_here = cluster.is_local(config)
        for name in sorted(config.method_names):
            require(f"method {name}", *NEEDS.get(name, ()))
        finished = _kept_config(config) if is_finished(config) else None
        if finished is None:
            _find(config.data)
        config = _with_pinned_models(config, finished)
        # Another `build` may not need this model.
        if finished is None and build is build_engine and is_here and config.engine.is_local:
            on_progress(Progress("finding the model"))
            resolve_model(config.engine.model)
        on_progress(Progress("planning"))
        plan = make_plan(_as_begun(config))
        release = load_module(config.method.name, "release").release
        with closing(ReleaseFolder(config.output.path)) as folder:
            return runner.Run(plan, folder, release, on_progress, build).execute().to_json()
    raise AssertionError("unreachable: `explain_charge` re-raises every error")


def _find(data: DataConfig) -> None:
    """Raise InputError if there are no files, or no such database, without opening any."""
    if data.query is None:
        list_files(data.path)
    else:
        snapshot.open_database(data.path)


def is_finished(config: Config) -> bool:
    """Return whether the run in the folder has finished: it is only shown, without its data and
    its model."""
    file = Path(config.output.path) / "run.json"
    return file.exists() and read_json(file, "output.path").get("state") == "finished"


def _with_pinned_models(config: Config, finished: Json | None) -> Config:
    """Return the configuration with the models that lie in a bucket pinned to their files now: no
    process of the run takes others, and a run that began with others is not resumed. A `finished`
    run, which is only shown, has the pins of its own configuration, and no bucket is looked at."""
    for name in ("engine", "embedder"):
        section = getattr(config, name)
        if name == "engine" and not config.engine.is_local:
            continue  # the endpoint's own name
        if finished is None:
            found = pinned(section.model, f"{name}.model")
        else:
            kept = (finished.get(name) or {}).get("model", "")
            found = kept if without_pin(kept)[0] == section.model else section.model
        if found != section.model:
            config = config.model_copy(update={name: section.model_copy(update={"model": found})})
    return config


def _kept_config(config: Config) -> Json:
    """Return the configuration that the run in the folder has kept, {} without a run."""
    kept = Path(config.output.path) / "private" / CONFIG
    return read_json(kept) if kept.exists() else {}


def _as_begun(config: Config) -> Config:
    """Return the configuration with the batch size that the run in the folder chose for `auto`:
    another machine, or other free memory, would give another size."""
    if getattr(config.method, "batch_size", None) != "auto":
        return config
    method = _kept_config(config).get("method") or {}
    size = method.get("batch_size") if method.get("name") == config.method.name else None
    if not isinstance(size, int):
        return config
    return config.model_copy(
        update={"method": config.method.model_copy(update={"batch_size": size})}
    )


def _check_chosen(config: Config) -> None:
    if config.method.name == "auto":
        raise InputError(
            "method.name: auto is for `dpray plan`, which compares the methods; with --write it "
            "writes the configuration of the method that it recommends"
        )

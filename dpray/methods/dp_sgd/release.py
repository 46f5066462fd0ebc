"""A release by DP-SGD: train, in blocks of steps that are charged before they are made; publish the
model once; then let it write.

The unit `model` of the charge is the training as a whole: its output holds the SHA-256 of every
file of the model that is released. Each block of steps is a unit of its own beside it, and says
from where a training that was cut off goes on, and what it pays for again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dpray.accounting.report import NOT_COVERED
from dpray.engines.text import TextCodec
from dpray.io.files import sha256_of, sync_all
from dpray.mechanisms.randomness import NOISE_SOURCE
from dpray.methods.dp_sgd.control_codes import draw_values
from dpray.methods.dp_sgd.data import check_rows, load_units, with_absolute_paths
from dpray.methods.dp_sgd.generation import to_record, write_texts
from dpray.methods.dp_sgd.plan import DpSgdPlan, check_lengths
from dpray.methods.dp_sgd.progress import Watched
from dpray.methods.dp_sgd.repeats import charge_again, with_repeats
from dpray.runs.cluster import ended_for_memory, is_local
from dpray.runs.folder import MODEL
from dpray.runs.placement import gpus_of_rank
from dpray.runs.session import Release, Session
from dpray.training.gradient_noise import SUM_ROUNDING
from dpray.training.journal import Journal, lost_blocks, nothing
from dpray.training.model import ADAPTER
from dpray.training.training import Training, train_here
from dpray.types import DprayError

DpSgdSession = Session[DpSgdPlan]


def release(session: DpSgdSession) -> Release:
    """Train the model, publish it once, and have the tuned model write the texts."""
    plan, config = session.plan, session.config
    if session.published(MODEL) is None:
        if is_local(config):
            check_lengths(config, plan.settings, plan.codes)
        if not session.has_begun:
            check_rows(config, plan.codes)
    going_on = session.going_on
    if session.published(MODEL) is None and not plan.not_private:
        session.going_on = (
            "the same command goes on from the last checkpoint: the steps after it, "
            f"{plan.blocks.size} at most, are charged again"
        )
    files: dict[str, str] = session.publish_once(MODEL, lambda: trained(session))["files"]
    session.going_on = going_on
    if hashes(released_files(session)) != files:
        raise DprayError("private/model: the tuned model is not there, or altered")

    wanted = draw_values(
        plan.shares, plan.settings.records, session.public_generator("control-values")
    )
    texts = written(session, wanted)
    records = [
        to_record(text, values, config.data.label)
        for text, values in zip(texts, wanted, strict=True)
        if text
    ]
    lost = lost_blocks(session.ledger, session.run_id)
    session.plan = with_repeats(plan, lost)
    return Release(records, report(session, files, sum(lost)), released_files(session))


def trained(session: DpSgdSession) -> dict[str, Any]:
    """Make all steps that are not made yet; return the released files' SHA-256 by their names."""
    if not session.plan.not_private:
        lost = lost_blocks(session.ledger, session.run_id)
        charge_again(session.ledger, session.run_id, session.plan, lost)
    tuned = tuned_model(session)
    shutil.rmtree(tuned, ignore_errors=True)

    def show(t: int) -> None:
        session.show("training steps", t, session.plan.method.steps)

    if session.in_process:
        train_here(training(session, show))
    else:
        train_on_ray(session, show)
    sync_all(tuned)
    return {"files": hashes(released_files(session))}


def tuned_model(session: DpSgdSession) -> Path:
    """Return the folder of the model until it is released: merged, for the engine."""
    return session.folder.private.resolve() / MODEL


def released_files(session: DpSgdSession) -> Path:
    """Return the folder of what is released: the model, or its adapters alone."""
    lora = session.plan.settings.tuning == "lora"
    return tuned_model(session) / ADAPTER if lora else tuned_model(session)


def training(session: DpSgdSession, on_step: Any) -> Training:
    plan = session.plan
    return Training(
        plan=plan.method,
        tuning=plan.tuning,
        zero_stage=plan.settings.zero_stage,
        load_units=partial(
            load_units, with_absolute_paths(session.config), plan.settings, plan.codes
        ),
        folder=str(tuned_model(session)),
        journal=Journal(
            session.ledger,
            session.run_id,
            session.attempt_id,
            str(session.folder.private.resolve() / "checkpoints"),
            plan.blocks,
            on_step,
        ),
    )


def train_on_ray(session: DpSgdSession, show: Any) -> None:
    # Imported late: training here has no need of Ray Train and DeepSpeed.
    from dpray.training import ray_train

    runtime = session.config.runtime
    with Watched(session.ledger, session.run_id, show):
        try:
            ray_train.train_on_ray(
                training(session, nothing),
                workers=runtime.actors,
                scratch=str(session.folder.private.resolve() / "ray_train"),
                gpus_per_worker=gpus_of_rank(runtime.gpus_per_actor or 0.0),
                cpus_per_worker=runtime.cpus_per_actor,
            )
        except Exception as error:
            # Unlike what else is repeated, steps are paid for again: nothing has to fail.
            if ended_for_memory(error):
                raise session.unfinished("Ray ended a rank for want of memory") from error
            raise


def written(session: DpSgdSession, wanted: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the tuned model's text for each of the control values."""
    plan, engine = session.plan, session.config.engine
    tuned = engine.model_copy(update={"model": str(tuned_model(session))})
    encode = TextCodec(tuned.model, tuned.max_model_len).encode
    session.show("texts")
    with session.language_model(session.config.model_copy(update={"engine": tuned})) as ask:
        return write_texts(encode, ask, plan.settings, plan.codes, wanted)


def report(session: DpSgdSession, files: Mapping[str, str], repeated: int) -> dict[str, Any]:
    """Return DP-SGD's part of the privacy report, for all steps that were charged."""
    plan, method = session.plan, session.plan.method
    noise = "none: this run is not private"
    if not plan.not_private:
        noise = f"{NOISE_SOURCE}; rounded to float32"
    return {
        "calls": session.calls,
        "llm_calls": plan.settings.records,
        "noise_multiplier": plan.noise_multiplier,
        "model": dict(files),
        "steps": {
            "planned": method.steps,
            "repeated": repeated,
            "charged": method.steps + method.repeats,
        },
        "sampling": {
            "batches": "Poisson: every unit joins a step's batch with probability "
            f"{method.mechanism.sampling_probability:g}, independently, and brings one record",
            "control_values": {name: dict(s) for name, s in plan.shares.items()},
            "texts": "ordinary sampling from the tuned model: post-processing",
        },
        "not_covered": [*NOT_COVERED, *([] if plan.not_private else [SUM_ROUNDING])],
        "noise_source": noise,
    }


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the folder's own files, by name."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return {path.name: sha256_of(path) for path in files}

"""DP-SGD trains a model, publishes it once, and has it write the texts.

The unit `model` of the charge is the training as a whole: its output holds the SHA-256 of every
file of the released model. Each block of steps is a unit of its own, apart from it: an interrupted
training resumes after the last one that was published, and pays for the steps that it repeats.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import NEIGHBORING_RELATION, Event
from dpray.config.config import DataConfig
from dpray.engines.base import PlainPrompt, Sampling
from dpray.engines.model_path import BASE_PLACE, absolute_model
from dpray.engines.requests import Request, ask_until_accepted
from dpray.engines.text import TextCodec
from dpray.io.bucket import in_bucket
from dpray.io.files import make_private, sha256_of, sync_all, write_durably
from dpray.mechanisms.attributes import draw_values
from dpray.mechanisms.randomness import NOISE_SOURCE
from dpray.methods.dp_sgd.control_codes import text_encoder, unit_texts
from dpray.methods.dp_sgd.plan import DpSgdPlan
from dpray.methods.dp_sgd.training.journal import Journal, lost_blocks
from dpray.methods.dp_sgd.training.model import ADAPTER
from dpray.methods.dp_sgd.training.step import SUM_ROUNDING
from dpray.methods.dp_sgd.training.token_files import (
    SHARDS,
    MappedUnits,
    check_shards,
    shard_names,
    write_names,
    write_shard,
)
from dpray.methods.dp_sgd.training.training import OnStep, ReferenceTrainer, Training, train_here
from dpray.runs.folder import CHECKPOINTS, MODEL, RAY_TRAIN, TOKENS
from dpray.runs.plan import privacy_unit
from dpray.runs.privacy_report import MethodPart, Steps
from dpray.runs.released import model_name
from dpray.runs.session import Release, Session
from dpray.types import Budget, BudgetRefused, DprayError
from dpray.workers.engine import gpus_of_rank, with_absolute_model
from dpray.workers.failures import own_errors
from dpray.workers.memory import Role, reserved
from dpray.workers.placement import run_placement
from dpray.workers.rows import (
    WITH_COLUMNS,
    Row,
    RowsOf,
    check_cut_files,
    data_files,
    ray_rows,
    record_rows,
)

DpSgdSession = Session[DpSgdPlan]


def release(session: DpSgdSession) -> Release:
    plan, config, settings = session.plan, session.config, session.plan.settings
    resume_hint, is_trained = session.resume_hint, session.published(MODEL) is not None
    if not is_trained:
        encode_records(session)
    if not (is_trained or plan.config.not_private):
        session.resume_hint = (
            "the same command goes on from the last checkpoint: the steps after it, "
            f"{plan.checkpoint_steps} at most, use up method.spare_steps or are charged again"
        )
    published = session.publish_once(MODEL, finish_training, session, pays_for_repeats=True)
    files: dict[str, str] = published["files"]
    session.resume_hint = resume_hint
    if hashes(released_folder(session)) != files:
        raise DprayError("private/model: the tuned model is not there, or altered")

    base = absolute_model(config.engine.model)
    if in_bucket(base) or Path(base).is_dir():
        write_durably(session.folder.root / BASE_PLACE, f"{base}\n", private=True)
    # From here on all is post-processing: the tuned model writes as many texts as are wanted.
    drawn = draw_values(plan.groups, settings.records, session.public_generator("control-values"))
    texts = write_texts(session, drawn)
    records = [
        to_record(text, values, config.data)
        for text, values in zip(texts, drawn, strict=True)
        if text
    ]
    if lost := lost_blocks(session.ledger, session.charge_key()):
        session.plan = plan.with_repeats(lost)
    return Release(records, report(session, files, sum(lost)), released_folder(session))


def finish_training(session: DpSgdSession) -> dict[str, object]:
    """Make all steps that are not made yet; return the files to release with their SHA-256."""
    charge_repeats(session)
    plan, tuned, steps = session.plan, tuned_folder(session), session.plan.method.steps
    shutil.rmtree(tuned, ignore_errors=True)
    session.show("loading the model", 0, steps)
    training = Training(
        method=plan.method,
        read=partial(read_units, str(tokens_folder(session))),
        base=with_absolute_model(plan.config.engine).model,
        base_name=model_name(plan.config.engine.model),
        folder=str(tuned),
        journal=Journal(
            session.ledger,
            session.charge_key(),
            session.attempt_id,
            str(session.folder.private.resolve() / CHECKPOINTS),
            steps,
            plan.checkpoint_steps,
        ),
    )
    while True:
        run_training(session, training, lambda t: session.show("training steps", t, steps))
        # It stops after a notice that a machine will be taken away, and goes on with others.
        if training.journal.steps_done() == steps:
            break
    sync_all(tuned)
    # A rank of an earlier attempt that was lost, and lives on, may have begun another block.
    charge_repeats(session)
    return {"files": hashes(released_folder(session))}


def run_training(session: DpSgdSession, training: Training, show: OnStep) -> None:
    """Train in this process, or on Ray's workers."""
    if session.in_process:
        train_here(training, show)
        return
    # Imported late: a training in this process needs neither Ray Train nor DeepSpeed.
    from dpray.methods.dp_sgd.training.ranks import train_on_ray

    runtime = session.config.runtime
    with training.journal.watched(show):
        train_on_ray(
            training,
            workers=run_placement().ranks(session.config),
            scratch=str(session.folder.private.resolve() / RAY_TRAIN),
            gpus_per_worker=gpus_of_rank(runtime.gpus_per_actor or 0.0),
            cpus_per_worker=runtime.cpus_per_actor,
            memory_per_worker=reserved(session.config, Role.RANK),
            wait=runtime.wait,
        )


def encode_records(session: DpSgdSession) -> None:
    """Read every record once and write its token ids, for all ranks and all attempts: on Ray in
    tasks on any machines with CPUs, before a rank has its place. Nothing is drawn from the records,
    so Ray may repeat the tasks, and a bad row can be corrected. Raises InputError that names the
    row.

    What an earlier attempt wrote is used again once a mechanism has begun: then neither the data
    nor the configuration may have changed.
    """
    folder = tokens_folder(session)
    if session.has_begun and (folder / SHARDS).exists():
        shard_names(folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    make_private(folder)
    session.show("encoding records")
    engine = with_absolute_model(session.config.engine)
    plan = replace(session.plan, config=session.config.model_copy(update={"engine": engine}))
    write_names(folder, (shards_here if session.in_process else shards_on_ray)(plan, folder))


def shards_here(plan: DpSgdPlan, folder: Path) -> list[str]:
    """Write the token ids of all records in this process; return the shards' names."""
    rows = chain.from_iterable(map(rows_of(plan), data_files(plan.config.data)))
    return [encode_rows(plan, folder, rows)]


def shards_on_ray(plan: DpSgdPlan, folder: Path) -> list[str]:
    """Write the token ids of all records in Ray's tasks; return the shards' names."""

    def tables(rows: Iterable[Row]) -> Iterator[pa.Table]:
        yield pa.table({"shard": [encode_rows(plan, folder, rows)]})

    with own_errors():
        run_placement().make_room()
        shards = ray_rows(plan.config, rows_of(plan), tables, WITH_COLUMNS).take_all()
        check_cut_files(data_files(plan.config.data))
    return [shard["shard"] for shard in shards]


def rows_of(plan: DpSgdPlan) -> RowsOf:
    columns = plan.reads.column_values
    return partial(record_rows, data=plan.config.data, column_values=columns, by_place=True)


def encode_rows(plan: DpSgdPlan, folder: Path, rows: Iterable[Row]) -> str:
    """Write the token ids of records, with all records of their units, and return the shard."""
    # A column of Arrow's maps comes back as pairs.
    encoder = text_encoder(plan.config.engine, plan.settings)
    named = (row | {"columns": dict(row["columns"])} for row in rows)
    texts = unit_texts(named, encoder, plan.codes)
    return write_shard(folder, texts, plan.config.data.max_records_per_unit)


def read_units(folder: str, trainer: ReferenceTrainer) -> MappedUnits:
    """Return all units on a rank, once every rank has found its share of the shards unaltered."""
    names = shard_names(Path(folder))
    check_shards(Path(folder), names[trainer.rank :: trainer.ranks])
    trainer.gather(None)
    return MappedUnits(Path(folder), names)


def charge_repeats(session: DpSgdSession) -> None:
    """Reserve the cost of repeating the lost blocks, beyond the steps charged beforehand;
    idempotent. Raises BudgetRefused if it is more than `privacy.epsilon` or the budget allows."""
    plan, privacy = session.plan, session.config.privacy
    if not (lost := lost_blocks(session.ledger, session.charge_key())):
        return
    why = (
        f"{sum(lost)} of {plan.method.steps} steps were lost and would be repeated; "
        f"method.spare_steps pays for such steps beforehand"
    )
    whole = budget_of(plan.with_repeats(lost).dp_event, privacy.delta)
    if whole.epsilon > privacy.epsilon:
        charged = budget_of(plan.dp_event, privacy.delta)
        left = Budget(privacy.epsilon - charged.epsilon, 0.0)
        why = f"privacy.epsilon is {privacy.epsilon:g}: {why}"
        raise BudgetRefused(privacy.dataset, whole, charged, left, why)
    step = plan.method.mechanism.dp_event
    charges: dict[str, tuple[Event, Budget]] = {}
    for number, steps in enumerate(plan.unpaid_repeats(lost), start=1):
        if steps:
            event = SelfComposed(step, steps)
            charges[session.charge_key(f"again-{number}")] = event, budget_of(event, privacy.delta)
    try:
        stated_for = privacy_unit(plan.config.data.unit), NEIGHBORING_RELATION
        session.ledger.reserve(privacy.dataset, charges, *stated_for)
    except BudgetRefused as refused:
        known = (refused.dataset, refused.asked, refused.spent, refused.left)
        raise BudgetRefused(*known, why) from None


def budget_of(event: Event, delta: float) -> Budget:
    price = cost(event, delta)
    return Budget(price.epsilon, price.delta)


def write_texts(session: DpSgdSession, drawn: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a text of the tuned model for each of the control values, "" if it wrote none. The
    prompt is, token for token, the start of a training text."""
    plan, settings, label = session.plan, session.plan.settings, session.config.data.label
    tuned = session.config.engine.model_copy(update={"model": str(tuned_folder(session))})
    codec = TextCodec(tuned.model, tuned.max_model_len)
    labels = [values.get(label or "", "") for values in drawn]
    sequences = plan.codes.draw_terms(labels, session.public_generator("control-terms"))
    codes = [
        plan.codes.fitting(values, terms, codec.ids, settings.max_length)
        for values, terms in zip(drawn, sequences, strict=True)
    ]
    prompts = {code: PlainPrompt(code) for code in codes}
    # `check_lengths` looks for the longest code column by column: another may have a token more.
    room = {
        code: max(1, settings.max_length - len(codec.encode(prompt)))
        for code, prompt in prompts.items()
    }

    def request(number: int, attempt: int) -> Request:
        code = codes[number]
        sampling = Sampling(
            room[code],
            settings.temperature,
            settings.top_k,
            settings.top_p,
            schema=plan.schema,
        )
        return Request(f"text-{number}/{attempt}", prompts[code], sampling)

    session.show("texts")
    with session.language_model(session.config.model_copy(update={"engine": tuned})) as ask:
        return ask_until_accepted(
            ask, request, len(drawn), settings.max_retries, lambda number, text: False
        )


def to_record(text: str, values: Mapping[str, str], data: DataConfig) -> dict[str, object]:
    """Return a released record, with a field for each attribute; the values of further control
    columns are in `control`."""
    attributes = data.released_attributes(values)
    own = {data.label, *attributes}
    control = {column: value for column, value in values.items() if column not in own}
    name = values.get(data.label or "")
    label = None if name is None else data.released_label(name)
    record: dict[str, object] = {"text": text, "label": label}
    return record | attributes | ({"control": control} if control else {})


def report(session: DpSgdSession, files: Mapping[str, str], repeated: int) -> MethodPart:
    """Return DP-SGD's part of the privacy report, for all steps that were charged."""
    plan, method = session.plan, session.plan.method
    return MethodPart(
        calls=session.calls,
        llm_calls=plan.settings.records,
        noise_multiplier=plan.noise_multiplier,
        model=dict(files),
        steps=Steps(planned=method.steps, repeated=repeated, charged=method.steps + method.repeats),
        sampling={
            "batches": "Poisson: every unit joins a step's batch with probability "
            f"{method.mechanism.sampling_probability:g}, independently, and brings one record",
            "control_values": {name: dict(shares) for name, shares in plan.shares.items()},
            "control_terms": "public sequences (method.terms)"
            if any(plan.codes.sequences.values())
            else "none",
            "private_texts": plan.cut,
            "texts": "ordinary sampling from the tuned model: post-processing",
        },
        not_covered=[] if plan.config.not_private else [SUM_ROUNDING],
        noise_source="none: this run is not private"
        if plan.config.not_private
        else f"{NOISE_SOURCE}; rounded to float32",
    )


def tokens_folder(session: DpSgdSession) -> Path:
    return session.folder.private.resolve() / TOKENS


def tuned_folder(session: DpSgdSession) -> Path:
    """Return the folder of the tuned model, adapters merged, for the engine."""
    return session.folder.private.resolve() / MODEL


def released_folder(session: DpSgdSession) -> Path:
    """Return the folder of the files to release: the tuned model, or its adapters only."""
    tuned = tuned_folder(session)
    return tuned / ADAPTER if session.plan.settings.tuning == "lora" else tuned


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the folder's own files by their names."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return {path.name: sha256_of(path) for path in files}

"""A release by private prediction decodes batches, publishes each once, and puts them together."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from time import monotonic

from dpray.config.sections import RuntimeConfig
from dpray.engines.row_variation import rounding_warnings
from dpray.mechanisms.batches import is_batch
from dpray.mechanisms.randomness import NOISE_SOURCE
from dpray.methods.private_prediction.decoder import MOST_COPIES, BatchDecoder
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.runs.folder import BATCHES_KEY
from dpray.runs.privacy_report import BatchCounts, MethodPart, Numerics, Tokens
from dpray.runs.session import Release, Session
from dpray.types import DprayError, RunFailed
from dpray.workers.gathering import (
    BatchGathering,
    Outcome,
    outcome_lists,
    outcomes_here,
    outcomes_on_ray,
)
from dpray.workers.pool_actor import OUTCOME_SECONDS

DISJOINT = "disjoint, by a keyed hash of the unit's id; parallel composition over batches"
POISSON = (
    "secret, a unit joins each one of its label independently with a public probability; all of "
    "them are composed"
)
CANDIDATES = (
    "cut out by public logits, from forward passes or kernels that private rows do not touch"
)

BatchSession = Session[PrivatePredictionPlan]

FEW_BATCHES = 3
"""Batches without a text are only warned of once so many batches are done."""

BATCHES_PER_PART = 512
"""At most about this many batches are published in one part."""

SECONDS_PER_PART = 2.0
"""The time between two parts on Ray. A part costs the driver some ten milliseconds, for the ledger
and the disk, however many batches it has."""


def release(session: BatchSession) -> Release:
    """Decode the batches that are missing, publish each once, and release their texts."""
    session.plan = replace(session.plan, salt=session.salt)
    session.plan = replace(session.plan, template=drawing(session))
    refuse_failed(session)
    plan, decoded = session.plan, Totals.from_published(session)
    done = {batch for batch, _ in session.ledger.published(session.charge_key())}
    parts = (f"{session.attempt_id}-{number:08d}.jsonl" for number in count())
    has_warned = False
    while batches := next_batches(plan, done, decoded):
        total, tokens, began = decoded.batches + len(batches), decoded.tokens, monotonic()
        session.show("sorting records into batches", decoded.batches, total, decoded.describe())
        decoding = decode(session, batches)
        session.show("batches", decoded.batches, total, decoded.describe())
        # Closed at once if a batch was lost: the engine has to go before the next one comes.
        with closing(decoding):
            for outcomes in decoding:
                for outcome in publish(session, next(parts), outcomes):
                    decoded.add(plan, outcome)
                    session.metrics.published(outcome["tokens"], outcome["private_tokens"])
                if not has_warned and (warning := decoded.warning(plan)):
                    session.warn(warning)
                    has_warned = True
                speed = (decoded.tokens - tokens) / max(monotonic() - began, 1e-9)
                session.show("batches", decoded.batches, total, decoded.describe(), speed)
        if decoded.batches < total:
            raise DprayError("some batches were not decoded")
        done.update(batches)
    return Release(records(session), report(session, decoded))


def drawing(session: BatchSession) -> PromptTemplate:
    """Return the template with the attributes of each batch's texts. All prompts of a batch, also
    the public one, name the same ones: they are a function of its name, the salt and the noisy
    histograms."""
    batches, template = session.plan.batches, session.plan.template
    if not session.config.data.attributes:
        return template
    drawn = {
        batches.batch_id(label, number): values
        for label, texts in batches.batches_per_label.items()
        for number, values in enumerate(session.drawn_values(label, texts))
    }
    return replace(template, drawn=drawn)


def refuse_failed(session: BatchSession) -> None:
    """Raise RunFailed if a batch has failed."""
    failed = dict(session.ledger.failed(session.charge_key()))
    if failed:
        batch, (_, reason) = next(iter(failed.items()))
        raise RunFailed(
            f"batch {batch} failed with {reason} ({len(failed)} in all); a batch that failed by "
            "itself is never repeated, so this run cannot be finished"
        )


def next_batches(plan: PrivatePredictionPlan, done: Collection[str], decoded: Totals) -> list[str]:
    """Return the next batches to decode: those that are not `done`, in their public order. With
    `max_records`, take only as many disjoint batches as should yield the missing records.

    A batch may give none, because its text was empty or not finished. What it gave is released, so
    what is decoded next is a public choice, and the batches still compose in parallel. It is made
    once all batches of the choice before are done. So a run that was cut off, which private rows or
    draws may have had a part in, decodes the batches that it would have decoded.
    Poisson batches come label by label: a record joins several of its label, and the prefix cache
    is more likely to have its prompt still.
    """
    order = list(plan.batches.batch_ids())
    waiting = [batch for batch in order if batch not in done]
    if not plan.disjoint:
        return sorted(waiting, key=plan.batches.label_of)
    most = plan.settings.max_records
    if most is None or plan.batches_decoded == plan.batches.num_batches:
        return waiting
    taken = records = 0
    while True:
        # Add-one smoothing: the rate is never zero and starts at one record per batch.
        records_per_batch = (records + 1) / (taken + 1)
        asked = order[taken:][: max(0, math.ceil((most - records) / records_per_batch))]
        waiting = [batch for batch in asked if batch not in done]
        if waiting or not asked:
            return waiting
        taken += len(asked)
        records += sum(decoded.records.get(batch, 0) for batch in asked)


def decode(session: BatchSession, batches: list[str]) -> Generator[list[Outcome]]:
    """Gather the private rows by batch. Return the generator that decodes them, in this process or
    in actors on Ray, and yields their outcomes, a part's at a time.

    A worker gets some batches at a time, and asks for the next ones before it is done with these.
    """
    config, plan = session.config, session.plan
    # All coins of the batches are of one key: a batch that was lost has the same units and the same
    # tokens when it is drawn again.
    lost = "a batch that was begun would be drawn again with other coins"
    key = session.secret_key(BATCHES_KEY, is_batch, lost)
    make = partial(
        BatchDecoder, plan, session.ledger, session.charge_key(), session.attempt_id, key
    )
    size = task_size(config.runtime, plan.disjoint, len(batches))
    secret, rows = "" if plan.disjoint else key, plan.settings.expected_batch_size
    gathering = BatchGathering(plan.batches, secret, rows)
    if session.in_process:
        members = gathering.here(config, batches)
        outcomes = outcomes_here(members, lambda: make(session.take_engine()), size)
        return outcome_lists(outcomes, size, OUTCOME_SECONDS)
    parts = gathering.on_ray(config, batches, size)
    outcomes = outcomes_on_ray(config, parts, session.load_engine, make, size, session.note_loss)
    return outcome_lists(outcomes, BATCHES_PER_PART, SECONDS_PER_PART)


def task_size(runtime: RuntimeConfig, disjoint: bool, batches: int) -> int:
    """Return how many batches an actor is handed at once.

    Each task costs two calls: one to the ledger, and one for its outcomes. Large tasks make these
    calls rare when batches are short. Small tasks leave less to decode again if an actor is lost.
    """
    if runtime.batches_per_task is not None:
        return runtime.batches_per_task
    share = -(-batches // runtime.actors)
    return min(share, 8 if disjoint else 64)


def publish(session: BatchSession, part: str, outcomes: list[Outcome]) -> list[Outcome]:
    """Publish the batches that are whole, in one part, and return them. Raises RunFailed if one
    failed."""
    whole = {outcome["batch"]: outcome for outcome in outcomes if "examples" in outcome}
    if whole:
        session.publish_file(part, whole)
    if any("failed" in outcome for outcome in outcomes):
        refuse_failed(session)
    return list(whole.values())


def records(session: BatchSession) -> Iterator[dict[str, object]]:
    """Yield the published batches' records, `method.max_records` of them at most: the first of
    every batch in their public order, then the second of every batch, and so on.

    When a batch was done depends on how many private rows it and its neighbours have, and no
    epsilon covers that: the order is made here, from what is public. One part's outcomes are in
    memory at a time.
    """
    plan = session.plan
    place = {batch: n for n, batch in enumerate(plan.batches.batch_ids())}
    placed = (
        (turn * len(place) + place[outcome["batch"]], record)
        for outcome in session.folder.published_records()
        for turn, record in enumerate(records_of(plan, outcome))
    )
    return islice(external_sort(placed), plan.settings.max_records)


def external_sort(placed: Iterable[tuple[int, dict[str, object]]]) -> Iterator[dict[str, object]]:
    """Yield records in the order of their places, which are distinct. They are sorted on a disk of
    this machine, not of the output's volume: memory does not grow with their number."""
    # With this name SQLite makes a temporary file, and removes it.
    with closing(sqlite3.connect("", isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = -65536")
        database.execute("CREATE TABLE records (place INTEGER PRIMARY KEY, record TEXT)")
        database.execute("BEGIN")
        database.executemany(
            "INSERT INTO records VALUES (?, ?)",
            ((place, json.dumps(record)) for place, record in placed),
        )
        for (record,) in database.execute("SELECT record FROM records ORDER BY place"):
            yield json.loads(record)


def records_of(plan: PrivatePredictionPlan, outcome: Outcome) -> Iterator[dict[str, object]]:
    """Yield a batch's records, in the order they were drawn; an empty text is no record. Each is
    made of all sections of a document, and ends by its length if one of them does."""
    data, label = plan.config.data, plan.batches.label_of(outcome["batch"])
    values = plan.template.drawn.get(outcome["batch"], {})
    examples, K = outcome["examples"], plan.settings.sections
    for start in range(0, len(examples), K):
        completions, reasons, tokens = zip(*examples[start : start + K], strict=True)
        cut = [reason == "length" for reason in reasons]
        if K == 1:
            text = plan.template.released(completions[0], plan.form, is_cut=cut[0])
        else:
            sections = zip(completions, cut, strict=True)
            text = plan.template.released(plan.template.joined([*sections]))
        if text:
            yield {
                "text": text,
                "label": data.released_label(label),
                **data.released_attributes(values),
                "batch": outcome["batch"],
                "finish_reason": "length" if any(cut) else reasons[-1],
                "tokens": sum(tokens),
            }


@dataclass
class Totals:
    """Sums over published batches: they are released, so public."""

    batches: int = 0
    examples: int = 0
    tokens: int = 0
    private_tokens: int = 0
    records: dict[str, int] = field(default_factory=dict)
    """The number of each batch."""
    cut_off: int = 0
    """The batches whose private tokens were drawn before a text was whole."""
    without_text: int = 0
    row_variation: float | None = None

    @classmethod
    def from_published(cls, session: BatchSession) -> Totals:
        decoded = cls()
        for outcome in session.folder.published_records():
            decoded.add(session.plan, outcome)
        return decoded

    def add(self, plan: PrivatePredictionPlan, outcome: Outcome) -> None:
        self.batches += 1
        records = sum(1 for _ in records_of(plan, outcome))
        self.records[outcome["batch"]] = records
        self.without_text += not records
        self.cut_off += not outcome["examples"]
        self.examples += len(outcome["examples"]) // plan.settings.sections
        self.tokens += outcome["tokens"]
        self.private_tokens += outcome["private_tokens"]
        self.row_variation = max(outcome["row_variation"], self.row_variation or 0.0)

    def warning(self, plan: PrivatePredictionPlan) -> str:
        """Return why most batches so far gave no text, with what to change for another run; ""
        if most gave one, or if there are few of them."""
        none = self.without_text
        if self.batches < FEW_BATCHES or 2 * none <= self.batches:
            return ""
        words = f"{none} of {self.batches} batches gave no text"
        if 2 * self.cut_off >= none:
            why = f"{words}: all {plan.private_tokens} private tokens of a batch were drawn before"
            key = plan.shortage or "raise method.private_tokens, or set it to null"
            return f"{why} its first text had ended; {key}"
        return (
            f"{words}: the model ended the text at once, or wrote only blanks; `dpray preview` "
            "shows what it writes without private records, by engine.model, method.template, "
            "method.stop and data.about"
        )

    def describe(self) -> str:
        words = [f"{self.examples} texts"]
        if none := self.without_text:
            words.append(f"{none} batches gave none")
        if self.tokens:
            words.append(f"{self.private_tokens / self.tokens:.0%} private")
        return ", ".join(words)


def report(session: BatchSession, decoded: Totals) -> MethodPart:
    """Return private prediction's part of the privacy report."""
    plan, settings, data = session.plan, session.plan.settings, session.config.data
    ledger, key = session.ledger, session.charge_key()
    published = sum(is_batch(unit) for unit, _ in ledger.published(key))
    copies = f"of each text with its label, {MOST_COPIES} are used at most"
    if data.unit is not None or not plan.disjoint:
        copies = "a unit's records are bounded, copies of one text are not"
    warnings = rounding_warnings(session.config.engine.dtype, decoded.row_variation)
    return MethodPart(
        batches=BatchCounts(
            total=plan.batches.num_batches,
            published=published,
            repeated=sum(map(is_batch, ledger.repeated(key))),
            failed=ledger.counts(key)["failed"],
            missing=published - decoded.batches,
            without_text=decoded.without_text,
        ),
        tokens=Tokens(total=decoded.tokens, private=decoded.private_tokens),
        llm_calls=decoded.examples * settings.sections * (settings.expected_batch_size + 1),
        sampling={
            "batches": f"{DISJOINT if plan.disjoint else POISSON}; expected size "
            f"{settings.expected_batch_size}",
            "copies": copies,
            "tokens": describe_draw(settings),
            "candidates": CANDIDATES if settings.candidates != "all" else "all tokens",
        },
        numerics=Numerics(dtype=session.config.engine.dtype, row_variation=decoded.row_variation),
        public_inputs={
            "template": settings.template,
            "few_shot": settings.few_shot,
            "schema": settings.schema,
        },
        not_covered=warnings,
        noise_source=f"{NOISE_SOURCE}; every text has a key of its own, derived by BLAKE2b",
    )


def describe_draw(settings: PrivatePredictionSettings) -> str:
    """Return the sentence of the report on how a token is drawn."""
    words = "softmax of the clipped mean of logits (exponential mechanism)"
    if settings.public_gate is not None:
        words += "; if the public logits are sure of a token by themselves, it is drawn from them"
    if settings.schema is not None:
        words += (
            "; only tokens that the public schema allows are drawn, and one that it leaves no "
            "choice about is taken"
        )
    if settings.sparse_vector is not None:
        words += (
            "; if a noisy comparison (sparse vector) does not find the private logits far from "
            "the public ones, it is drawn from the public ones"
        )
    if settings.end_tokens:
        words += (
            f"; at most {settings.end_tokens} tokens that end a text which max_tokens cut in a "
            "sentence are drawn from the public prompt alone"
        )
    return words

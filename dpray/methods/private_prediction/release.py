"""A release by private prediction decodes batches, publishes each once, and puts them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby, islice
from operator import itemgetter
from time import monotonic
from typing import Any

from dpray.accounting.report import NOT_COVERED
from dpray.config.sections import RuntimeConfig
from dpray.io.external_sort import external_sort
from dpray.mechanisms.randomness import NOISE_SOURCE, SecretKey
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.methods.private_prediction.resolved import PrivatePredictionPlan
from dpray.methods.private_prediction.rows import ROWS, joined, placeholder, private_rows
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.runs.folder import BATCHES_KEY
from dpray.runs.session import Release, Session
from dpray.types import DprayError, RunFailed
from dpray.workers.groups import Groups, Outcome, batched_within

DISJOINT = "disjoint, by a keyed hash of the unit's id; parallel composition over batches"
POISSON = (
    "secret, a unit joins each one of its label independently with a public probability; all of "
    "them are composed"
)
CANDIDATES = (
    "cut out by public logits, from forward passes or kernels that private rows do not touch"
)

BatchSession = Session[PrivatePredictionPlan]

BATCHES_PER_PART = 512
"""At most about this many batches are published in one part."""

SECONDS_PER_PART = 2.0
"""Finished batches are published this often on Ray: a part, its entries in the ledger and their way
to the disk take the driver some ten milliseconds, however many batches they hold."""

SORTED = "sorted.db"
"""The file in `staging` in which the release is sorted."""


def release(session: BatchSession) -> Release:
    """Decode the missing batches, until there are none, and release their texts."""
    done = Decoded.by_now(session)
    waiting = missing(session)
    seconds = 0.0 if session.in_process else SECONDS_PER_PART
    parts = (f"{session.attempt_id}-{number:08d}.jsonl" for number in count())
    while batches := wave(session.plan, waiting, done):
        before, tokens, began = done.batches, done.tokens, monotonic()
        total = before + len(batches)
        session.show("sorting records into batches", before, total, done.in_words())
        # Closed at once where a batch was lost: the engine has to go before the next one comes.
        with closing(decode(session, batches)) as tasks:
            announce = partial(session.show, "batches", before, total, done.in_words())
            lots = announced(tasks, announce)
            for outcomes in batched_within(lots, BATCHES_PER_PART, seconds):
                for outcome in publish(session, next(parts), outcomes):
                    done.add(session.plan, outcome)
                    session.metrics.published(outcome["tokens"], outcome["private_tokens"])
                speed = (done.tokens - tokens) / max(monotonic() - began, 1e-9)
                session.show("batches", done.batches, total, done.in_words(speed))
        if done.batches < total:
            raise DprayError("some batches were not decoded")
        waiting = waiting[len(batches) :]
    return Release(records(session), report(session, done))


def missing(session: BatchSession) -> list[str]:
    """Return all batches that are not decoded, in their public order."""
    plan, ledger, key = session.plan, session.ledger, session.key()
    refuse_failed(session)
    done = {batch for batch, _ in ledger.published(key)}
    if session.config.privacy.lost_batches == "drop":
        done |= {batch for batch, _ in ledger.unfinished(key)}
    return [batch for batch in plan.batches.batch_ids() if batch not in done]


def refuse_failed(session: BatchSession) -> None:
    """Raise RunFailed where a batch has failed."""
    failed = dict(session.ledger.failed(session.key()))
    if failed:
        batch, (_, reason) = next(iter(failed.items()))
        raise RunFailed(
            f"batch {batch} failed with {reason} (and {len(failed) - 1} more with it); a batch "
            f"that raised itself, or for which the memory did not suffice, is never repeated, "
            f"so this run cannot be finished"
        )


def wave(plan: PrivatePredictionPlan, waiting: list[str], done: Decoded) -> list[str]:
    """Return the batches to decode now: all that wait, or, of disjoint ones for fewer records than
    batches, as many as are expected to give the missing records.

    A batch may give none, because its text was empty or not finished. What it gave is released, so
    what is decoded next is a public choice, and the batches still compose in parallel.
    """
    most = plan.settings.max_records
    if most is None or plan.batches_decoded == plan.batches.num_batches:
        return waiting
    # Counted with one more batch that gave one record: it is never 0, and 1 before the first wave.
    records_a_batch = (done.records + 1) / (done.batches + 1)
    return waiting[: max(0, math.ceil((most - done.records) / records_a_batch))]


def announced(
    lots: Iterable[list[Outcome]], announce: Callable[[], None]
) -> Iterator[list[Outcome]]:
    """Pass the lots on, and announce the decoding before the first one."""
    for number, lot in enumerate(lots):
        if number == 0:
            announce()
        yield lot


def decode(session: BatchSession, batches: list[str]) -> Generator[list[Outcome]]:
    """Yield an empty list once the rows are gathered, and then the outcomes of the batches, those
    of a task at a time."""
    load = session.take_engine if session.in_process else session.load_engine
    key = "" if session.plan.disjoint else batches_key(session)
    make = partial(
        BatchDecoder, session.plan, session.ledger, session.key(), session.attempt_id, load
    )
    size = task_size(session.config.runtime, session.plan.disjoint, len(batches))
    return batches_of(session.plan, key).work(session.config, batches, make, size)


def task_size(runtime: RuntimeConfig, disjoint: bool, batches: int) -> int:
    """Return how many batches an actor is handed at once.

    A task costs two calls, one of the ledger and one that brings its outcomes, which are the more
    the shorter the batches are; what a lost actor leaves is a task or two to decode again.
    """
    if runtime.batches_per_task is not None:
        return runtime.batches_per_task
    share = -(-batches // max(runtime.actors, runtime.min_actors))
    return min(share, 8 if disjoint else 64)


def batches_of(plan: PrivatePredictionPlan, key: str) -> Groups:
    """Return the plan's batches as groups of rows; `key` is the secret one of Poisson batches."""
    rows = partial(
        private_rows, data=plan.config.data, template=plan.template, by_place=not plan.disjoint
    )
    s = plan.settings.expected_batch_size
    return Groups(rows, ROWS, "batch", partial(joined, plan.batches, key), placeholder(), s)


def batches_key(session: BatchSession) -> SecretKey:
    """Return the secret key of the run's Poisson batches: a batch that was lost has the same units
    when it is drawn again."""
    return session.secret_key(BATCHES_KEY, "nobody knows who is in a batch that was begun")


def publish(session: BatchSession, part: str, outcomes: list[Outcome]) -> list[Outcome]:
    """Publish the whole batches, in one part, and return them. Raises DprayError for a failed one,
    which ends the run."""
    whole = {outcome["batch"]: outcome for outcome in outcomes if "examples" in outcome}
    if whole:
        session.publish(part, whole)
    if any("failed" in outcome for outcome in outcomes):
        refuse_failed(session)
    return list(whole.values())


def records(session: BatchSession) -> Iterator[dict[str, Any]]:
    """Yield the published batches' records, `method.max_records` of them at most: the first of
    every batch in their public order, then the second of every batch, and so on.

    When a batch was done depends on how many private rows it and its neighbours have, and no
    epsilon covers that: the order is made here, from what is public. Holds one part's outcomes.
    """
    plan = session.plan
    place = {batch: n for n, batch in enumerate(plan.batches.batch_ids())}
    placed = (
        (turn * len(place) + place[outcome["batch"]], record)
        for outcome in session.folder.published_records()
        for turn, record in enumerate(records_of(plan, outcome))
    )
    return islice(external_sort(session.folder.staging / SORTED, placed), plan.settings.max_records)


def records_of(plan: PrivatePredictionPlan, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield a batch's records, in the order they were drawn; an empty text is no record."""
    label = plan.batches.label_of(outcome["batch"])
    for completion, finish_reason, tokens in outcome["examples"]:
        if text := plan.template.released(completion):
            yield {
                "text": text,
                "label": plan.config.data.released_label(label),
                "batch": outcome["batch"],
                "finish_reason": finish_reason,
                "tokens": tokens,
            }


@dataclass
class Decoded:
    """Holds sums over published batches; released, so public."""

    batches: int = 0
    examples: int = 0
    tokens: int = 0
    private_tokens: int = 0
    row_variation: float | None = None
    records: int = 0

    @classmethod
    def by_now(cls, session: BatchSession) -> Decoded:
        """Sum over the batches that are published by now."""
        done = cls()
        for outcome in session.folder.published_records():
            done.add(session.plan, outcome)
        return done

    def add(self, plan: PrivatePredictionPlan, outcome: Outcome) -> None:
        self.batches += 1
        self.records += sum(1 for _ in records_of(plan, outcome))
        self.examples += len(outcome["examples"])
        self.tokens += outcome["tokens"]
        self.private_tokens += outcome["private_tokens"]
        found = outcome.get("row_variation")  # older versions did not measure it
        if found is not None:
            self.row_variation = max(found, self.row_variation or 0.0)

    def in_words(self, tokens_per_second: float = 0.0) -> str:
        words = [f"{self.examples} texts"]
        if tokens_per_second:
            words.append(f"{tokens_per_second:.0f} tokens/s")
        if self.tokens:
            words.append(f"{self.private_tokens / self.tokens:.0%} private")
        return ", ".join(words)


def report(session: BatchSession, done: Decoded) -> dict[str, Any]:
    """Return private prediction's part of the privacy report."""
    plan, settings, data = session.plan, session.plan.settings, session.config.data
    copies = f"of each text with its label, {settings.max_copies} are used at most"
    if data.unit is not None or not plan.disjoint:
        copies = "a unit's records are bounded, copies of one text are not"
    counts = batch_counts(session)
    return {
        "batches": counts | {"missing": counts["published"] - done.batches},
        "tokens": {"total": done.tokens, "private": done.private_tokens},
        "llm_calls": done.examples * (settings.expected_batch_size + 1),
        "sampling": {
            "batches": f"{DISJOINT if plan.disjoint else POISSON}; expected size "
            f"{settings.expected_batch_size}",
            "copies": copies,
            "tokens": tokens_in_words(settings),
            "candidates": CANDIDATES if plan.settings.candidates != "all" else "all tokens",
        },
        "numerics": {"dtype": session.config.engine.dtype, "row_variation": done.row_variation},
        "public_inputs": {"template": settings.template, "few_shot": settings.few_shot},
        "not_covered": [*NOT_COVERED, *rounding(plan, done.row_variation)],
        "noise_source": f"{NOISE_SOURCE}; a fresh key for every text",
    }


def tokens_in_words(settings: PrivatePredictionSettings) -> str:
    """Return the sentence of the report on how a token is drawn."""
    words = "softmax of the clipped mean of logits (exponential mechanism)"
    if settings.public_gate is not None:
        words += "; where the public logits alone are sure of a token, it is drawn from them"
    if settings.sparse_vector is not None:
        words += (
            "; where a noisy comparison (sparse vector) does not find the private logits far from "
            "the public ones, it is drawn from the public ones"
        )
    return words


def rounding(plan: PrivatePredictionPlan, variation: float | None) -> list[str]:
    """Return the report's warning that rounding may exceed the sensitivity c / s, by what was
    measured where the model ran."""
    if variation is None:
        return plan.rounding
    if variation == 0.0:
        return []
    return [
        f"a row's logits moved by up to {variation:.1e} with the other rows of its forward "
        f"pass, in {plan.config.engine.dtype} (measured with public prompts where the model "
        "ran): the sensitivity c / s is claimed up to that"
    ]


def batch_counts(session: BatchSession) -> dict[str, int]:
    plan, ledger, key = session.plan, session.ledger, session.key()
    counts = ledger.counts(key)
    return {
        "total": plan.batches.num_batches,
        "published": plan.published_batches(counts["published"]),
        "repeated": sum(
            number > 1 for unit, number in starts(ledger.started(key)) if unit != "labels"
        ),
        "dropped": sum(1 for _ in starts(ledger.unfinished(key))),
        "failed": counts["failed"],
    }


def starts(begun: Iterable[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    """Yield each unit with the number of its attempts. `begun` has a pair of unit and attempt for
    each, sorted by unit, and is not held."""
    for unit, attempts in groupby(begun, key=itemgetter(0)):
        yield unit, sum(1 for _ in attempts)

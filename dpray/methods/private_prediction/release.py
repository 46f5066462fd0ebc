"""Private prediction's run: its batches decoded, each published once, and put together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, zip_longest
from time import monotonic
from typing import Any

from dpray.accounting.ledger import Ledger
from dpray.accounting.report import NOT_COVERED
from dpray.engines.base import Engine, EngineError
from dpray.mechanisms.randomness import NOISE_SOURCE
from dpray.methods.private_prediction.decoder import Attempt
from dpray.methods.private_prediction.local import Decode, decode_locally
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.ray_data import decode_on_ray
from dpray.runs.accountant import AccountantClient
from dpray.runs.engine import BuildEngine, build_engine, with_absolute_model
from dpray.runs.folder import ReleaseFolder
from dpray.runs.runner import OnProgress, Progress, Run
from dpray.types import DprayError, Resumable

CANDIDATES = (
    "cut out by public logits, from forward passes or kernels that private rows do not touch"
)


@dataclass
class Decoded:
    """Sums over published batches; released, so public."""

    batches: int = 0
    examples: int = 0
    tokens: int = 0
    private_tokens: int = 0
    row_variation: float | None = None
    records: int = 0

    def add(self, outcome: dict[str, Any], records: int) -> None:
        self.batches += 1
        self.records += records
        self.examples += len(outcome["examples"])
        self.tokens += outcome["tokens"]
        self.private_tokens += outcome["private_tokens"]
        found = outcome.get("row_variation")  # older versions did not measure it
        if found is not None:
            self.row_variation = max(found, self.row_variation or 0.0)


class PrivatePredictionRun(Run[PrivatePredictionPlan]):
    def __init__(
        self,
        plan: PrivatePredictionPlan,
        folder: ReleaseFolder,
        on_progress: OnProgress,
        build: BuildEngine = build_engine,
    ) -> None:
        super().__init__(plan, folder, on_progress, build)
        self.plan = self.plan.with_salt(self.salt)

    @property
    def load_engine(self) -> Callable[[], Engine]:
        alone = self.plan.cuts_candidates
        return partial(self._build, with_absolute_model(self.config.engine), public_alone=alone)

    @property
    def journal(self) -> Ledger | AccountantClient:
        assert self.ledger is not None, "private prediction always has a ledger"
        return self.ledger

    def perform(self) -> None:
        done = self._decoded()
        parts = count()
        while missing := self._missing():
            before = done.batches
            self._decode(missing, done, parts)
            if done.batches == before:
                raise DprayError("some batches were not decoded; the same command goes on")

    def _decode(self, missing: list[str], done: Decoded, parts: Iterator[int]) -> None:
        """Decode and publish these batches; a part of the output is named by its number."""
        before, began = done.tokens, monotonic()
        total = done.batches + len(missing)
        self._show(done, total, 0.0)
        decode: Decode = decode_locally if self.in_process else decode_on_ray
        load = self.take_engine if self.in_process else self.load_engine
        attempt = Attempt(self.id, self.attempt_id)
        decoded = decode(self.plan, self.journal, attempt, missing, load)
        # Closed at once where a batch was lost: the engine has to go before the next one comes.
        with closing(decoded):
            for outcomes in decoded:
                for outcome in self._publish(next(parts), outcomes):
                    self._add(done, outcome)
                speed = (done.tokens - before) / max(monotonic() - began, 1e-9)
                self._show(done, total, speed)

    def _show(self, done: Decoded, total: int, speed: float) -> None:
        words = [f"{done.examples} texts"]
        if speed:
            words.append(f"{speed:.0f} tokens/s")
        if done.tokens:
            words.append(f"{done.private_tokens / done.tokens:.0%} private")
        words.append(f"eps {self.plan.cost.epsilon:.3f} (charged)")
        self.on_progress(Progress("batches", done.batches, total, ", ".join(words)))

    def _decoded(self) -> Decoded:
        done = Decoded()
        for outcome in self.folder.published_records():
            self._add(done, outcome)
        return done

    def _add(self, done: Decoded, outcome: dict[str, Any]) -> None:
        done.add(outcome, sum(1 for _ in self._records(outcome)))

    def _missing(self) -> list[str]:
        """Return the batches to decode now, in the partition's order: all that are not decoded, or,
        for fewer records than batches, as many as are expected to give the missing records.

        A batch may give none, because its text was empty or not finished. What it gave is released,
        so what is decoded next is a public choice, and the batches still compose in parallel.
        """
        done = {batch for batch, _ in self.journal.published(self.id)}
        failed = dict(self.journal.failed(self.id))
        if failed:
            batch, (_, reason) = next(iter(failed.items()))
            raise DprayError(
                f"batch {batch} failed with {reason} (and {len(failed) - 1} more with it); a batch "
                f"that raised itself, or for which the memory did not suffice, is never repeated, "
                f"so this run cannot be finished; its charge stays spent"
            )
        if self.config.privacy.lost_batches == "drop":
            done |= {batch for batch, _ in self.journal.unfinished(self.id)}
        missing = [batch for batch in self.plan.partition.batch_ids() if batch not in done]
        most = self.plan.settings.max_records
        if most is None or self.plan.batches_decoded == self.plan.partition.num_batches:
            return missing
        given = self._decoded()
        # One batch that gave a record is assumed beside those that are known.
        share = (given.records + 1) / (given.batches + 1)
        return missing[: max(0, math.ceil((most - given.records) / share))]

    def unfinished(self, why: str) -> Resumable:
        published = self._published()
        total = max(published, self.plan.batches_decoded)
        return super().unfinished(f"{why}: {published} of {total} batches are published")

    def _publish(self, number: int, outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Publish a task's whole batches. Raises DprayError for a failed one, which ends the run,
        and EngineError for one that was lost with its engine."""
        whole = [outcome for outcome in outcomes if "examples" in outcome]
        if whole:
            name = f"{self.attempt_id}-{number:08d}.jsonl"
            sha = self.folder.stage(name, whole)
            releases = [(outcome["batch"], sha) for outcome in whole]
            self.journal.publish_many(self.id, self.attempt_id, releases)
            self.folder.publish(name)
        if any("failed" in outcome for outcome in outcomes):
            self._missing()
        for outcome in outcomes:
            if "lost" in outcome:
                raise EngineError(outcome["lost"])
        return whole

    def released(self) -> Iterator[dict[str, Any]]:
        """The published batches' records, `method.max_records` of them at most: the first of every
        batch in the partition's order, then the second of every batch, and so on.

        When a batch was done depends on how many private rows it and its neighbours have, and no
        epsilon covers that: the order is made here, from what is public. Holds all outcomes.
        """
        place = {batch: n for n, batch in enumerate(self.plan.partition.batch_ids())}
        outcomes = sorted(self.folder.published_records(), key=lambda o: place[o["batch"]])
        rounds: Iterable[tuple[Any, ...]] = zip_longest(*map(self._records, outcomes))
        records = (record for one_each in rounds for record in one_each if record is not None)
        return islice(records, self.plan.settings.max_records)

    def _records(self, outcome: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A batch's records, in the order they were drawn; an empty text is no record."""
        label = self.plan.partition.label_of(outcome["batch"])
        for completion, finish_reason, tokens in outcome["examples"]:
            if text := self.plan.template.released(completion):
                yield {
                    "text": text,
                    "label": label or None,
                    "batch": outcome["batch"],
                    "finish_reason": finish_reason,
                    "tokens": tokens,
                }

    def method_report(self) -> dict[str, Any]:
        done, settings = self._decoded(), self.plan.settings
        return {
            "batches": self._batch_counts() | {"missing": self._published() - done.batches},
            "tokens": {"total": done.tokens, "private": done.private_tokens},
            "llm_calls": done.examples * (settings.batch_size + 1),
            "sampling": {
                "batches": "disjoint, by a keyed hash of the unit's id; expected size "
                f"{settings.batch_size}; parallel composition over batches",
                "copies": self._copies(),
                "tokens": "softmax of the clipped mean of logits (exponential mechanism)",
                "candidates": CANDIDATES if self.plan.cuts_candidates else "all tokens",
            },
            "numerics": {"dtype": self.config.engine.dtype, "row_variation": done.row_variation},
            "public_inputs": {"template": settings.template},
            "not_covered": [*NOT_COVERED, *self._rounding(done.row_variation)],
            "noise_source": NOISE_SOURCE,
        }

    def _rounding(self, variation: float | None) -> list[str]:
        """Say how far c / s is not claimed, by what was measured where the model ran."""
        if variation is None:
            return self.plan.rounding
        if variation == 0.0:
            return []
        return [
            f"a row's logits moved by up to {variation:.1e} with the other rows of its forward "
            f"pass, in {self.config.engine.dtype} (measured with public prompts where the model "
            "ran): the sensitivity c / s is claimed up to that"
        ]

    def _copies(self) -> str:
        if self.config.data.unit is not None:
            return "a unit's records are bounded, copies of one text are not"
        return f"of each text with its label, {self.plan.settings.max_copies} are used at most"

    def _published(self) -> int:
        published = self.journal.counts(self.id)["published"]
        return published - (self.plan.label_histogram is not None)

    def _batch_counts(self) -> dict[str, int]:
        starts = Counter(batch for batch, _ in self.journal.started(self.id))
        starts.pop("labels", None)
        unfinished = {batch for batch, _ in self.journal.unfinished(self.id)}
        return {
            "total": self.plan.partition.num_batches,
            "published": self._published(),
            "repeated": sum(1 for count in starts.values() if count > 1),
            "dropped": len(unfinished),
            "failed": self.journal.counts(self.id)["failed"],
        }

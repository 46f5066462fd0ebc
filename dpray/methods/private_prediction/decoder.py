"""`BatchDecoder` does an engine actor's work, without Ray: whole batches become synthetic texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import starmap
from uuid import uuid4

from dpray.engines.base import Engine, EngineError, LockstepResult, failure_name
from dpray.engines.schema.forms import forced_tokens
from dpray.ledger.ledger import RunLedger
from dpray.mechanisms.randomness import named_key
from dpray.methods.private_prediction.algorithm import Batch, BatchPrompts, BatchState
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.prompts import (
    after_sections,
    encode_private,
    shown_examples,
)
from dpray.methods.private_prediction.sections import sections_of
from dpray.types import LedgerError
from dpray.workers.failures import is_own_failure
from dpray.workers.gathering import Outcome, batch_texts
from dpray.workers.rows import Row

MOST_COPIES = 4
"""The most copies of a text with its label that are used if a record is its own unit."""


def bound_copies(rows: Iterable[Row]) -> list[Row]:
    """Return at most `MOST_COPIES` rows of each record, and all placeholders.

    One more copy adds at most one row and takes none away, so a record still moves a batch by one
    row. All copies of a text join one batch, which takes longer the more copies there are.
    """
    seen: Counter[str] = Counter()
    kept = []
    for row in rows:
        seen[row["unit"]] += row["text"] is not None
        if row["text"] is None or seen[row["unit"]] <= MOST_COPIES:
            kept.append(row)
    return kept


class BatchDecoder:
    """Decodes whole batches, with all of their rows, however many there are. A batch of the next
    task begins as soon as the engine has room for it.

    The ledger records that a task's batches begin. It also records which of them failed: those that
    were running at any error that is not on the short list of what may be repeated.
    `key` is the run's charge in the ledger, and `coins` the secret key of its coins. Each decoder
    has an id of its own there and decodes a batch once. If another decoder takes over lost batches,
    the ledger has both attempts, and they have the same coins.
    """

    def __init__(
        self,
        plan: PrivatePredictionPlan,
        ledger: RunLedger,
        key: str,
        attempt_id: str,
        coins: str,
        engine: Engine,
    ) -> None:
        self.plan, self.ledger, self.key, self.engine = plan, ledger, key, engine
        self._coins = coins
        self.worker_id = f"{attempt_id}.{uuid4().hex[:16]}"
        self._room = engine.context_length - plan.settings.document_tokens
        try:
            if plan.form is not None:
                forced_tokens(plan.form, plan.settings.max_tokens)  # refuses one that does not fit
            self._row_variation = plan.row_variation(engine)
        except BaseException:
            engine.close()  # the next attempt's engine needs its memory
            raise

    def work(self, tasks: Iterable[list[Row]]) -> Generator[Outcome]:
        """Yield one outcome per batch, as soon as it is whole: `{batch, examples, private_tokens,
        tokens, row_variation}`; or, if something raised, `{batch, failed}` for each batch that was
        still running, with the name of the error's class (its text could hold private text).

        `tasks` holds the rows of each task. An error of the ledger that stops the next task from
        beginning is raised when the running batches are whole. Raises at once InputError for a
        template that does not fit the model, and EngineError if the engine failed and the running
        batches may be run again.
        """
        running: set[str] = set()
        refused: list[Exception] = []
        batches = starmap(self._encoded, self._begun(tasks, running, refused))
        stopped: BaseException | None = None
        with closing(self.plan.method.decode(self.engine, batches)) as decoded:
            try:
                for state in decoded:
                    running.remove(state.S.batch_id)
                    yield self._outcome(state)
            except BaseException as error:
                stopped = error
        if stopped is not None and not is_own_failure(stopped):
            raise stopped
        for batch_id in sorted(running):
            yield self._failure(batch_id, stopped)
        if refused:
            raise refused[0]

    def _begun(
        self, tasks: Iterable[list[Row]], running: set[str], refused: list[Exception]
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the batches and their texts, after a task's batches have begun in the ledger; they
        are `running` until they are decoded. If a task cannot begin, no other one does, and the
        error is `refused`: the batches that are running go on."""
        try:
            for rows in tasks:
                if self.plan.disjoint and self.plan.config.data.unit is None:
                    rows = bound_copies(rows)
                texts = batch_texts(rows)
                self.ledger.begin(self.key, self.worker_id, list(texts))
                running.update(texts)
                yield from texts.items()
        except Exception as error:
            refused.append(error)

    def _encoded(self, batch_id: str, texts: list[str]) -> Batch:
        """Put a batch's texts into prompts, section by section, and these into tokens.

        Claim: a section's prompts are one for each record of the batch, in the same order, a
        function of that record, the label and what is written. Proof: docs/privacy.md, 2.11.
        """
        engine, settings, K = self.engine, self.plan.settings, self.plan.settings.sections
        label = self.plan.batches.label_of(batch_id)
        template = self.plan.template.of_batch(label, batch_id)
        shown_texts = shown_examples(engine, template, label, batch_id, self._room)
        sections = [
            [engine.truncate(each, settings.max_prompt_tokens) for each in sections_of(text, K)]
            for text in texts
        ]

        def following(written: Sequence[LockstepResult]) -> BatchPrompts:
            number = len(written)
            before = template.joined([(x.text, x.finish_reason == "length") for x in written])
            examples = shown_texts[number]
            most = settings.document_tokens - settings.max_tokens
            shown = after_sections(engine, template, label, examples, before, most)
            private = (
                encode_private(engine, shown, each[number], label, examples, self._room + most)
                for each in sections
            )
            return tuple(private), engine.encode(shown.public_prompt(label, examples))

        key = named_key(self._coins, "draws", self.key, batch_id)
        return Batch(batch_id, *following(()), key, None if K == 1 else following)

    def _outcome(self, state: BatchState) -> Outcome:
        return {
            "batch": state.S.batch_id,
            "examples": [[x.text, x.finish_reason, len(x.token_ids)] for x in state.X],
            "private_tokens": state.t,
            "tokens": state.tokens,
            "row_variation": self._row_variation,
        }

    def _failure(self, batch_id: str, error: BaseException | None) -> Outcome:
        """Record that a batch that was still running has failed."""
        reason = "BatchNotDecoded" if error is None else failure_name(error)
        try:
            self.ledger.fail(self.key, batch_id, self.worker_id, reason)
        except LedgerError:  # the driver records it, once it has made room
            raise EngineError(f"a batch failed ({reason})") from None
        return {"batch": batch_id, "failed": reason}

    def close(self) -> None:
        self.engine.close()

"""`BatchDecoder` does an engine actor's work, without Ray: it turns whole batches into their
outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from uuid import uuid4

from dpray.engines.base import Engine, failure_name, may_be_repeated
from dpray.engines.row_variation import row_variation
from dpray.engines.text import TextCodec
from dpray.ledger.ledger import Ledger
from dpray.methods.private_prediction.algorithm import Batch, BatchOutput
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.methods.private_prediction.resolved import PrivatePredictionPlan
from dpray.types import DprayError, InputError
from dpray.workers.groups import Outcome
from dpray.workers.rows import Row


class BatchDecoder:
    """Decodes the batches of one task after the other, without waiting for the last batch of a task
    before it begins the next one: notes in the ledger that a task's batches begin, runs them, and
    notes as failed those that were under way when the mechanism or our own code raised, or the
    memory did not suffice (they are never repeated). `key` is the run's charge in the ledger. A
    batch is decoded with all of its rows, however many there are.

    A decoder decodes a batch once, and has an id of its own in the ledger: where another one takes
    over what was lost with this one, in the same attempt at the run, the ledger knows of both."""

    def __init__(
        self,
        plan: PrivatePredictionPlan,
        ledger: Ledger,
        key: str,
        attempt_id: str,
        load: Callable[[], Engine],
    ) -> None:
        self.plan, self.ledger, self.key = plan, ledger, key
        self.attempt_id = f"{attempt_id}.{uuid4().hex[:16]}"
        self.engine = engine = load()
        # With public prompts, before a private one is here.
        try:
            self._row_variation = row_variation(engine, plan.settings.expected_batch_size)
        except BaseException:
            engine.close()  # the next attempt's engine needs its memory
            raise
        self._room = engine.context_length - plan.method.max_tokens

    def work(self, tasks: Iterable[Iterable[Row]]) -> Generator[Outcome]:
        """Yield one outcome per batch, as soon as it is whole: `{batch, examples, private_tokens,
        tokens, row_variation}`; or, of those under way when something raised, `{batch, failed}`
        with the name of the error's class (its text could hold private text).

        `tasks` holds the rows of each task. What comes in the way of the next task, an error of the
        ledger, is raised when the batches under way are whole. Raises at once InputError for a
        template that does not fit the model, and EngineError where the engine failed and the
        batches under way may be run again.
        """
        under_way: set[str] = set()
        not_begun: list[Exception] = []
        stopped: Exception | None = None
        batches = self._batches(self._begun(tasks, under_way, not_begun))
        with closing(self.plan.method.decode(self.engine, batches)) as outputs:
            try:
                for output in outputs:
                    under_way.remove(output.batch_id)
                    yield self._outcome(output)
            except Exception as error:
                stopped = error
        yield from self._left(sorted(under_way), stopped)
        if not_begun:
            raise not_begun[0]

    def _begun(
        self, tasks: Iterable[Iterable[Row]], under_way: set[str], not_begun: list[Exception]
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield each batch with its texts, after the ledger knows that its task begins. Where a
        task cannot begin, keep the error and end: the batches under way go on."""
        try:
            for rows in tasks:
                if self.plan.disjoint and self.plan.config.data.unit is None:
                    rows = bound_copies(rows, self.plan.settings.max_copies)
                texts = group_rows(rows)
                self.ledger.begin(self.key, self.attempt_id, list(texts))
                under_way.update(texts)
                yield from texts.items()
        except Exception as error:
            not_begun.append(error)

    def _outcome(self, output: BatchOutput) -> Outcome:
        return {
            "batch": output.batch_id,
            "examples": [[e.text, e.finish_reason, e.tokens] for e in output.examples],
            "private_tokens": output.private_tokens,
            "tokens": output.tokens,
            "row_variation": self._row_variation,
        }

    def _left(self, batches: Iterable[str], stopped: Exception | None) -> Iterator[Outcome]:
        """Say what becomes of the batches that were under way."""
        if isinstance(stopped, DprayError) or may_be_repeated(stopped):
            raise stopped
        for batch_id in batches:
            reason = "BatchNotDecoded" if stopped is None else failure_name(stopped)
            self.ledger.fail(self.key, batch_id, self.attempt_id, reason)
            yield {"batch": batch_id, "failed": reason}

    def close(self) -> None:
        self.engine.close()

    def _batches(self, texts: Iterable[tuple[str, list[str]]]) -> Iterator[Batch]:
        for batch_id, private in texts:
            label = self.plan.batches.label_of(batch_id)
            template = self.plan.template.of_batch(label, batch_id)
            examples = shown_examples(self.engine, template, label, batch_id, self._room)
            yield Batch(
                batch_id,
                tuple(
                    encode_private(
                        self.engine,
                        template,
                        self.engine.truncate(text, self.plan.settings.max_prompt_tokens),
                        label,
                        examples,
                        self._room,
                    )
                    for text in private
                ),
                self.engine.encode(template.public_prompt(label, examples)),
            )


def shown_examples(
    engine: Engine | TextCodec, template: PromptTemplate, label: str, batch: str, room: int
) -> Sequence[str]:
    """Return the public texts that the prompts of a batch show: fewer than were drawn where the
    prompt would take more than half of `room` without its private text."""
    examples = template.examples(label, batch)
    while examples and 2 * len(_frame(engine, template, label, examples)) > room:
        examples.pop()
    return examples


def _frame(
    engine: Engine | TextCodec, template: PromptTemplate, label: str, examples: Sequence[str]
) -> tuple[int, ...]:
    return engine.encode(template.private_prompt("", label, examples))


def encode_private(
    engine: Engine,
    template: PromptTemplate,
    text: str,
    label: str,
    examples: Sequence[str],
    room: int,
) -> tuple[int, ...]:
    """Return a private prompt's tokens, its text cut so that they are at most `room`: a rule on
    this text alone."""
    most = max(room - len(_frame(engine, template, label, examples)), 0)
    while True:
        prompt = template.private_prompt(engine.truncate(text, most), label, examples)
        tokens = engine.encode(prompt)
        if len(tokens) <= room:
            return tokens
        if most == 0:
            raise InputError(
                "method.template: the prompt leaves no room in the model's context for a text "
                "of method.max_tokens"
            )
        most -= min(most, max(len(tokens) - room, 8))


def bound_copies(rows: Iterable[Row], most: int) -> Iterator[Row]:
    """Yield at most `most` rows of each record, and all place-holders.

    One more copy adds at most one row and takes none away, so a record still moves a batch by one
    row. Without this bound the copies of a frequent text, which all have one batch, fill it beyond
    what an engine holds.
    """
    seen: Counter[str] = Counter()
    for row in rows:
        if row["text"] is not None:
            seen[row["unit"]] += 1
            if seen[row["unit"]] > most:
                continue
        yield row


def group_rows(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the texts of each batch. Every batch has to come with its one place-holder: without
    it, the rows are a part of a batch, and a part must not be decoded as if it were whole."""
    texts: dict[str, list[str]] = {}
    places: list[str] = []
    for row in rows:
        members = texts.setdefault(row["batch"], [])
        if row["text"] is None:
            places.append(row["batch"])
        else:
            members.append(row["text"])
    if sorted(places) != sorted(texts):
        raise RuntimeError("a batch did not arrive whole")
    return texts

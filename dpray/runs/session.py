"""A method's `release` gets a session, the one way to run a mechanism.

    def release(session: Session[SomePlan]) -> Release:
        with session.shards(MyWorker) as shards:
            noisy = session.publish_once("votes", noisy_counts, shards)
        with session.language_model() as ask:
            texts = ask(requests(noisy))
        return Release([{"text": text} for text in texts], MethodPart(noise_source="..."))

`release` runs from top to bottom, and from the top again after a crash: what it published is there
then, what the language model answered is in a cache, and all else is computed again.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from dpray.config.config import Config
from dpray.engines.base import Engine, EngineError, TextGenerator
from dpray.engines.rates import Rates
from dpray.engines.requests import Ask, Request
from dpray.io.files import DISK_FULL, disk_is_full, make_private, owners_only, write_durably
from dpray.ledger.ledger import RunLedger
from dpray.mechanisms.randomness import SecretKey, generator, named_key, new_key
from dpray.runs.call_cache import CALLS, CallCache, ask_cached
from dpray.runs.folder import EMBEDDINGS, ReleaseFolder
from dpray.runs.plan import Histogram, Plan, label_histogram
from dpray.runs.privacy_report import Calls, MethodPart
from dpray.types import (
    WARNING,
    AlreadyPublished,
    DprayError,
    InputError,
    Json,
    LedgerFull,
    LedgerUnavailable,
    OnProgress,
    Progress,
    Resumable,
    RunFailed,
)
from dpray.workers.engine import BuildEngine, after_trial
from dpray.workers.engine_pool import EnginePool, on_pool
from dpray.workers.failures import FAIL, RESUME, Kind, class_name, kind_of
from dpray.workers.metrics import RunMetrics, SetMetric, no_metrics
from dpray.workers.rows import Row, data_files, record_rows
from dpray.workers.shards import Shards, Voters, W

LOSSES = "losses.jsonl"
"""The file in `private` that has the causes of repeats."""

FAILURES = "failures.jsonl"
"""The file in `private` that has failures which the ledger does not know yet."""

P_co = TypeVar("P_co", bound=Plan, covariant=True)
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Release:
    """The release of a method. `records` have a `text` and a `label`; `report` is the method's own
    part of the privacy report. The files in the folder `model` are released with the report."""

    records: Iterable[Json]
    report: MethodPart
    model: Path | None = None


@dataclass(eq=False)
class Session(Generic[P_co]):
    """One attempt at a run that was charged.

    `plan` is the plan that was charged, with the measured label proportions, if any. `salt` is
    public and the same in all attempts at a run; `attempt_id` is not. Workers that begin units
    themselves have ids of their own that begin with it.
    """

    plan: P_co
    folder: ReleaseFolder
    ledger: RunLedger
    run_id: str
    salt: str
    on_progress: OnProgress
    build: BuildEngine
    engine: Engine | None = None
    """The engine that was loaded before the charge, until it is taken."""
    record: SetMetric = no_metrics
    attempt_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    resume_hint: str = DprayError.resume_hint
    """Set on an error that ends the run: how to continue, and the cost."""
    charged: float | None = None
    """The epsilon that was charged, if it is more than the plan's."""
    time_to_expect: str = ""
    """The most time that the model's work takes by public numbers, in words."""
    left_out: set[str] = field(default_factory=set)
    """The parameters that an endpoint's model did not know."""
    _activity: str = field(default="", init=False)
    _seconds_asked: float = field(default=0.0, init=False)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def in_process(self) -> bool:
        """Return whether the run uses this process only, without Ray."""
        return not self.config.runtime.uses_ray

    def charge_key(self, name: str = "") -> str:
        """Return the ledger's key of the run's charge, or of a later one with a name."""
        return f"{self.run_id}/{name}" if name else self.run_id

    @property
    def has_begun(self) -> bool:
        """Return whether a mechanism of the run has begun, in any attempt."""
        return self.folder.has_output() or bool(self.ledger.counts(self.charge_key())["started"])

    def public_generator(self, name: str) -> np.random.Generator:
        """Return a generator of public randomness, the same in every attempt at the run."""
        return generator(named_key(self.salt, name))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Recover the folder from a crash, record what failed before, and take room on the disk for
        what will be drawn, until the attempt ends."""
        published = {sha for _, (_, sha) in self.ledger.published(self.charge_key())}
        self.folder.recover(lambda sha: self.config.not_private or sha in published)
        self.record_failures()
        try:
            self.folder.take_room()
            yield
        finally:
            self.folder.give_room()

    def note_loss(self, attempt_id: str, error: BaseException) -> None:
        """Note why what an attempt or one of its workers had begun will begin again, for the count
        of the report. What no note tells was interrupted."""
        line = json.dumps({"attempt": attempt_id, "cause": kind_of(error).loss}) + "\n"
        path = self.folder.private / LOSSES
        # Such as a full disk: a loss may not become a failure by its note.
        with suppress(OSError), open(path, "a", opener=owners_only) as file:
            file.write(line)

    def losses(self) -> dict[str, str]:
        """Return the cause of each loss that was noted, by the attempt's or the worker's id."""
        path = self.folder.private / LOSSES
        lines = path.read_text().splitlines() if path.exists() else []
        noted = (json.loads(line) for line in lines if line.endswith("}"))
        return {each["attempt"]: each["cause"] for each in noted}

    def note_failure(self, begun_by: str, reason: str) -> None:
        """Note durably, while the ledger gives no answer, that what an attempt or a worker of this
        id had begun has failed. `record_failures` records it when the run goes on."""
        path = self.folder.private / FAILURES
        before = path.read_text() if path.exists() else ""
        line = json.dumps({"begun_by": begun_by, "reason": reason})
        write_durably(path, f"{before}{line}\n", private=True)

    def record_failures(self) -> None:
        """Record in the ledger the failures that were noted, before anything begins again."""
        path = self.folder.private / FAILURES
        if not path.exists():
            return
        for line in path.read_text().splitlines():
            noted = json.loads(line)
            self.fail_unfinished(noted["begun_by"], noted["reason"])
        path.unlink()

    def fail_unfinished(self, begun_by: str, reason: str) -> None:
        """Record as failed what an attempt or a worker with this id had begun and not published."""
        for unit, attempt in list(self.ledger.unfinished(self.run_id)):
            if attempt.startswith(begun_by):
                self.ledger.fail(self.run_id, unit, attempt, reason)

    def secret_key(self, name: str, tosses: Callable[[str], bool], lost: str) -> SecretKey:
        """Return the key of the secret coins of the run, which is kept in a file of that name in
        `private`: the same in every attempt. Before a unit that `tosses` these coins has begun it
        is replaced: one that lies there may be another run's, as in a copied folder, and two runs
        with the same coins cost more than both. Raises InputError if the file is missing later,
        with what is `lost`, or if it holds something else."""
        path = self.folder.private / name
        if not any(tosses(unit) for unit, _ in self.ledger.started(self.charge_key())):
            write_durably(path, new_key(), private=True)
        elif not path.exists():
            raise InputError(
                f"output.path: {path} is missing, so that {lost}; put it back, or choose "
                "another folder"
            )
        key = path.read_bytes().strip()
        # An empty key, of an empty file, would let everybody draw the coins.
        if not re.fullmatch(rb"[0-9a-f]{64}", key):
            raise InputError(
                f"output.path: {path} does not hold a key; put back the one that was there"
            )
        return SecretKey(key.decode("ascii"))

    @cached_property
    def metrics(self) -> RunMetrics:
        config = self.config
        tags = {"run": self.run_id, "dataset": config.privacy.dataset, "method": config.method.name}
        return RunMetrics(self.record, tags)

    def show(
        self,
        activity: str,
        completed: int = 0,
        total: int | None = None,
        detail: str = "",
        tokens_per_second: float | None = None,
    ) -> None:
        """Report progress, in public quantities, and the epsilon that was charged."""
        self._activity = activity
        cost = "not private"
        if not self.plan.config.not_private:
            epsilon = self.plan.cost.epsilon if self.charged is None else self.charged
            cost = f"eps {epsilon:.3f} (charged)"
        detail = ", ".join(filter(None, [detail, cost, self.time_to_expect]))
        self._show(Progress(activity, completed, total, detail, tokens_per_second))

    def warn(self, words: str) -> None:
        """Tell a warning about what is public."""
        self._tell(Progress(WARNING, detail=words))

    def _show(self, progress: Progress) -> None:
        self.metrics.progress(progress)
        self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        """Raises Resumable if the caller's function raises: no mechanism failed by that."""
        try:
            self.on_progress(progress)
        except DprayError:
            raise
        except Exception as error:
            raise Resumable(f"on_progress raised {type(error).__name__}") from error

    # Mechanisms

    def check_records(self) -> None:
        """Read every record once, and keep none, if the plan asks for it and nothing has begun.
        Raises InputError that names the row."""
        if self.plan.reads.checked_first and not self.has_begun:
            self.show("checking records")
            for part in data_files(self.config.data):
                for _ in record_rows(part, self.config.data, self.plan.reads.column_values):
                    pass

    def published(self, unit: str) -> Json | None:
        """Return the output of a mechanism of the plan, or None before it is published."""
        return self.folder.published_output(f"{unit}.json")

    def publish_once(
        self,
        unit: str,
        mechanism: Callable[[*Arguments], dict[str, object]],
        *arguments: *Arguments,
        pays_for_repeats: bool = False,
    ) -> Json:
        """Return the output of one mechanism of the plan, which the ledger begins and which is run
        with these arguments and published once.

        An output that was published before is returned as it is. A mechanism that was interrupted,
        or lost for a reason on the short list (`dpray.workers.failures.Kind`), before it published
        runs again: nobody has seen its output. After any other error it never runs again, unless it
        `pays_for_repeats` and the table says that the run goes on. Errors of the input have to be
        found before: once a run has begun, neither the records nor the configuration may be
        corrected.
        """
        if (found := self.published(unit)) is not None:
            return found
        charge_key = self.charge_key()
        self._refuse_failed(unit)
        self.ledger.begin(charge_key, self.attempt_id, [unit])
        try:
            self.publish_file(f"{unit}.json", {unit: mechanism(*arguments)})
        except BaseException as error:
            kind = kind_of(error)
            goes_on = kind.drawing is FAIL and kind.otherwise is RESUME
            # What does not fit its machines ends here, and does not pay by itself again and again.
            if pays_for_repeats and (goes_on or kind is Kind.MEMORY):
                if isinstance(error, DprayError):
                    raise
                raise Resumable(kind.sentence(error)) from error
            if kind.drawing is FAIL:
                self.folder.give_room()  # the ledger may be on the same full disk
                try:
                    self.ledger.fail(charge_key, unit, self.attempt_id, class_name(error))
                except AlreadyPublished:
                    pass  # it failed just after that
                except LedgerUnavailable:
                    self.note_failure(self.attempt_id, class_name(error))
            raise
        released = self.published(unit)
        assert released is not None
        return released

    def publish_file(self, file: str, outputs: Mapping[str, dict[str, object]]) -> None:
        """Publish the outputs of units that have begun, given by unit: stage them in one file,
        commit them in the ledger, and publish the file.

        On a full disk that takes the room which was taken before they were drawn. Then it raises
        Resumable: with them published, the attempt ends. Proof: docs/privacy.md, section 2.7.
        """
        try:
            self._publish(file, outputs)
        except (OSError, LedgerFull) as error:
            if not (disk_is_full(error) and self.folder.give_room()):
                raise
            self._publish(file, outputs)
            raise Resumable(DISK_FULL) from error

    def _publish(self, file: str, outputs: Mapping[str, dict[str, object]]) -> None:
        sha = self.folder.stage(file, outputs.values())
        units = [(unit, sha) for unit in outputs]
        self.ledger.publish(self.charge_key(), self.attempt_id, units)
        self.folder.move_to_parts(file)

    def _refuse_failed(self, unit: str) -> None:
        failed = dict(self.ledger.failed(self.charge_key()))
        if unit in failed:
            raise RunFailed(
                f"{unit} failed with {failed[unit][1]}; a mechanism that failed by itself is never "
                "repeated: this run cannot be finished"
            )

    def measure_labels(self) -> None:
        """Replace the assumed label proportions of a plan that measures them, and give it the
        shares of combinations with the attributes."""
        if (histogram := label_histogram(self.config)) is None:
            return
        output = self.published("labels")
        if output is None:
            self.show("counting labels")
            with self.shards(LabelCounter) as shards:
                output = self.publish_once("labels", noisy_labels, shards, histogram)
        proportions, joint = histogram.measured(output)
        self.plan = replace(self.plan, proportions=proportions, joint=joint)

    def drawn_values(self, label: str, texts: int) -> Sequence[dict[str, str]]:
        """Return the attributes of each of a label's texts, the same in every attempt at the run:
        of `Plan.drawn_values`, with public randomness."""
        rng = self.public_generator(f"attributes-{label}")
        return self.plan.drawn_values(label, texts, rng)

    # Private records

    def shards(
        self,
        worker: Callable[[Config, *Arguments], W],
        *arguments: *Arguments,
        config: Config | None = None,
        gpus: float = 0.0,
    ) -> closing[Shards[W]]:
        """Return workers that together hold all private records; `config` gives them other
        resources."""
        return closing(Shards(config or self.config, worker, *arguments, gpus=gpus))

    def voters(self, config: Config | None = None, gpus: float = 0.0) -> closing[Shards[Voters]]:
        """Return shards of the private records' embeddings, which are kept for another attempt."""
        folder = self.folder.private.resolve() / EMBEDDINGS / self.run_id
        make_private(folder)
        return self.shards(Voters, str(folder), config=config, gpus=gpus)

    # Models

    @property
    def load_engine(self) -> Callable[[], Engine]:
        """Return the function that builds the run's engine; it can be sent to an actor."""
        return self.plan.loader(after_trial(self.build))

    def take_engine(self) -> Engine:
        """Return the engine that was loaded before the charge, and from the second call on a new
        one. The caller closes it."""
        engine, self.engine = self.engine, None
        return self.load_engine() if engine is None else engine

    @contextmanager
    def language_model(self, config: Config | None = None) -> Iterator[Ask]:
        """Yield an `Ask` of the run's model, or of the engine of `config`.

        A local model of a run on Ray is in actors; any other is used from this process, which is
        all that an endpoint needs. Finished texts are cached, so that each is generated once.
        Raises Resumable if the model fails, or writes nothing.
        """
        try:
            with closing(self._generator(config)) as engine:

                def ask(requests: Sequence[Request]) -> list[str]:
                    activity, done, tokens, began = self._activity, 0, 0, monotonic()

                    def on_completion(written: int) -> None:
                        nonlocal done, tokens
                        done, tokens = done + 1, tokens + written
                        # Of the first one, most of the time may be the start of the engines.
                        speed = tokens / max(monotonic() - began, 1e-9) if done > 1 else None
                        name, total = f"{activity}: LLM calls", len(requests)
                        self._show(Progress(name, done, total, tokens_per_second=speed))

                    try:
                        return ask_cached(engine, self._calls, requests, on_completion)
                    finally:
                        self._seconds_asked += monotonic() - began

                yield ask
                self._calls.check_texts()
                self.left_out.update(getattr(engine, "left_out", ()))
        except EngineError as error:
            raise Resumable(str(error)) from None

    def _generator(self, config: Config | None) -> TextGenerator:
        config = config or self.config
        is_tried = config.engine == self.config.engine
        if on_pool(config):
            return EnginePool(config, after_trial(self.build) if is_tried else self.build)
        return self.take_engine() if is_tried else self.build(config.engine)

    @cached_property
    def _calls(self) -> CallCache:
        return CallCache(self.folder.private / CALLS)

    @property
    def rates(self) -> Rates | None:
        """Return the rates of one engine in this attempt's calls; None without calls, or if an
        endpoint counts no tokens.

        Claim: they depend on no private record beyond what the mechanisms released: the calls are
        post-processing, and only the time of calls is counted. Proof: docs/privacy.md, section 7.6.
        """
        if not self._seconds_asked:
            return None
        _, prompts, written = self._calls.totals(since_opened=True).values()
        if not (prompts and written):
            return None
        engines = self.config.runtime.actors if on_pool(self.config) else 1
        seconds = self._seconds_asked * engines
        return Rates(prompts / seconds, written / seconds, together=True)

    @property
    def calls(self) -> Calls:
        """Return the calls and tokens of the language model in all attempts at the run."""
        return Calls(**self._calls.totals())

    def close(self) -> None:
        """Close the engine that nobody took, and the file of calls."""
        if self.engine is not None:
            self.engine.close()
        if "_calls" in vars(self):
            self._calls.close()


class LabelCounter:
    """A shard's exact counts of labels, or of pairs of attributes, which are private."""

    def __init__(self, config: Config) -> None:
        histogram = label_histogram(config)
        assert histogram is not None
        self._histogram = histogram
        self._counts_N = histogram.count(())

    def load(self, rows: Sequence[Row]) -> None:
        self._counts_N += self._histogram.count_rows(rows)

    def counts(self) -> npt.NDArray[np.int64]:
        return self._counts_N


def noisy_labels(shards: Shards[LabelCounter], histogram: Histogram) -> dict[str, object]:
    """Return the noisy counts of the `LabelCounter`s, and the shares that follow from them; this is
    the one run of the histogram's mechanism."""
    return histogram.released(histogram(np.sum(shards.each(LabelCounter.counts), axis=0)))

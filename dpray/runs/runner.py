"""The runner takes a run of any method from its plan to its release. The order is the guarantee:
charge, make it durable, begin a mechanism, run it, stage its output, commit that in the ledger,
publish it.

`Session.publish_once` and the methods' `release` decide what runs again after a crash, and
`dpray.workers.pool` what another actor takes over: what is published is kept; what was lost
with its machine, by an interruption or because a model failed is repeated or dropped as
`privacy.lost_batches` says (a training pays for what it repeats); a mechanism that raised itself,
or for which the memory did not suffice, is never run again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from dpray.accounting.composition import Charge
from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.engines.base import Engine
from dpray.io.digests import file_digests, fingerprint
from dpray.io.files import disk_is_full, write_durably
from dpray.ledger.errors import MissingLedger
from dpray.ledger.ledger import Ledger
from dpray.ledger.protocol import NullLedger, RunLedger
from dpray.mechanisms.randomness import new_salt
from dpray.runs.call_cache import CALLS, forget_calls
from dpray.runs.folder import CONFIG, ReleaseFolder
from dpray.runs.plan import Plan, privacy_unit, try_model
from dpray.runs.privacy_report import privacy_report, versions
from dpray.runs.public_names import public_config
from dpray.runs.session import Release, Session
from dpray.runs.standing import DISK_FULL, Standing
from dpray.types import (
    Budget,
    BudgetRefused,
    DprayError,
    InputError,
    OnProgress,
    Progress,
    Resumable,
    RunFailed,
)
from dpray.workers import cluster
from dpray.workers.accountant import AccountantClient, count_refusal
from dpray.workers.engine import BuildEngine
from dpray.workers.metrics import nowhere, on_ray, rays_exporter
from dpray.workers.placement import gpus_of_cluster, resolve_gpus
from dpray.workers.rows import check_first_records

DATA_FINGERPRINT = "data.sha256"

CONNECTION_KEYS = {
    "base_url", "max_in_flight", "attempts", "timeout", "max_num_seqs", "max_num_batched_tokens",
    "gpu_memory_utilization", "gpu_memory_gib", "kv_cache_gib",
}  # fmt: skip
"""These keys of `engine` say how the model is reached and fed, and shape no text."""


class Run:
    """A `Run` is one run of a plan in its folder. Its states are planned (nothing is charged),
    reserved (charged) and finished."""

    def __init__(
        self,
        plan: Plan,
        folder: ReleaseFolder,
        release: Callable[[Session[Any]], Release],
        on_progress: OnProgress,
        build: BuildEngine,
        standing: Standing,
    ) -> None:
        self.folder, self.release, self.standing = folder, release, standing
        self.on_progress, self.build = on_progress, build
        self.run = folder.read_run() or {
            "run_id": uuid.uuid4().hex,
            "salt": new_salt(),
            "state": "planned",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "charges": _charged(plan),
        }
        self.plan = plan
        self.run_id: str = self.run["run_id"]

    def execute(self) -> dict[str, Any]:
        """Run the plan, or go on with it, and return the privacy report.

        Raises InputError, BudgetRefused before the data is opened, and Resumable.
        """
        self._check_same_plan()
        if self.run["state"] == "finished":
            self.folder.remove_work()  # it may have been cut off just before
            report: dict[str, Any] = self.folder.read_json("privacy_report.json")
            return report
        self._write_run(self.run["state"])
        if cluster.uses_ray(self.plan.config):
            self.on_progress(Progress("starting Ray"))
            cluster.start_ray(self.plan.config.runtime.ray_address)
            self._choose_gpus()
        engine = None
        if self.run["state"] == "planned":
            engine = try_model(self.plan, self.build, self.on_progress)
        try:
            self._reserve()
            self._write_run("reserved")
            ledger = self._open_ledger()
        except BaseException:
            if engine is not None:
                engine.close()
            raise
        try:
            return self._finish(*self._release_with_repeats(ledger, engine))
        finally:
            if cluster.uses_ray(self.plan.config):
                rays_exporter().forget(self.run_id)

    def _choose_gpus(self) -> None:
        """Make `runtime.gpus_per_actor` a number for the rest of the run."""
        config = self.plan.config
        gpus = resolve_gpus(config, gpus_of_cluster())
        runtime = config.runtime.model_copy(update={"gpus_per_actor": gpus})
        self.plan = replace(self.plan, config=config.model_copy(update={"runtime": runtime}))

    # Planned: the same run as before, and its charge

    def _check_same_plan(self) -> None:
        """Check that the folder holds this run: its charge may never change, nor, once a mechanism
        began, anything that shapes the output. `runtime` may change, and how the model is reached.
        """
        path = self.plan.config.output.path
        if self.run["state"] == "planned" and self.folder.has_output():
            raise InputError(
                f"output.path: {path} holds output of a run whose run.json is gone; choose another "
                f"folder"
            )
        if self.run.get("charges") != _charged(self.plan):
            self.standing.may_be_charged = False  # this plan
            raise InputError(
                f"output.path: {path} holds a run of another plan; choose another folder"
            )
        self.standing.is_same_plan = True
        shaping, before = without_connection(self._shaping()), self._config_before()
        if before is not None and without_connection(before) != shaping:
            if self._has_begun():
                raise InputError(
                    f"output.path: {path} holds a run that began with another configuration"
                )
            # The cached texts are of another model, or of the same one with other settings.
            forget_calls(self.folder.private / CALLS)

    def _check_same_data(self) -> list[bytes]:
        """Return the digests of the data's files. Once a mechanism began, the records may not
        change: one charge would pay for a release of the old ones and one of the new ones, and a
        person could be in two disjoint parts. Raises InputError where they changed, or where that
        is unknown."""
        config = self.plan.config
        kept = self.folder.private / DATA_FINGERPRINT

        def show(share: float) -> None:
            self.on_progress(Progress("hashing files", round(100 * share), 100))

        show(0.0)
        digests = file_digests(config.data.path, show)
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
                f"data.path: the records have changed since the run in {config.output.path} "
                "began; put them back as they were, or choose another output.path"
            )
        return digests

    def _has_begun(self) -> bool:
        if self.run["state"] == "planned":
            return False
        if (
            self.run["state"] == "finished"
            or self.plan.config.not_private
            or self.folder.has_output()
        ):
            return True
        with closing(Ledger.open(self.plan.config.privacy.ledger)) as ledger:
            return bool(ledger.counts(self.run_id)["started"])

    def _reserve(self) -> None:
        """Charge the whole run once, durably, before a mechanism sees its data; idempotent by its
        id.

        The files are hashed before the charge, once the budget is known to hold it: the ledger has
        to recognise them to refuse them under another name. Their first row is read, because a run
        with another column for the units is another run, and would be charged anew. That releases
        nothing of the data but a refusal, which charges nothing: no mechanism has run, and the
        ledger keeps only keyed hashes. (A budget that another run takes in between is refused after
        the hashing.)
        """
        if self.plan.config.not_private:
            self._check_same_data()
            return
        plan, planned = self.plan, self.run["state"] == "planned"
        with closing(self._ledger_to_charge(planned)) as ledger:
            held = ledger.is_reserved(self.run_id)
            if not planned and not held:
                raise InputError(
                    f"privacy.ledger: the ledger does not hold this run's charge; a run that began "
                    f"is not charged anew (output.path: {plan.config.output.path})"
                )
            if not held:
                self._check_budget(ledger)
            files = self._check_same_data()
            self.on_progress(Progress("charging the budget"))
            charge = {self.run_id: (plan.dp_event, Budget(plan.cost.epsilon, plan.cost.delta))}
            stated_for = privacy_unit(plan.config.data.unit), NEIGHBORING_RELATION
            privacy = plan.config.privacy
            # On Ray through the accountant, which shows what is charged.
            with closing(self._open_ledger()) as charged:
                self.standing.may_be_charged = True
                charged.reserve(privacy.dataset, charge, *stated_for, files, privacy.tenant)

    def _check_budget(self, ledger: Ledger) -> None:
        """Check that the budget holds the plan, as do those of its tenant and of the data set's
        ancestors, and then that the columns are there.

        A data set gets a budget of just the plan's cost in a ledger that this run made; in any
        other, an unknown name is more likely mistyped than new. Raises BudgetRefused, and
        InputError for an unknown data set, another privacy unit or another relation, and for a
        first row that is no record.
        """
        name, tenant = self.plan.config.privacy.dataset, self.plan.config.privacy.tenant
        whole = Budget(self.plan.cost.epsilon, self.plan.cost.delta)
        stated_for = privacy_unit(self.plan.config.data.unit), NEIGHBORING_RELATION
        is_new = ledger.account(name) is None
        if is_new:
            names = ledger.names()
            # A run cut off between making the file and the data set left the ledger empty.
            if names or not self.run.get("made_ledger"):
                raise InputError(
                    f"privacy.dataset: the ledger has no data set {name!r}; it has "
                    f"{', '.join(map(repr, names)) or 'none'} (`dpray ledger create` makes one)"
                )
        else:
            try:
                ledger.check(name, Charge(self.plan.dp_event, whole, tenant), *stated_for)
            except BudgetRefused as refused:
                if cluster.uses_ray(self.plan.config):
                    count_refusal(self.plan.config.privacy.ledger, refused.dataset)
                raise
        check_first_records(self.plan.config.data, self.plan.reads.text_of is not None)
        if is_new:
            ledger.create_dataset(name, whole, *stated_for)

    def _ledger_to_charge(self, planned: bool) -> Ledger:
        """Open the ledger. A new run on one machine may begin without one: an SQLite file is made,
        and the report says so. A database that many use is never made because it is not found."""
        url, tenant = self.plan.config.privacy.ledger, self.plan.config.privacy.tenant
        try:
            return Ledger.open(url)
        except MissingLedger:
            # A tenant's cap was set by somebody, in another ledger.
            if not planned or not url.startswith("sqlite") or tenant is not None:
                raise
        # Noted first: this run may be cut off as soon as the file is there.
        self.run["made_ledger"] = True
        self._write_run("planned")
        return Ledger.create_or_open(url)

    # Reserved: attempts at the release

    def _open_ledger(self) -> RunLedger:
        if self.plan.config.not_private:
            return NullLedger()
        url = self.plan.config.privacy.ledger
        return AccountantClient(url) if cluster.uses_ray(self.plan.config) else Ledger.open(url)

    def _release_with_repeats(
        self, ledger: RunLedger, engine: Engine | None
    ) -> tuple[Session[Any], Release]:
        """Repeat what was lost with a machine or an engine, up to `runtime.max_attempts`; stop
        where other code raised."""
        attempts = self.plan.config.runtime.max_attempts
        record = on_ray if cluster.uses_ray(self.plan.config) else nowhere
        for left in reversed(range(attempts)):
            session = Session(
                self.plan,
                self.folder,
                ledger,
                self.run_id,
                self.run["salt"],
                self.on_progress,
                self.build,
                engine,
                record,
            )
            engine = None
            epsilon = 0.0 if self.plan.config.not_private else self.plan.cost.epsilon
            session.metrics.attempt(attempts - left, epsilon)
            try:
                self.folder.recover(self._committed(ledger))
                session.check_records()
                session.measure_labels()
                return session, self.release(session)
            # `ray job stop` sends SIGTERM, which Ray makes a SystemExit of.
            except (KeyboardInterrupt, SystemExit):
                raise Resumable("interrupted") from None
            except Exception as error:
                if disk_is_full(error):
                    raise Resumable(DISK_FULL) from error
                if isinstance(error, DprayError):
                    raise
                if cluster.ended_for_memory(error):
                    raise self._ended_for_memory(session, error) from error
                last = error.last if isinstance(error, cluster.LostTooOften) else error
                if (why := cluster.reason_to_repeat(last)) is None:
                    raise self._stopped(ledger, error) from error
                if last is not error or not left:
                    raise Resumable(f"{why} ({attempts} times)") from error
            finally:
                self.standing.resume_hint = session.resume_hint
                session.close()
        raise AssertionError("runtime.max_attempts is at least 1")

    def _committed(self, ledger: RunLedger) -> Callable[[str], bool]:
        if self.plan.config.not_private:
            return lambda sha: True
        shas = {sha for _, (_, sha) in ledger.published(self.run_id)}
        return shas.__contains__

    def _ended_for_memory(self, session: Session[Any], error: Exception) -> DprayError:
        """Record as failed the units that workers had under way when Ray ended a process for want
        of memory, and not those that were lost before that. Return the error that stops the run."""
        what = "Ray ended a process of the run because its machine was low on memory"
        ended = cluster.find_error(error, cluster.EndedForMemory)
        at_work = frozenset() if ended is None else ended.attempt_ids
        for unit, attempt in list(session.ledger.unfinished(self.run_id)):
            # How much memory a batch needs depends on its private rows.
            if attempt in at_work:
                session.ledger.fail(self.run_id, unit, attempt, "OutOfMemoryError")
        failed = [unit for unit, _ in session.ledger.failed(self.run_id)]
        if not failed:
            return Resumable(f"{what}, and nothing was being drawn")
        return RunFailed(
            f"{what}: {failed[0]} (and {len(failed) - 1} more) failed with it and cannot be "
            f"repeated, so this run cannot be finished"
        )

    def _stopped(self, ledger: RunLedger, error: Exception) -> DprayError:
        """Return the error of a run that code of dpray's own or of a library's stopped."""
        why = f"the run stopped: {type(error).__name__}; nothing that was not finished was released"
        with suppress(DprayError):
            if ledger.counts(self.run_id)["failed"]:
                return RunFailed(f"{why}, and this run cannot be finished")
        return DprayError(why)

    # Finished: records, commit, report

    def _finish(self, session: Session[Any], release: Release) -> dict[str, Any]:
        stamp = {"not_private": True} if self.plan.config.not_private else {}
        session.show("writing the release")
        records = self.folder.assemble(record | stamp for record in release.records)
        # Before the report, which says where in the ledger the run ends.
        session.ledger.commit(self.run_id)
        report = privacy_report(session, self.run, release.report, records)
        if release.model is not None:
            self.folder.release_model(release.model, report)
        self.folder.write_json("privacy_report.json", report)
        self._write_run("finished")
        self.folder.remove_work()
        return report

    # run.json

    def _config_before(self) -> dict[str, Any] | None:
        """Return the configuration that this folder's run had in its last attempt; an earlier
        version kept it in run.json, places included."""
        if (self.folder.private / CONFIG).exists() and "config" in self.run:
            return self.folder.read_json(f"private/{CONFIG}")
        before: dict[str, Any] | None = self.run.get("config")
        return before

    def _shaping(self) -> dict[str, Any]:
        """Return the part of the configuration that shapes the output."""
        config = self.plan.config
        values = config.model_dump(mode="json", exclude={"runtime": True, "output": True})
        values["engine"].pop("api_key", None)
        if self.plan.config.not_private:
            values["privacy"]["epsilon"] = None  # JSON has no infinity
        # A ledger may move; and its URL may hold a password, which has no place in a file.
        values["privacy"].pop("ledger")
        return values

    def _write_run(self, state: str) -> None:
        shaping = self._shaping()
        text = json.dumps(shaping, indent=2, ensure_ascii=False, allow_nan=False)
        write_durably(self.folder.private / CONFIG, text + "\n", private=True)
        self.run |= {
            "state": state,
            "config": public_config(shaping),
            "versions": versions(),
            "not_private": self.plan.config.not_private,
        }
        self.folder.write_json("run.json", self.run)


def _charged(plan: Plan) -> dict[str, Any]:
    # By name, as in the ledger: charges that a run makes later have one.
    return {} if plan.config.not_private else {"": plan.dp_event.to_json()}


def without_connection(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without the keys that say how the model is reached."""
    engine = {key: value for key, value in config["engine"].items() if key not in CONNECTION_KEYS}
    return config | {"engine": engine}

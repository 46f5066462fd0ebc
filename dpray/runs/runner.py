"""The runner takes a run of any method from its plan to its release. The order is the guarantee:
charge, make it durable, begin a mechanism, run it, stage its output, commit that in the ledger,
publish it. A run has one open ledger.

`Session.publish_once` and the methods' `release` decide what runs again after a crash,
`dpray.runs.failures` whether another attempt follows.
"""

from __future__ import annotations

import json
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cached_property, partial

from dpray.accounting.event import NEIGHBORING_RELATION, Event
from dpray.config.config import DataConfig
from dpray.engines.base import Engine
from dpray.engines.rates import Rates
from dpray.io.file_list import file_digests, fingerprint
from dpray.io.files import read_json, write_durably
from dpray.io.snapshot import take_snapshot
from dpray.ledger.chain import nearly
from dpray.ledger.ledger import Ledger, NullLedger, RunLedger
from dpray.ledger.store import parse_url, shown_url
from dpray.mechanisms.randomness import new_salt
from dpray.runs.call_cache import CALLS
from dpray.runs.failures import OtherPlan, release_with_repeats
from dpray.runs.folder import CONFIG, SNAPSHOT, ReleaseFolder
from dpray.runs.forecast import Forecast, Work, rates_here
from dpray.runs.plan import Plan, privacy_unit
from dpray.runs.privacy_report import REPORT, PrivacyReport, TableCounts, read_report
from dpray.runs.released import DIGEST, privacy_report, public_config, versions
from dpray.runs.session import Release, Session
from dpray.runs.table import write_table
from dpray.types import (
    WARNING,
    Budget,
    BudgetRefused,
    InputError,
    Json,
    MissingLedger,
    OnProgress,
    Progress,
    ledger_command,
)
from dpray.workers import cluster
from dpray.workers.accountant import AccountantClient
from dpray.workers.engine import BuildEngine, living_nodes, resolve_gpus
from dpray.workers.engine_pool import check_loads
from dpray.workers.metrics import no_metrics, ray_exporter
from dpray.workers.placement import placed
from dpray.workers.rows import check_first_records

DATA_FINGERPRINT = "data.sha256"

CONNECTION_KEYS = frozenset({
    "engine.base_url", "engine.max_in_flight", "engine.attempts", "engine.timeout",
    "engine.max_num_seqs", "engine.max_num_batched_tokens", "engine.gpu_memory_utilization",
    "engine.gpu_memory_gib", "engine.kv_cache_gib",
    "embedder.base_url", "embedder.served_name", "embedder.max_in_flight",
    "embedder.attempts", "embedder.timeout",
})  # fmt: skip
"""The keys by which the model is reached and fed: they shape no text."""


ANOTHER_RUN = "another run needs an output.path of its own, and is charged by itself"

MOST_SHOWN, SHORT_VALUE = 5, 40
"""An error shows so many keys that differ, and values of so many characters."""

FORMAT = 3
"""The version of the names of units, batches and outputs, and of the coins. A run that began with
another one is not resumed: a unit could fall into two batches, and what was published could be
drawn again under the same charge."""


class Run:
    """One run of a plan in its folder. Its states are planned (nothing is charged), charging (the
    ledger knows), reserved (charged) and finished."""

    def __init__(
        self,
        plan: Plan,
        folder: ReleaseFolder,
        release: Callable[[Session[Plan]], Release],
        on_progress: OnProgress,
        build: BuildEngine,
    ) -> None:
        self.folder, self.release = folder, release
        self.on_progress, self.build = on_progress, build
        self.run = folder.read_run() or {
            "run_id": uuid.uuid4().hex,
            "salt": new_salt(),
            "state": "planned",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "charges": _charged(plan),
            "format": FORMAT,
        }
        self.plan = plan
        self.run_id: str = self.run["run_id"]
        self.on_ray = plan.config.runtime.uses_ray
        self.files: list[bytes] = []
        kept = folder.private / CONFIG
        self.config_before = read_json(kept, "output.path") if kept.exists() else None

    def execute(self) -> PrivacyReport:
        """Run the plan, or go on with it, and return the privacy report.

        Raises InputError, BudgetRefused before the data is opened, and Resumable.
        """
        self._check_same_plan()
        if self.run["state"] == "finished":
            self._check_same_configuration(has_begun=True)
            self.folder.remove_work()  # it may have been cut off just before
            return read_report(self.folder.root / REPORT)
        is_charged = self.run["state"] == "reserved"
        if not is_charged:
            self._try_charge()
            for warning in self.plan.warnings_before_charge():
                self.on_progress(Progress(WARNING, detail=warning))
        with ExitStack() as place:
            if self.on_ray:
                self.on_progress(Progress("starting Ray"))
                cluster.start_ray(self.plan.config.runtime.ray_address)
                self._choose_gpus()
                if self.plan.config.data.query is not None:
                    cluster.refuse_unreached(self.folder.private, len(living_nodes()))
                place.enter_context(placed(self.plan.config, self.on_progress, not is_charged))
            return self._charge_and_release(is_charged)

    def _charge_and_release(self, is_charged: bool) -> PrivacyReport:
        engine = None
        if not is_charged:
            self.plan.check_embedder()
            load, trials = partial(self.plan.load_model, self.build), self.plan.trials
            engine, rates = check_loads(self.plan.config, load, self.on_progress, trials)
            self._note_rates(rates)
        with ExitStack() as on_refusal:
            if engine is not None:
                on_refusal.callback(engine.close)  # later its session does
            ledger = self._open_ledger()
            on_refusal.callback(ledger.close)
            time = self._time_to_expect()  # what fails here costs nothing yet
            self._reserve(ledger)
            on_refusal.pop_all()
        try:
            sessions = self._sessions(ledger, engine, time)
            return self._finish(*release_with_repeats(sessions, self.release))
        finally:
            ledger.close()

    def _note_rates(self, rates: Rates | None) -> None:
        """Keep the rates for `run.json`, from which `dpray plan --rate-from` reads them."""
        if rates is not None:
            self.run["rates"] = asdict(rates)

    def _time_to_expect(self) -> str:
        """Return the most time that the model's work takes, in words: by rates that were measured
        with public prompts, or usual ones. Empty if neither is known."""
        config, measured = self.plan.config, self.run.get("rates")
        rates = rates_here(config) if measured is None else Rates(**measured)
        if rates is None or (work := self.plan.work) == Work() or (work.train and not rates.train):
            return ""
        time = Forecast.of(work, rates, config).duration
        return f"the loaded model takes up to about {time} in all"

    def _choose_gpus(self) -> None:
        """Make `runtime.gpus_per_actor` a number for the rest of the run."""
        config = self.plan.config
        gpus = resolve_gpus(config, living_nodes())
        runtime = config.runtime.model_copy(update={"gpus_per_actor": gpus})
        self.plan = replace(self.plan, config=config.model_copy(update={"runtime": runtime}))

    def _open_ledger(self) -> RunLedger:
        """Open the run's ledger. A new run on one machine may begin without one: an SQLite file is
        made, and the report says so. A database that many use is never made because it is not
        found."""
        if self.plan.config.not_private:
            return NullLedger()
        url = self.plan.config.privacy.ledger
        try:
            ledger = Ledger.open(url)
        except MissingLedger:
            if not self._may_make_ledger:
                raise
            # Noted first: this run may be cut off as soon as the file is there.
            self.run["made_ledger"] = True
            self._write_run("planned")
            ledger = Ledger.create_or_open(url)
        if not self.on_ray:
            return ledger
        ledger.close()
        return AccountantClient(url)

    @property
    def _may_make_ledger(self) -> bool:
        url = self.plan.config.privacy.ledger
        return bool(self.run["state"] == "planned") and url.startswith("sqlite")

    # The same run as before

    def _check_same_plan(self) -> None:
        """Check that the folder holds this run: its charge may never change."""
        path = self.plan.config.output.path
        if self.run["state"] == "planned" and self.folder.has_output():
            raise InputError(
                f"output.path: {path} holds output of a run whose run.json is gone; choose another "
                f"folder"
            )
        if self.run.get("charges") != _charged(self.plan):
            others = other_values(self.run.get("config"), public_config(self._shaping()))
            keys = f" ({'; '.join(others)})" if others else ""
            if self.run["state"] == "finished":
                raise OtherPlan(
                    f"output.path: {path} holds a finished run of another plan{keys}; {ANOTHER_RUN}"
                )
            raise OtherPlan(
                f"output.path: {path} holds a run of another plan{keys}; choose another folder"
            )

    def _has_begun(self, ledger: RunLedger) -> bool:
        """Return whether a mechanism of the run has begun."""
        if self.run["state"] in ("planned", "charging"):
            return False
        started = self.plan.config.not_private or ledger.counts(self.run_id)["started"]
        return bool(started) or self.folder.has_output()

    def _check_same_configuration(self, has_begun: bool) -> None:
        """Check that nothing that shapes the output has changed since a mechanism began, in the
        configuration and in the public files that it names. `runtime` may change, the way to reach
        the model, and what shapes only its calls."""
        before, now = self.config_before, self._shaping()
        if before is None:
            if has_begun and self.run["state"] != "finished":
                raise InputError(
                    "output.path: cannot verify that the configuration is unchanged: "
                    f"{self.folder.private / CONFIG} is missing; restore it, or choose another "
                    "folder"
                )
            return
        files = changed_files(self.run.get("config", {}), public_config(now))
        # As `changed_keys` calls the keys of a chain's second method.
        files = [key.replace("methods.1.", "method.") for key in files]
        keys = {*changed_keys(before, now), *files} - CONNECTION_KEYS
        if not keys:
            return
        if has_begun:
            if fixed := sorted(keys - self._call_keys()):
                others = [key for key in fixed if key in files]
                what = f"other files of {', '.join(others)}" if others else "another configuration"
                if self.run["state"] == "finished":
                    raise OtherPlan(
                        f"output.path: {self.plan.config.output.path} holds a finished run "
                        f"that began with {what} (other now: {', '.join(fixed)}); {ANOTHER_RUN}"
                    )
                raise InputError(
                    f"output.path: {self.plan.config.output.path} holds a run that began with "
                    f"{what} (other now: {', '.join(fixed)})"
                )
            self.run["changed"] = sorted({*self.run.get("changed", []), *keys})
            # The other keys keep the digests that the run began with.
            public = _sections(public_config(now))
            kept = _sections(self.run.setdefault("config", public_config(before)))
            for section, _, name in (key.partition(".") for key in keys):
                kept[section][name] = public[section].get(name)
        # The cached texts are of another model, or of the same one with other settings.
        (self.folder.private / CALLS).unlink(missing_ok=True)

    def _call_keys(self) -> frozenset[str]:
        """Return the keys that may change although a mechanism has begun, because all that they
        shape is post-processing."""
        method = self.plan.config.method.each[-1]
        after = method.calls_after
        if after is not None and not (self.folder.parts / f"{after}.json").exists():
            return frozenset()
        return frozenset() if self.run["state"] == "finished" else method.call_keys

    def _check_same_data(self, has_begun: bool) -> list[bytes]:
        """Return the digests of the data's files. Once a mechanism began, the records may not
        change: one charge would pay for a release of the old ones and one of the new ones, and a
        person could be in two disjoint parts. Raises InputError if they changed, or if that is
        unknown."""
        config = self.plan.config
        kept = self.folder.private / DATA_FINGERPRINT

        def show(share: float) -> None:
            self.on_progress(Progress("hashing files", round(100 * share), 100, "in percent"))

        show(0.0)
        digests = (cluster.hash_files if self.on_ray else file_digests)(self._data_read.path, show)
        found = fingerprint(digests)
        if not has_begun:
            self.run["format"] = FORMAT
            write_durably(kept, found, private=True)
        elif self.run.get("format") != FORMAT:
            raise InputError(
                f"output.path: the run in {config.output.path} began with a version of dpray that "
                "would draw other batches or publish under other names; finish it with that "
                "version, or choose another folder"
            )
        elif not kept.exists():
            raise InputError(
                f"output.path: cannot verify that the data is unchanged: {kept} is missing; "
                "restore it, or choose another folder"
            )
        elif kept.read_text() != found:
            raise InputError(
                f"data.path: the records have changed since the run in {config.output.path} "
                "began; restore them, or choose another output.path"
            )
        return digests

    @cached_property
    def _data_read(self) -> DataConfig:
        """Return the section of the files that are read: those of `data.path`, or the copy of a
        database's rows. It is made where files are hashed, before the charge, so that the ledger
        recognises the rows. Starts after the charge read it again, and one before it replaces it:
        rows may have been corrected, or deleted, since that start was refused. Without it, a run
        that began does not go on: `_check_same_data` finds other rows."""
        data, folder = self.plan.config.data, self.folder.private / SNAPSHOT
        if data.query is None:
            return data
        if self.run["state"] == "planned":
            shutil.rmtree(folder, ignore_errors=True)
        self.on_progress(Progress("reading the database"))
        rows = take_snapshot(data.path, data.query, folder, data.column_keys)
        return data.copied_to(rows)

    # The charge

    def _reserve(self, ledger: RunLedger) -> None:
        """Charge the whole run once, durably, before a mechanism sees its data; idempotent by its
        id.

        The files are hashed before the charge: the ledger has to recognise them to refuse them
        under another name. That releases nothing of the data but a refusal, which charges nothing:
        no mechanism has run, and the ledger keeps only keyed hashes. (A budget that another run
        takes after it was tried is refused after the hashing.)
        """
        state = self._check_same_run(ledger)
        if not self.plan.config.not_private:
            self.on_progress(Progress("charging the budget"))
            charge, new_budget = self._charge_asked(), self._new_budget(ledger)
            if new_budget is not None:
                self.run["made_budget"] = True
            if state == "planned":
                self._write_run("charging")
            try:
                ledger.reserve(*charge, self.files, new_budget=new_budget)
            except (BudgetRefused, InputError):
                self.run.pop("made_budget", None)
                self._write_run(state)
                raise
        self._write_run("reserved")

    def _check_same_run(self, ledger: RunLedger) -> str:
        """Return the run's state as the ledger has it, and hash the data's files. Raises InputError
        if this is no longer the run that began."""
        is_free, state = self.plan.config.not_private, self.run["state"]
        is_held = not is_free and ledger.is_reserved(self.run_id)
        if state == "reserved" and not (is_free or is_held):
            raise InputError(
                "privacy.ledger: the ledger does not hold this run's charge; a run that began is "
                f"not charged again (output.path: {self.plan.config.output.path})"
            )
        has_begun = self._has_begun(ledger)
        self._check_same_configuration(has_begun)
        if not has_begun:
            self.run["config"] = public_config(self._shaping())
        if not is_free:
            state = "reserved" if is_held else "planned"
        self._write_run(state)
        self.files = self._check_same_data(has_begun)
        return str(state)

    def _charge_asked(self) -> tuple[str, dict[str, tuple[Event, Budget]], str, str]:
        """Return the data set, the charge, and the unit and relation that it is stated for."""
        plan = self.plan
        charges = {self.run_id: (plan.dp_event, Budget(plan.cost.epsilon, plan.cost.delta))}
        return (
            plan.config.privacy.dataset,
            charges,
            privacy_unit(plan.config.data.unit),
            NEIGHBORING_RELATION,
        )

    def _try_charge(self) -> None:
        """Check that the budget holds the plan, and then that the columns are there: before a model
        is loaded, which may take minutes.

        The first row is read before the charge, because a run with another column for the units is
        another run, and would be charged again. Raises BudgetRefused, and InputError for an unknown
        data set, another privacy unit or another relation, and for a first row that is no record.
        """
        if not self.plan.config.not_private:
            self._try_budget()
        check_first_records(self._data_read, self.plan.reads.column_values)

    def _try_budget(self) -> None:
        try:
            ledger = Ledger.open(self.plan.config.privacy.ledger)
        except MissingLedger:
            if self._may_make_ledger:
                return  # with a budget that holds the plan
            raise
        with closing(ledger):
            if not ledger.is_reserved(self.run_id):
                new_budget = self._new_budget(ledger)
                ledger.reserve(*self._charge_asked(), is_trial=True, new_budget=new_budget)

    def _new_budget(self, ledger: RunLedger) -> Budget | None:
        """Return the budget that the charge creates the data set with, or None if the ledger has
        it.

        A file of one machine gets a new data set with the most that this run may cost. Raises
        InputError if the name is nearly that of another data set, and so probably mistyped, and for
        a database that many use.
        """
        privacy, unit = self.plan.config.privacy, self.plan.config.data.unit
        if ledger.account(privacy.dataset) is not None:
            return None
        budget, names = Budget(privacy.epsilon, privacy.delta), ledger.names()
        near = nearly(privacy.dataset, names)
        if privacy.ledger.startswith("sqlite") and near is None:
            return budget
        way_on = "to make one" if near is None else f"did you mean {near!r}? To make a new one"
        url = shown_url(parse_url(privacy.ledger))
        command = ledger_command("create", url, privacy.dataset, budget)
        command += "" if unit is None else f" --unit {shlex.quote(unit)}"
        raise InputError(
            f"privacy.dataset: the ledger has no data set {privacy.dataset!r}; it has "
            f"{', '.join(map(repr, names)) or 'none'}; {way_on}: {command}"
        )

    # The release

    def _sessions(
        self, ledger: RunLedger, engine: Engine | None, time: str
    ) -> Iterator[Session[Plan]]:
        """Yield a session for each attempt; the first one has the engine that was tried."""
        config = self.plan.config
        hashed = config.model_copy(update={"data": self._data_read.hashed(self.files)})
        epsilon = 0.0 if config.not_private else self.plan.cost.epsilon
        for number in range(1, config.runtime.max_attempts + 1):
            session = Session(
                replace(self.plan, config=hashed),
                self.folder,
                ledger,
                self.run_id,
                self.run["salt"],
                self.on_progress,
                self.build,
                engine,
                ray_exporter().record if self.on_ray else no_metrics,
                time_to_expect=time,
            )
            engine = None
            session.metrics.attempt(number, epsilon)
            if self.on_ray and (account := ledger.account(config.privacy.dataset)):
                session.metrics.charged(account.budget, account.spent)
            yield session

    def _finish(self, session: Session[Plan], release: Release) -> PrivacyReport:
        stamp = {"not_private": True} if self.plan.config.not_private else {}
        session.show("writing the release")
        records = self.folder.assemble(record | stamp for record in release.records)
        table: dict[str, TableCounts] = {}
        if self.plan.config.data.is_table:
            table["table"] = write_table(self.folder.synthetic, self.plan.config.data)
        # Before the report, which names the entry that closes the run.
        session.ledger.commit(self.run_id)
        report = privacy_report(session, self.run, release.report, records)
        report = report.model_copy(update=table)
        if release.model is not None:
            self.folder.release_model(release.model, report.to_json())
        self.folder.write_json(REPORT, report.to_json())
        self._note_rates(session.rates)
        self._write_run("finished")
        self.folder.remove_work()
        return report

    # run.json

    def _shaping(self) -> Json:
        """Return the part of the configuration that shapes the output."""
        config = self.plan.config
        values = config.model_dump(mode="json", exclude={"runtime": True, "output": True})
        for section in ("engine", "embedder"):
            values[section].pop("api_key", None)
        if self.plan.config.not_private:
            values["privacy"]["epsilon"] = None  # JSON has no infinity
        # A ledger may move; and its URL may hold a password, which has no place in a file.
        values["privacy"].pop("ledger")
        return values

    def _write_run(self, state: str) -> None:
        shaping = self._shaping()
        text = json.dumps(shaping, indent=2, ensure_ascii=False, allow_nan=False)
        write_durably(self.folder.private / CONFIG, text + "\n", private=True)
        # A run keeps the digests that it began with: its files may be on another machine now.
        self.run.setdefault("config", public_config(shaping))
        self.run |= {
            "state": state,
            "versions": versions(),
            "not_private": self.plan.config.not_private,
        }
        self.folder.write_json("run.json", self.run)


def _charged(plan: Plan) -> dict[str, object]:
    # By name, as in the ledger: charges that a run makes later have one.
    return {} if plan.config.not_private else {"": plan.dp_event.to_json()}


def changed_files(before: object, now: object) -> list[str]:
    """Return the keys of two public configurations under which models and files have different
    digests. A file that is not on this machine has no digest, so it is not compared."""
    old, new = _digests(before), _digests(now)
    return [
        key
        for key in new
        # A model's digest stands last, behind those of its adapters. It may be missing.
        if any(one != other for one, other in zip(old.get(key, []), new[key], strict=False))
    ]


def other_values(before: object, now: Json) -> list[str]:
    """Return the keys that may shape a charge and have other values in a run's public configuration
    and another one, those of the method first. Short values are shown; a key that only one of the
    two has is left out, as another version of dpray may have written it."""
    found = []
    for section in ("method", "privacy", "data"):
        old = before.get(section) if isinstance(before, Mapping) else None
        if not isinstance(old, Mapping):
            continue
        keys = [key for key in now[section] if key in old and old[key] != now[section][key]]
        for key in ["name"] if section == "method" and "name" in keys else keys:
            pair = [json.dumps(each[key], ensure_ascii=False) for each in (old, now[section])]
            is_short = max(map(len, pair)) <= SHORT_VALUE
            shown = f": {pair[0]} there, {pair[1]} here" if is_short else " differs"
            name = "methods" if key == "methods" else f"{section}.{key}"  # as in the user's file
            found.append(f"{name}{shown}")
    more = [f"and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    return found[:MOST_SHOWN] + more


def _digests(value: object, key: str = "") -> dict[str, list[str]]:
    """Return a public configuration's digests by their keys, such as `methods.0.vocabulary`."""
    if isinstance(value, str):
        return {key.removeprefix("."): found} if (found := DIGEST.findall(value)) else {}
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
        key = key.replace(".method.methods", ".methods")  # as in the user's file
    return {
        name: found
        for inner, item in items
        for name, found in _digests(item, f"{key}.{inner}").items()
    }


def changed_keys(before: Json, now: Json) -> set[str]:
    """Return the keys of `engine`, `embedder` and `method`, for a chain those of its second method,
    that have other values in two configurations, and the names of other sections that differ."""
    old, new = _flat(before), _flat(now)
    return {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}


def _flat(config: Json) -> Json:
    sections = _sections(config)
    others = {name: value for name, value in config.items() if name not in sections}
    first = config["method"].get("methods", [])[:-1]
    keys = {f"{name}.{key}": value for name in sections for key, value in sections[name].items()}
    return others | {"methods.0": first} | keys


def _sections(config: Json) -> dict[str, Json]:
    """Return the sections whose keys may change one by one."""
    method = config["method"]
    return {
        "engine": config["engine"],
        "embedder": config["embedder"],
        "method": method.get("methods", [method])[-1],
    }

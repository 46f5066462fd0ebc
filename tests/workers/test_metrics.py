"""Only declared names and tags are exported, and only from published batches and charges. The
real pages are read in tests/integration/test_job.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.ledger.ledger import Ledger, NullLedger
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.release import release
from dpray.methods.registry import make_plan
from dpray.runs.folder import ReleaseFolder
from dpray.runs.session import Session
from dpray.types import Budget
from dpray.workers.engine import build_engine
from dpray.workers.metrics import METRICS, Exporter, Metric, RunMetrics

STATED_FOR = ("record", NEIGHBORING_RELATION)
DECLARED = {metric.name: metric for metric in METRICS}


class Recorded:
    """The last value of each gauge and the sum of each counter, by its data set or run."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def __call__(self, name: str, value: float, tags: dict[str, str]) -> None:
        metric = DECLARED[name]
        assert set(tags) == set(metric.tags)
        at = (name, tags[metric.tags[0]])
        before = self.values.get(at, 0.0) if metric.kind == "counter" else 0.0
        self.values[at] = before + value

    def of(self, first_tag: str) -> dict[str, float]:
        return {name: value for (name, tag), value in self.values.items() if tag == first_tag}


def test_a_run_shows_its_data_sets_budget_and_all_charges() -> None:
    recorded = Recorded()
    metrics = RunMetrics(recorded, {"run": "run-1", "dataset": "notes", "method": "dp_kps"})
    metrics.charged(Budget(2.0, 1e-6), Budget(1.0, 2e-7))
    assert recorded.of("notes") == {
        "dpray_budget_epsilon": 2.0,
        "dpray_budget_delta": 1e-6,
        "dpray_reserved_epsilon": 1.0,
        "dpray_reserved_delta": 2e-7,
    }


def test_a_run_shows_published_batches_and_no_others(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = parse_config(settings(method__max_records=12))
    plan, recorded = make_plan(config), Recorded()
    ledger = Ledger.create_or_open(config.privacy.ledger)
    ledger.create_dataset("notes", Budget(100, 1e-3), *STATED_FOR)
    cost = Budget(plan.cost.epsilon, plan.cost.delta)
    ledger.reserve("notes", {"run-1": (plan.dp_event, cost)}, *STATED_FOR)
    with closing(ledger), closing(ReleaseFolder(config.output.path)) as folder:

        def record(name: str, value: float, tags: dict[str, str]) -> None:
            recorded(name, value, tags)
            outcomes = list(folder.published_records())
            now = recorded.of("run-1")
            assert now.get("dpray_activity_done", 0) <= len(outcomes)
            assert now.get("dpray_tokens", 0) <= sum(each["tokens"] for each in outcomes)

        session = Session(
            plan, folder, ledger, "run-1", "0" * 32, lambda progress: None, build_engine,
            record=record,
        )  # fmt: skip
        release(session)
        outcomes = list(folder.published_records())
    shown = recorded.of("run-1")
    assert shown["dpray_activity_done"] == shown["dpray_activity_parts"] == len(outcomes) == 12
    assert shown["dpray_tokens"] == sum(each["tokens"] for each in outcomes) > 0
    assert shown["dpray_private_tokens"] == sum(each["private_tokens"] for each in outcomes)


def test_a_stage_without_a_public_number_of_parts_shows_none(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config, recorded = parse_config(settings()), Recorded()
    with closing(ReleaseFolder(config.output.path)) as folder:
        session = Session(
            make_plan(config), folder, NullLedger(), "run-1", "0" * 32, lambda progress: None,
            build_engine, record=recorded,
        )  # fmt: skip
        session.show("batches", 3, 12)
        session.show("embedding records")
    assert recorded.of("run-1") == {"dpray_activity_done": 0, "dpray_activity_parts": 0}


class Fake:
    """A metric of Ray's, which forgets at every report."""

    def __init__(self, metric: Metric, page: dict[str, float]) -> None:
        self.metric, self.page = metric, page

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.page[f"{self.metric.name} {tags[self.metric.tags[0]]}"] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray raises"
        self.set(value, tags)


def test_gauges_are_set_anew() -> None:
    page: dict[str, float] = {}
    exporter = Exporter(lambda metric: Fake(metric, page))
    for run, value in (("one", 1.0), ("two", 2.0)):
        tags = {"run": run, "dataset": "notes", "method": "dp_sgd"}
        exporter.record("dpray_run_epsilon", value, tags)
        exporter.record("dpray_tokens", value, tags)
        exporter.record("dpray_private_tokens", 0, tags)
    exporter.record("dpray_budget_epsilon", 4.0, {"dataset": "notes"})
    runs = {"dpray_run_epsilon one": 1.0, "dpray_run_epsilon two": 2.0}
    counted = {"dpray_tokens one": 1.0, "dpray_tokens two": 2.0}
    assert page == runs | counted | {"dpray_budget_epsilon notes": 4.0}
    page.clear()
    exporter.refresh()  # counters are Ray's to keep
    assert page == runs | {"dpray_budget_epsilon notes": 4.0}


def test_without_ray_nothing_is_imported_for_it() -> None:
    """Metrics of this module cost a run without Ray nothing."""
    code = "import sys, dpray.workers.metrics; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""A run on Ray shows public quantities on the cluster's own metrics pages, for Prometheus.

Ray writes each name with `ray_` before it, and `_total` behind a counter's. Whoever reads the pages
also sees when a number changed, and running time is not covered by any epsilon (docs/limits.md):
they stay inside. Without Ray nothing is exported, and nothing of Ray is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock, Thread
from time import sleep
from typing import Any, Literal

from dpray.types import Budget, Progress


@dataclass(frozen=True)
class Metric:
    """A `Metric` is a number that dpray exports; `public` says why nothing private can be learned
    from it."""

    name: str
    kind: Literal["gauge", "counter"]
    tags: tuple[str, ...]
    description: str
    public: str


_DATASET = ("dataset",)
_RUN = ("run", "dataset", "method")
_CHOSEN = "chosen by the owner of the data set, and printed by `dpray ledger show`"
_CHARGES = "the sum of charges, which follow from configurations alone"
_FINISHED = "charges as above; that a run is finished is seen by its release"
_RELEASED = "counted in published batches alone: the release and its report hold it"

METRICS = (
    Metric("dpray_budget_epsilon", "gauge", _DATASET, "Epsilon of the budget.", _CHOSEN),
    Metric("dpray_budget_delta", "gauge", _DATASET, "Delta of the budget.", _CHOSEN),
    Metric("dpray_reserved_epsilon", "gauge", _DATASET, "Epsilon of all charges.", _CHARGES),
    Metric("dpray_reserved_delta", "gauge", _DATASET, "Delta of all charges.", _CHARGES),
    Metric("dpray_committed_epsilon", "gauge", _DATASET, "Epsilon of finished runs.", _FINISHED),
    Metric("dpray_committed_delta", "gauge", _DATASET, "Delta of finished runs.", _FINISHED),
    Metric(
        "dpray_refusals",
        "counter",
        _DATASET,
        "Charges that the budget refused.",
        "follows from the charge asked for and the charges made",
    ),
    Metric(
        "dpray_run_epsilon",
        "gauge",
        _RUN,
        "Epsilon that the run was charged; 0 for one that is not private.",
        "follows from the configuration",
    ),
    Metric(
        "dpray_run_attempts",
        "gauge",
        _RUN,
        "Attempts at the run in this process: 1, and 1 for each time machines or models failed.",
        "not covered, like the report's repeats: a lost machine may have been short of memory "
        "(docs/limits.md); a mechanism that fails by itself ends the run uncounted",
    ),
    Metric(
        "dpray_stage_done",
        "gauge",
        _RUN,
        "Finished parts of the present stage: published batches, training steps, model calls.",
        "what the progress bar shows",
    ),
    Metric(
        "dpray_stage_parts",
        "gauge",
        _RUN,
        "All parts of the present stage; 0 where their number is not public.",
        "what the progress bar shows",
    ),
    Metric("dpray_tokens", "counter", _RUN, "Tokens of published texts.", _RELEASED),
    Metric("dpray_private_tokens", "counter", _RUN, "Those drawn with private texts.", _RELEASED),
)

_BY_NAME = {metric.name: metric for metric in METRICS}

Record = Callable[[str, float, dict[str, str]], None]
"""A `Record` is given a metric's name, its value (of a counter: what is added) and its tags."""


def nowhere(name: str, value: float, tags: dict[str, str]) -> None:
    """Export nothing."""


class Exporter:
    """An `Exporter` sets the metrics of this process, each made by `make` when it is first needed.
    `refresh` sets all gauges anew: Ray drops one that was not set for twice its report interval."""

    def __init__(self, make: Callable[[Metric], Any]) -> None:
        self._make = cache(make)
        self._gauges: dict[tuple[Metric, tuple[tuple[str, str], ...]], float] = {}
        self._lock = Lock()

    def record(self, name: str, value: float, tags: dict[str, str]) -> None:
        metric = _BY_NAME[name]
        with self._lock:
            if metric.kind == "gauge":
                self._gauges[metric, tuple(tags.items())] = value
                self._make(metric).set(value, tags)
            elif value > 0:
                self._make(metric).inc(value, tags)

    def refresh(self) -> None:
        with self._lock:
            for (metric, tags), value in self._gauges.items():
                self._make(metric).set(value, dict(tags))

    def forget(self, run: str) -> None:
        """Leave the gauges of a run that is over to Ray, which drops them."""
        with self._lock:
            for key in [key for key in self._gauges if ("run", run) in key[1]]:
                del self._gauges[key]


REFRESH_SECONDS = 5.0
"""Half of Ray's report interval."""


@cache
def rays_exporter() -> Exporter:
    """Return the exporter of this process, which has to be one of a cluster."""
    exporter = Exporter(_rays_metric)

    def keep_refreshing() -> None:
        while True:
            sleep(REFRESH_SECONDS)
            exporter.refresh()

    Thread(target=keep_refreshing, name="dpray-metrics", daemon=True).start()
    return exporter


def on_ray(name: str, value: float, tags: dict[str, str]) -> None:
    """Export on the metrics page of this process's node."""
    rays_exporter().record(name, value, tags)


def _rays_metric(metric: Metric) -> Any:
    from ray.util.metrics import Counter, Gauge

    kind = Gauge if metric.kind == "gauge" else Counter
    return kind(metric.name, metric.description, metric.tags)


@dataclass(frozen=True)
class RunMetrics:
    """`RunMetrics` are those of one run, in its driver. `tags` are the run's id, its data set's
    name and its method's."""

    record: Record
    tags: dict[str, str]

    def attempt(self, number: int, epsilon: float) -> None:
        """Show that an attempt begins, counted from 1."""
        self.record("dpray_run_epsilon", epsilon, self.tags)
        self.record("dpray_run_attempts", number, self.tags)

    def progress(self, progress: Progress) -> None:
        self.record("dpray_stage_done", progress.completed, self.tags)
        self.record("dpray_stage_parts", progress.total or 0, self.tags)

    def published(self, tokens: int, private_tokens: int) -> None:
        """Count the tokens of a batch once it is published."""
        self.record("dpray_tokens", tokens, self.tags)
        self.record("dpray_private_tokens", private_tokens, self.tags)


def show_budget(
    record: Record, dataset: str, budget: Budget, reserved: Budget, committed: Budget
) -> None:
    """Show a data set's budget, what all of its runs were charged, and what its finished ones
    were."""
    for part, value in (("budget", budget), ("reserved", reserved), ("committed", committed)):
        record(f"dpray_{part}_epsilon", value.epsilon, {"dataset": dataset})
        record(f"dpray_{part}_delta", value.delta, {"dataset": dataset})

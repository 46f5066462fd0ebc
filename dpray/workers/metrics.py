"""A run on Ray shows public quantities on the cluster's own metrics pages, for Prometheus.

Ray writes each name with `ray_` before it, and `_total` behind a counter's. Anyone who reads the
pages also sees when a number changed, and running time is not covered by any epsilon
(docs/sharp_edges.md): they stay inside. Without Ray nothing is exported, and nothing of Ray is
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock, Thread
from time import sleep
from typing import Any, Literal

from dpray.extras import Late
from dpray.types import Budget, Progress

of_ray = Late("ray.util.metrics")


@dataclass(frozen=True)
class Metric:
    """A number that dpray exports."""

    name: str
    kind: Literal["gauge", "counter"]
    tags: tuple[str, ...]
    description: str


DATASET, RUN = ("dataset",), ("run", "dataset", "method")

METRICS = (  # each is public for the reason above it
    # The owner of the data set chose it, and `dpray ledger show` prints it.
    Metric("dpray_budget_epsilon", "gauge", DATASET, "Epsilon of the budget."),
    Metric("dpray_budget_delta", "gauge", DATASET, "Delta of the budget."),
    # Charges follow from configurations only.
    Metric("dpray_reserved_epsilon", "gauge", DATASET, "Epsilon of all charges."),
    Metric("dpray_reserved_delta", "gauge", DATASET, "Delta of all charges."),
    Metric("dpray_run_epsilon", "gauge", RUN, "Epsilon that the run was charged; 0 for none."),
    # Not covered by epsilon, like the report's repeats: a lost machine may have been short of
    # memory (docs/sharp_edges.md). A mechanism that fails by itself ends the run uncounted.
    Metric("dpray_run_attempts", "gauge", RUN, "Attempts at the run in this process."),
    # The progress bar shows the same.
    Metric("dpray_activity_done", "gauge", RUN, "Finished parts of the present work."),
    Metric("dpray_activity_parts", "gauge", RUN, "All parts of it; 0 if their number is private."),
    # Counted in published batches only: the release and its report hold it.
    Metric("dpray_tokens", "counter", RUN, "Tokens of published texts."),
    Metric("dpray_private_tokens", "counter", RUN, "Those drawn with private texts."),
)

_BY_NAME = {metric.name: metric for metric in METRICS}

SetMetric = Callable[[str, float, dict[str, str]], None]
"""Takes a metric's name, its value (of a counter: what is added) and its tags."""


def no_metrics(name: str, value: float, tags: dict[str, str]) -> None:
    """Export nothing."""


class Exporter:
    """Sets the metrics of this process, each made by `make` when it is first needed. `refresh` sets
    all gauges again: Ray drops one that was not set for twice its report interval."""

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


REFRESH_SECONDS = 5.0
"""Half of Ray's report interval."""


@cache
def ray_exporter() -> Exporter:
    """Return the exporter of this process, one of a cluster, to the metrics page of its node."""
    exporter = Exporter(_ray_metric)

    def keep_refreshing() -> None:
        while True:
            sleep(REFRESH_SECONDS)
            exporter.refresh()

    Thread(target=keep_refreshing, name="dpray-metrics", daemon=True).start()
    return exporter


def _ray_metric(metric: Metric) -> Any:
    kind = of_ray.Gauge if metric.kind == "gauge" else of_ray.Counter
    return kind(metric.name, metric.description, metric.tags)


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of one run, in its driver. `tags` are the run's id, its data set's name and its
    method's."""

    record: SetMetric
    tags: dict[str, str]

    def attempt(self, number: int, epsilon: float) -> None:
        """Show that an attempt begins, counted from 1."""
        self.record("dpray_run_epsilon", epsilon, self.tags)
        self.record("dpray_run_attempts", number, self.tags)

    def progress(self, progress: Progress) -> None:
        self.record("dpray_activity_done", progress.completed, self.tags)
        self.record("dpray_activity_parts", progress.total or 0, self.tags)

    def published(self, tokens: int, private_tokens: int) -> None:
        """Count the tokens of a batch once it is published."""
        self.record("dpray_tokens", tokens, self.tags)
        self.record("dpray_private_tokens", private_tokens, self.tags)

    def charged(self, budget: Budget, reserved: Budget) -> None:
        """Show the data set's budget, and what all of its runs were charged."""
        tags = {"dataset": self.tags["dataset"]}
        for part, value in (("budget", budget), ("reserved", reserved)):
            self.record(f"dpray_{part}_epsilon", value.epsilon, tags)
            self.record(f"dpray_{part}_delta", value.delta, tags)

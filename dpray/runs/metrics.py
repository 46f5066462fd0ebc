"""A run on Ray shows public quantities on the cluster's own metrics pages, for Prometheus.

Ray writes each name with `ray_` before it, and `_total` behind a counter's. Whoever reads the pages
also sees when a number changed, and running time is not covered by any epsilon (docs/limits.md):
they stay inside. Without Ray nothing is exported, and nothing of Ray is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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


def on_ray(name: str, value: float, tags: dict[str, str]) -> None:
    """Export from this process, which has to be one of a cluster."""
    metric = _exported(name)
    if _BY_NAME[name].kind == "gauge":
        metric.set(value, tags)
    elif value > 0:
        metric.inc(value, tags)


@cache
def _exported(name: str) -> Any:
    from ray.util.metrics import Counter, Gauge

    metric = _BY_NAME[name]
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

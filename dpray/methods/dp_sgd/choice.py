"""The free parameters of DP-SGD: the passes over the data and the expected size of a batch."""

from __future__ import annotations

from dpray.config.config import Config
from dpray.methods.dp_sgd.plan import DpSgdPlan, make_plan
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.runs.choice import Choice, Signal

EPOCHS = (50.0, 20.0, 10.0, 5.0, 2.0, 1.0)

BATCHES = 16
"""An epoch has so many batches: larger ones have less noise, and fewer steps."""

UNITS = 60.0
"""A batch's sum has so many clipped gradients for each deviation of the noise on a coordinate: on
two data sets runs with more taught more, on average, than runs with fewer
(experiments/results_tables.md)."""


def choose(config: Config, settings: DpSgdSettings, records: int) -> Choice:
    """Take the most passes whose batches stand above their noise; where none do, one pass. Keys
    that are set stay as they are."""
    given = settings.model_fields_set
    batch_size = max(1, config.data.public_size // BATCHES)
    if "batch_size" in given:
        batch_size = settings.batch_size
    best: DpSgdPlan | None = None
    for epochs in (settings.epochs,) if "epochs" in given else EPOCHS:
        tried = settings.model_copy(update={"epochs": epochs, "batch_size": batch_size})
        best = make_plan(config.model_copy(update={"method": tried}), tried)
        if units(best) >= UNITS:
            break
    assert best is not None
    what = f"{best.settings.epochs:g} passes in batches of {batch_size}: "
    why = "the most whose batches stand above the noise"
    if "epochs" in given:
        why = "as they are set"
    elif units(best) < UNITS:
        why = "the least noise that is tried"
    return Choice(best, Signal(units(best), UNITS, "q N / sigma of a batch"), (what + why,))


def units(plan: DpSgdPlan) -> float:
    """Return q N / sigma, the clipped gradients of a batch over the noise of their sum."""
    step = plan.method.mechanism
    return step.expected_batch_size / step.noise_multiplier

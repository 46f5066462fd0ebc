"""`audit` bounds a configuration's epsilon from below, and attacks its release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dpray.config.config import Config
from dpray.engines.base import Embedder, EngineError
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.evaluation import NOT_FOR_RELEASE
from dpray.evaluation.canaries import RunMethod, check_canaries, make_canaries, try_canaries
from dpray.io.columns import text_of
from dpray.io.file_list import list_files
from dpray.io.records import read_rows
from dpray.mechanisms.labels import LabelHistogram
from dpray.mechanisms.monte_carlo import attributes_target, audit_target, labels_target
from dpray.methods.registry import make_plan, released_losses
from dpray.runs.plan import Plan, label_histogram
from dpray.types import InputError, OnProgress

NOTHING_CHARGED = (
    "run with a ledger of its own, which is deleted: nothing was charged, so nothing of it may be "
    "released"
)

NO_CLAIM = "privacy.epsilon: infinite epsilon claims nothing, so there is nothing to audit"


def audit(
    config: Config,
    *,
    run: RunMethod,
    trials: int = 10_000,
    confidence: float = 0.95,
    members: str | None = None,
    non_members: str | None = None,
    canaries: bool = False,
    candidates: int = 10_000,
    on_progress: OnProgress = lambda progress: None,
    load_embedder: Callable[[str], Embedder] = SentenceTransformerEmbedder,
) -> dict[str, object]:
    """Bound the epsilon of the plan's mechanisms from below, by draws from their real code; opens
    no data.

    `trials` is the number of draws of each mechanism in each of two worlds. With probability
    `confidence`, all bounds are below the true epsilons.

    `members` are records that the finished run at `output.path` was made from, `non_members` are
    similar records. With both, a membership attack on the release is added. With `canaries`, `run`
    runs the method on a copy of the data with made-up secrets. The audit looks for the secrets in
    the release and, if a model is released, ranks each by the model among `candidates` look-alikes.
    Both results are private, and neither charges a budget.

    Returns `mechanisms` (a `Finding` each), `holds` (whether all hold), and `membership` and
    `canaries` if asked for. Raises InputError, before anything is drawn, for bad arguments, or if
    the plan makes no claim and nothing else is asked for.
    """
    if (members is None) != (non_members is None):
        raise InputError("members and non-members: give both, or neither")
    if not 0.5 <= confidence < 1:
        raise InputError(f"confidence: {confidence:g} is not at least 0.5 and below 1")
    plan = make_plan(config)
    if canaries:
        check_canaries(plan, candidates)
    attack = None
    if members is not None and non_members is not None:
        attack = _membership(config, members, non_members, confidence, load_embedder)
    if plan.config.not_private and not (canaries or attack):
        raise InputError(NO_CLAIM)
    result = _bounds(plan, trials, confidence, on_progress)
    if attack is not None:
        result["membership"] = attack()
    if canaries:
        result["canaries"] = {
            "private": NOT_FOR_RELEASE,
            "ledger": NOTHING_CHARGED,
            "secrets": try_canaries(
                plan, make_canaries(), candidates, run, released_losses, on_progress
            ),
        }
    return result


def _bounds(
    plan: Plan, trials: int, confidence: float, on_progress: OnProgress
) -> dict[str, object]:
    """Audit every mechanism of the plan; opens no data and no ledger. With probability `confidence`
    no bound is above its true epsilon."""
    findings = []
    if not plan.config.not_private:
        targets = list(plan.audit_targets())
        if (histogram := label_histogram(plan.config)) is not None:
            if isinstance(histogram, LabelHistogram):
                targets.insert(0, labels_target(histogram))
            else:
                targets.insert(0, attributes_target(histogram))
        alpha, delta = (1 - confidence) / len(targets), plan.config.privacy.delta
        findings = [audit_target(each, trials, delta, alpha, on_progress) for each in targets]
    return {
        "method": plan.config.method.name,
        "confidence": confidence,
        "epsilon": None if plan.config.not_private else plan.cost.epsilon,
        "delta": None if plan.config.not_private else plan.cost.delta,
        "mechanisms": [asdict(found) | {"holds": found.holds} for found in findings],
        "holds": all(found.holds for found in findings),
        "not_private": plan.config.not_private,
    }


def _membership(
    config: Config,
    members: str,
    non_members: str,
    confidence: float,
    load_embedder: Callable[[str], Embedder],
) -> Callable[[], dict[str, object]]:
    """Read the texts of the attack and load its model. Returns a function that runs the attack."""
    # Imported late: bounds do not need scikit-learn.
    from dpray.evaluation.membership import check_numbers, membership

    released = Path(config.output.path) / "synthetic.jsonl"
    if not released.is_file():
        raise InputError(f"output.path: {config.output.path} holds no finished run")
    inside = _texts(members, "members", config.data.text_of)
    outside = _texts(non_members, "non-members", config.data.text_of)
    synthetic = _texts(str(released), "output.path", partial(text_of, column="text"))
    check_numbers(inside, outside, synthetic)
    try:
        embedder = load_embedder(config.embedder.model)
    except EngineError as error:
        raise InputError(str(error)) from None
    return partial(membership, inside, outside, synthetic, embedder, confidence)


def _texts(path: str, key: str, text_of: Callable[..., str]) -> list[str]:
    rows = (each for file in list_files(path, key) for each in read_rows(file))
    return [text_of(row, where=where) for where, row in rows]

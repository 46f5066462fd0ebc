"""What of a plan is audited: every mechanism that it charges for, as the run would build it."""

from __future__ import annotations

from collections.abc import Iterator

from dpray.audit.gradients import one_run_target, repeated_target
from dpray.audit.histograms import (
    densities_target,
    labels_target,
    vocabulary_target,
    votes_target,
)
from dpray.audit.target import Finding, OnProgress, Target, audit
from dpray.audit.tokens import MOST_TOKENS, sparse_vector_target, tokens_target
from dpray.mechanisms.randomness import new_key
from dpray.methods.aug_pe.plan import AugPePlan
from dpray.methods.dp_kps.plan import DpKpsPlan
from dpray.methods.dp_kps.vocabulary import VocabularyHistogram
from dpray.methods.dp_sgd.algorithm import DpSgd
from dpray.methods.dp_sgd.plan import DpSgdPlan
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.runs.plan import Plan
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.reference import ReferenceTrainer
from dpray.types import InputError


def audit_plan(
    plan: Plan,
    trials: int,
    confidence: float,
    on_progress: OnProgress = lambda name, done, total: None,
) -> list[Finding]:
    """The findings for all of a plan's mechanisms; opens no data and no ledger. That none of the
    bounds is above the true epsilon holds with probability `confidence`, for all of them together.

    Raises InputError for a plan without a claim, too few trials, or a bad confidence.
    """
    if plan.not_private:
        raise InputError(
            "privacy.epsilon: is infinite, so nothing is claimed that could be audited"
        )
    if not 0.5 <= confidence < 1:
        raise InputError(f"confidence: {confidence:g} is not at least 0.5 and below 1")
    found = list(targets(plan))
    alpha = (1 - confidence) / len(found)
    delta = plan.config.privacy.delta
    return [audit(target, trials, delta, alpha, on_progress) for target in found]


def targets(plan: Plan) -> Iterator[Target]:
    """Each mechanism of the plan, as the run would build it."""
    if plan.label_histogram is not None:
        yield labels_target(plan.label_histogram)
    if isinstance(plan, PrivatePredictionPlan):
        mechanism = plan.method.mechanism
        for tokens in sorted({1, min(mechanism.private_tokens, MOST_TOKENS)}):
            yield tokens_target(mechanism, tokens)
        if mechanism.sparse_vector is not None:
            yield sparse_vector_target(mechanism)
    elif isinstance(plan, AugPePlan):
        assert plan.votes is not None
        for iterations in sorted({1, plan.settings.iterations}):
            yield votes_target(plan.votes, iterations)
    elif isinstance(plan, DpKpsPlan):
        method = plan.method
        yield vocabulary_target("vocabulary histogram", method.vocabulary)
        if isinstance(method.kde, VocabularyHistogram):
            yield vocabulary_target("densities of a class", method.kde)
        else:
            yield densities_target(
                "densities of a class", method.kde, max(1, len(method.estimators))
            )
    else:
        assert isinstance(plan, DpSgdPlan)
        yield repeated_target(plan.method, _trainer)
        yield one_run_target(plan.method, _trainer)


def _trainer(plan: DpSgd, loss: PerExampleLoss) -> ReferenceTrainer:
    """What trains where there is one process; ranks are held against it."""
    return ReferenceTrainer(plan, loss, new_key())

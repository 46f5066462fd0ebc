"""`make_plan` makes the frozen plan of DP-KPS from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dpray.accounting.accountant import cost
from dpray.accounting.calibration import calibrate
from dpray.accounting.event import Event
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.config.loading import parse
from dpray.io.few_shot import read_few_shot
from dpray.mechanisms.laplace_scale import laplace_scale
from dpray.methods.dp_kps.algorithm import DpKps
from dpray.methods.dp_kps.prompts import KeyphrasePrompts, load_keyphrase_prompts
from dpray.methods.dp_kps.public_terms import read_vocabulary
from dpray.methods.dp_kps.settings import DpKpsSettings, TuningSettings
from dpray.methods.dp_kps.tuning import Tuning
from dpray.runs.plan import Plan, longest_terms, with_labels
from dpray.types import InputError

NOISE_FACTORS = (2.0**-20, 4.0)
"""A common factor on the noises of both mechanisms lies within these. It is over 1 only where the
accountant's bound on both is worse than the sum of its bounds on each."""


@dataclass(frozen=True)
class DpKpsPlan(Plan):
    """Holds the plan of DP-KPS. `method.dimension` is 0 until the embedder is loaded: the cost does
    not depend on it. Where candidates are tuned, `method` is the first of them."""

    settings: DpKpsSettings
    method: DpKps
    prompts: KeyphrasePrompts
    tuning: Tuning | None = None

    @property
    def method_event(self) -> Event:
        """Return the event of both passes over the private records: together they cost less than
        one by one."""
        return (self.tuning or self.method).dp_event

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.dp_kps.audit import selection_target, targets

        yield from targets(self.method)
        if self.tuning is not None:
            yield selection_target(self.tuning)

    @property
    def makes_texts(self) -> bool:
        return self.config.engine.kind != "none"

    def stand_in(self) -> list[dict[str, Any]]:
        terms = read_vocabulary(self.settings.vocabulary, self.settings.stop_words)
        return longest_terms(terms, self.settings.sequence_length, self.proportions)

    def method_summary(self) -> dict[str, Any]:
        settings = self.settings
        resolved = settings.model_dump(exclude={"epsilon_vocabulary", "epsilon_kde"})
        return {
            "method": resolved
            | {
                "bandwidth": self.settings.kernel_bandwidth,
                "epsilon_vocabulary": self.method.epsilon_vocabulary,
                "epsilon_kde": self.method.epsilon_kde,
                "noise_factor": self.method.noise_factor,
            },
            "records": settings.records,
            "llm_calls": settings.records if self.makes_texts else 0,
            "most_completion_tokens": settings.records * settings.max_tokens * self.makes_texts,
            "warnings": [],
        }

    def lines(self) -> dict[str, str]:
        method, settings = self.method, self.settings
        calls = f"{settings.records:,}" if self.makes_texts else "none: the sequences themselves"
        tuned = {} if self.tuning is None else {"tuning": self._tuned(self.tuning)}
        return tuned | {
            "vocabulary": f"{method.terms:,} of {method.public_terms:,} terms, "
            f"noise of scale {method.vocabulary.scale:.3g} on every count",
            "densities": f"{settings.estimator}, {settings.sampling}, "
            f"{settings.noise} noise of scale {method.kde.scale:.3g}",
            "noise": f"{method.noise_factor:.3g} times that of eps {method.epsilon_vocabulary:g} "
            f"for the vocabulary and {method.epsilon_kde:g} for the densities, one by one",
            "records": f"{settings.records:,}, {settings.sequence_length} terms each",
            "LLM calls": calls,
        }

    def _tuned(self, tuning: Tuning) -> str:
        return (
            f"the best of about {tuning.dp_event.expected_runs:.3g} runs, whose number is secret, "
            f"of {len(tuning.candidates)} candidates; below is the first one"
        )


def make_plan(config: Config, settings: DpKpsSettings) -> DpKpsPlan:
    """Resolve everything that is null; reads the public vocabulary. Raises InputError where the
    keys together cost more than `privacy.epsilon`; the plan never does."""
    privacy = config.privacy
    if settings.noise == "gaussian" and privacy.delta == 0:
        raise InputError("privacy.delta: must be above 0 for method.noise gaussian")
    few_shot = read_few_shot(settings.few_shot, settings.few_shot_examples, config.data.path)
    prompts = load_keyphrase_prompts(settings.template, settings.document_type, few_shot)
    tuning = None
    if settings.tuning is None:
        method, whole = _method(config, settings)
        factor = joint_noise(config, lambda x: replace(method, noise_factor=x).dp_event, whole)
        method = replace(method, noise_factor=factor)
    else:
        tuning = make_tuning(config, settings, settings.tuning)
        method = tuning.candidates[0]
    return DpKpsPlan(config, config.data.proportions, settings, method, prompts, tuning)


def _method(config: Config, settings: DpKpsSettings, score: float = 0.0) -> tuple[DpKps, float]:
    """Return the method with a noise factor of 1, and the sum of all shares of epsilon, of which
    `score` is for a tuning's."""
    privacy = config.privacy
    labels = privacy.epsilon_labels if config.data.label_proportions == "measured" else 0.0
    epsilon_vocabulary, epsilon_kde, whole = settings.epsilons(privacy.epsilon, labels, score)
    method = DpKps(
        settings=settings,
        labels=tuple(config.data.label_names) or ("",),
        public_terms=len(read_vocabulary(settings.vocabulary, settings.stop_words)),
        dimension=0,
        epsilon_vocabulary=epsilon_vocabulary,
        epsilon_kde=epsilon_kde,
        delta=privacy.delta,
        records_per_unit=config.data.max_records_per_unit,
    )
    try:
        _ = method.vocabulary, method.kde
    except ValueError as error:
        raise InputError(f"privacy.epsilon: {error}") from None
    return method, whole


def make_tuning(config: Config, settings: DpKpsSettings, asked: TuningSettings) -> Tuning:
    """Return the tuning whose runs, all together, cost what is left of `privacy.epsilon`. Raises
    InputError for a candidate that is no setting of the method, and for data without labels."""
    if len(config.data.labels) < 2:
        raise InputError("method.tuning: needs data.labels, two or more: the score counts labels")
    left = config.privacy.epsilon - (
        config.privacy.epsilon_labels if config.data.label_proportions == "measured" else 0.0
    )
    score = asked.score_share * left
    base = settings.model_dump(exclude_unset=True, exclude={"tuning"})
    candidates, whole = [], 0.0
    for keys in asked.candidates:
        try:
            candidate = parse(DpKpsSettings, base | keys)
        except InputError as error:
            raise InputError(f"method.tuning.candidates: {error}") from None
        method, whole = _method(config, candidate, score)
        candidates.append(method)
    scale = laplace_scale(config.data.max_records_per_unit, score)
    tuning = Tuning(tuple(candidates), scale, asked.eta, asked.gamma)
    factor = joint_noise(
        config, lambda x: tuning.with_noise_factor(x).dp_event, whole, 2.0 + asked.eta
    )
    return tuning.with_noise_factor(factor)


def joint_noise(
    config: Config, event: Callable[[float], Event], epsilon: float, pure: float = 1.0
) -> float:
    """Return the least common factor on all noises at which they cost, with the measured label
    proportions, `epsilon` at `privacy.delta`, the sum of their shares.

    At delta 0 they cost just `pure` times this sum, and the factor makes up for that and for its
    last digits.
    """
    delta = config.privacy.delta

    def whole(factor: float) -> Event:
        return with_labels(config, event(factor))

    if delta > 0:
        low, high = NOISE_FACTORS
        try:
            return calibrate(whole, epsilon, delta, bracket=(low, pure * high), increasing=False)
        except ValueError as error:
            raise InputError(f"privacy.epsilon: {error}") from None
    factor, step = pure, math.ulp(pure)
    while cost(whole(factor), delta).epsilon > epsilon:
        factor, step = pure + step, 2.0 * step
    return factor

"""`make_plan` makes the frozen plan of several methods, one after the other, from a
configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed
from dpray.accounting.event import Event
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.config.sections import RuntimeConfig
from dpray.engines.base import Engine
from dpray.mechanisms.randomness import named_key
from dpray.methods import part
from dpray.methods.chain.settings import Chained, ChainSettings
from dpray.runs.plan import Before, Handed, Plan, TokenLimit
from dpray.types import BudgetRefused, InputError, OnProgress


@dataclass(frozen=True)
class ChainPlan(Plan):
    """Holds the plans of a chain's methods, by the names of their parts of the run.

    Claim: every number that a mechanism's cost depends on is in these plans, and is fixed before
    the data is opened. A method that is handed what the one before it released puts it into
    prompts, among the texts that are voted on, or into the control codes of records, for which its
    event holds whatever they are. So the run is an adaptive composition and costs `dp_event`.
    Proof: docs/privacy.md, section 6.10.
    """

    settings: ChainSettings
    stages: Mapping[str, Plan]

    @property
    def method_event(self) -> Event:
        return Composed(tuple(stage.method_event for stage in self.stages.values()))

    @property
    def column_values(self) -> dict[str, Sequence[str]]:
        return {c: v for stage in self.stages.values() for c, v in stage.column_values.items()}

    @property
    def token_limits(self) -> Sequence[TokenLimit]:
        return [
            replace(limit, key=_renamed(limit.key, name))
            for name, stage in self.stages.items()
            for limit in stage.token_limits
        ]

    @property
    def checks_records(self) -> bool:
        return any(stage.checks_records for stage in self.stages.values())

    def audit_targets(self) -> Iterator[Target]:
        for stage in self.stages.values():
            yield from stage.audit_targets()

    def try_models(self, build: Callable[..., Engine], on_progress: OnProgress) -> Engine | None:
        """Load the model for the first method that has one; the later ones have the same."""
        for name, stage in self.stages.items():
            if stage.config.engine.is_local:
                with keys_named(name):
                    return stage.try_models(build, on_progress)
        return None

    def with_salt(self, salt: str) -> Self:
        return self._each(lambda name, stage: stage.with_salt(named_key(salt, name)))

    def with_proportions(self, proportions: Mapping[str, float]) -> Self:
        changed = self._each(lambda name, stage: stage.with_proportions(proportions))
        return replace(changed, proportions=proportions)

    def with_runtime(self, runtime: RuntimeConfig) -> Self:
        changed = self._each(lambda name, stage: stage.with_runtime(runtime))
        return super(ChainPlan, changed).with_runtime(runtime)

    def _each(self, change: Callable[[str, Plan], Plan]) -> Self:
        changed = {name: change(name, stage) for name, stage in self.stages.items()}
        return replace(self, stages=changed)

    def method_summary(self) -> dict[str, Any]:
        delta = self.config.privacy.delta
        stages = {
            name: stage.method_summary()
            | {"epsilon_alone": cost(stage.method_event, delta).epsilon}
            for name, stage in self.stages.items()
        }
        *_, last = stages.values()
        return {
            "method": {
                "name": self.settings.name,
                "methods": [stage["method"] for stage in stages.values()],
            },
            "records": last["records"],
            "llm_calls": sum(stage["llm_calls"] for stage in stages.values()),
            "stages": stages,
            "warnings": [
                f"{name}: {_renamed(warning, name)}"
                for name, stage in stages.items()
                for warning in stage["warnings"]
            ],
        }

    def lines(self) -> dict[str, str]:
        delta, found = self.config.privacy.delta, {}
        for name, stage in self.stages.items():
            alone = cost(stage.method_event, delta).epsilon
            found[name] = f"eps {alone:.4f} alone, at the same delta"
            found |= {f"{name}: {key}": line for key, line in stage.lines().items()}
        return found


def make_plan(config: Config, settings: ChainSettings) -> ChainPlan:
    """Plan one method after the other. Raises InputError where a method has no plan, naming its
    key."""

    def plan(name: str, own: Config, method: Chained, *before: Before) -> Plan:
        made: Plan = part(method.name, "plan").make_plan(own, method, *before)
        return made

    return planned(config, settings, plan)


def planned(config: Config, settings: ChainSettings, plan: Callable[..., Plan]) -> ChainPlan:
    """Make one method's plan after the other's, by `plan(name, config, settings, *before)`: up to
    each of them, all together cost at most the sum of their shares of `privacy.epsilon`, measured
    label proportions included. So what joint accounting saves is left to the later methods."""
    shares = config.privacy.shares or [1 / len(settings.methods)] * len(settings.methods)
    stages: dict[str, Plan] = {}
    before: Before | None = None
    *_, last = settings.stages
    for (name, method), share in zip(settings.stages.items(), accumulate(shares), strict=True):
        whole = config.privacy.epsilon
        own = of_stage(config, method, whole if name == last else share * whole, name == last)
        given = () if before is None else (before,)
        with keys_named(name):
            made = plan(name, own, method, *given)
        before = Before(made.dp_event, Handed.of(made.stand_in()))
        stages[name] = replace(made, config=without_histogram(made.config))
    return ChainPlan(config, config.data.proportions, settings, stages)


def of_stage(config: Config, method: Chained, epsilon: float, is_last: bool) -> Config:
    """Return the configuration with which a method is planned at so much epsilon. DP-KPS and topics
    hand their sequences on, and have no text written for them."""
    privacy = config.privacy.model_copy(update={"epsilon": epsilon})
    changed: dict[str, Any] = {"method": method, "privacy": privacy}
    if method.name in ("dp_kps", "topics") and not is_last:
        changed["engine"] = config.engine.model_copy(update={"kind": "none"})
    return config.model_copy(update=changed)


def without_histogram(config: Config) -> Config:
    """Return the configuration without the measurement of label proportions, which is the whole
    run's."""
    if config.data.label_proportions != "measured":
        return config
    data = config.data.model_copy(update={"label_proportions": None})
    return config.model_copy(update={"data": data})


@contextmanager
def keys_named(stage: str) -> Iterator[None]:
    """Name the keys of `method` as they stand in the list `methods`, in an InputError or a refused
    charge."""
    try:
        yield
    except InputError as error:
        raise InputError(_renamed(str(error), stage)) from None
    except BudgetRefused as error:
        error.detail = _renamed(error.detail, stage)
        raise


def _renamed(words: str, stage: str) -> str:
    place = int(stage.partition("-")[0]) - 1
    return re.sub(r"\bmethod\.(?=[a-z])", f"methods.{place}.", words)

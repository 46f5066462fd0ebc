"""The free parameters of a chain are those of its methods, which are chosen one after the other."""

from __future__ import annotations

from dpray.config.config import Config
from dpray.methods import choose_of
from dpray.methods.chain.plan import make_plan, planned
from dpray.methods.chain.settings import Chained, ChainSettings
from dpray.runs.choice import Choice, Signal
from dpray.runs.plan import Before, Plan


def choose(config: Config, settings: ChainSettings, records: int) -> Choice:
    """Have each method choose for so many records, at the epsilon that those before it leave. The
    chain's signal is the strongest of its methods': it learns something where one of them does. The
    reasons name the signals that are below their noise. Keys that are set stay as they are."""
    choices: dict[str, Choice] = {}

    def choose_one(name: str, own: Config, method: Chained, *before: Before) -> Plan:
        choices[name] = choose_of(method.name)(own, method, records, *before)
        return choices[name].plan

    planned(config, settings, choose_one)
    methods = [choice.plan.settings.model_dump(exclude_unset=True) for choice in choices.values()]
    chosen = ChainSettings.model_validate({"name": "chain", "methods": methods})
    # Planned once more: this is the plan of the configuration that is written, to the last number.
    plan = make_plan(config.model_copy(update={"method": chosen}), chosen)
    signals = [
        Signal(each.value, each.enough, f"{name}: {each.meaning}")
        for name, choice in choices.items()
        if (each := choice.signal) is not None
    ]
    strongest = max(signals, key=lambda signal: signal.value / signal.enough, default=None)
    reasons = [f"{name}: {why}" for name, choice in choices.items() for why in choice.reasons]
    reasons += [
        f"{each.meaning}: {each.value:,.3g}, below the {each.enough:g} that are enough"
        for each in signals
        if not each.is_enough
    ]
    return Choice(plan, strongest, tuple(reasons))

"""The free parameters of a chain are those of its methods, which are chosen one after the other."""

from __future__ import annotations

from dataclasses import replace

from dpray.config.config import Config
from dpray.methods import choose_of
from dpray.methods.chain.plan import make_plan, planned
from dpray.methods.chain.settings import INPUT_KEY, ChainSettings
from dpray.runs.plan import Choice, Plan


def choose(config: Config, settings: ChainSettings, records: int) -> Choice:
    """Have each method choose for `records` texts, at the epsilon that those before it leave. The
    chain's signal is the strongest of its methods': it learns something if one of them does. The
    reasons name the signals that are below their noise. Keys that are set stay as they are."""
    choices: dict[str, Choice] = {}

    def choose_one(name: str, own: Config) -> Plan:
        choices[name] = choose_of(own.method.name)(own, own.method, records)
        return choices[name].plan

    planned(config, settings, choose_one)
    given = set(INPUT_KEY.values())
    chosen = ChainSettings.model_validate(
        {
            "name": "chain",
            "methods": [
                choice.plan.settings.model_dump(exclude_unset=True, exclude=given)
                for choice in choices.values()
            ],
        }
    )
    # Planned once more: this is the plan of the configuration that is written, to the last number.
    plan = make_plan(config.model_copy(update={"method": chosen}), chosen)
    signals, reasons = [], []
    for name, choice in choices.items():
        reasons += [f"{name}: {why}" for why in choice.reasons]
        if (signal := choice.signal) is None:
            continue
        signals.append(replace(signal, meaning=f"{name}: {signal.meaning}"))
        if not signal.is_enough:
            reasons.append(
                f"{name}: {signal.meaning}: {signal.value:,.3g}, below the {signal.enough:g} that "
                "are enough"
            )
    strongest = max(signals, key=lambda signal: signal.value / signal.enough, default=None)
    return Choice(plan, strongest, tuple(reasons))

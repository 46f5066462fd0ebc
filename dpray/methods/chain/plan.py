"""A chain is two ordinary methods under one charge. The sequences of terms that the first one makes
are public input of the second."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed
from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.config.sections import MethodSettings
from dpray.engines.base import Engine
from dpray.io.files import write_durably
from dpray.mechanisms.monte_carlo import Target
from dpray.methods import part
from dpray.methods.config import ChainSettings
from dpray.runs.plan import Plan, Reads, label_histogram
from dpray.types import BudgetRefused, InputError


@dataclass(frozen=True)
class ChainPlan(Plan):
    """The plans of the two methods.

    Claim: every number that the cost of a mechanism depends on is in these plans, and is fixed
    before the data is opened. The second method puts the first one's terms into prompts, or into
    the control codes of records, and its event holds for all prompts and codes. So the run is an
    adaptive composition and costs `dp_event`.
    Proof: docs/privacy.md, section 6.9.
    """

    settings: ChainSettings
    first: Plan
    second: Plan

    @property
    def links(self) -> dict[str, Plan]:
        """Return both plans by the names of their links."""
        return dict(zip(self.settings.links, (self.first, self.second), strict=True))

    @property
    def method_event(self) -> Event:
        return Composed((self.first.method_event, self.second.method_event))

    @property
    def reads(self) -> Reads:
        """Return the second method's `reads`: the first one reads texts and labels only."""
        found = self.second.reads
        limits = [replace(limit, key=_renamed(limit.key, 1)) for limit in found.token_limits]
        return replace(found, token_limits=limits)

    def check_embedder(self) -> None:
        self.first.check_embedder()
        self.second.check_embedder()

    def loader(self, build: Callable[..., Engine], **options: Any) -> Callable[[], Any]:
        load = self.second.loader(build)

        def load_as_named() -> Any:
            with keys_named(1):
                return load()

        return load_as_named

    def try_engine(self, engine: Engine) -> None:
        with keys_named(1):
            self.second.try_engine(engine)

    def audit_targets(self) -> Iterator[Target]:
        yield from self.first.audit_targets()
        yield from self.second.audit_targets()

    def method_summary(self) -> dict[str, Any]:
        delta = self.config.privacy.delta
        links = {
            name: link.method_summary() | {"epsilon_alone": cost(link.method_event, delta).epsilon}
            for name, link in self.links.items()
        }
        first, second = links.values()
        return {
            "method": {
                "name": self.settings.name,
                "methods": [first["method"], second["method"]],
            },
            "records": second["records"],
            "llm_calls": second["llm_calls"],
            "links": links,
            "warnings": [
                f"{name}: {_renamed(warning, place)}"
                for place, (name, link) in enumerate(links.items())
                for warning in link["warnings"]
            ],
        }

    def lines(self) -> dict[str, str]:
        return {
            f"{name}: {key}": line
            for name, link in self.links.items()
            for key, line in link.lines().items()
        }


def make_plan(config: Config, settings: ChainSettings) -> ChainPlan:
    """Plan both methods. The first one, with measured label proportions, costs at most its share of
    `privacy.epsilon`. The second one gets all that joint accounting leaves.

    The sequences of terms do not exist yet, so the second plan is made with stand-ins. Raises
    InputError that names the key if a method has no plan.
    """
    share, _ = config.privacy.shares or (0.5, 0.5)
    labels = label_histogram(config)
    before = None if labels is None else labels.dp_event
    # The first method makes sequences and no texts.
    silent = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "none"})})
    epsilon = config.privacy.epsilon
    with keys_named(0):
        first = _plan_link(silent, settings.methods[0], before, share * epsilon)
    with TemporaryDirectory(prefix="dpray-") as folder, keys_named(1):
        file = Path(folder, "terms.jsonl")
        write_records(file, _stand_ins(first))
        method = settings.methods[1].model_copy(update={"terms": str(file)})
        second = _plan_link(config, method, first.dp_event, epsilon)
    return ChainPlan(
        config, config.data.proportions, settings, first, with_terms(second, terms=None)
    )


def _plan_link(config: Config, method: MethodSettings, spent: Event | None, epsilon: float) -> Plan:
    """Plan one method, which may cost `epsilon` together with `spent`, the event before it."""
    privacy = config.privacy.model_copy(update={"epsilon": epsilon})
    own = config.model_copy(update={"method": method, "privacy": privacy}).after(spent)
    plan: Plan = part(method.name, "plan").make_plan(own, method)
    return plan


def with_terms(plan: Plan, terms: Path | None) -> Plan:
    """Return the second method's plan with its file of terms."""
    settings = plan.settings.model_copy(update={"terms": None if terms is None else str(terms)})
    config = plan.config.model_copy(update={"method": settings})
    return replace(plan, settings=settings, config=config)


def _stand_ins(plan: Any) -> list[dict[str, Any]]:
    """Return a sequence for each label, of the longest terms that the first method may choose: no
    other sequence takes more room in a prompt."""
    data, settings = plan.config.data, plan.settings
    terms = part(settings.name, "plan").public_terms(plan)
    number = settings.sequence_length if settings.name == "dp_kps" else settings.words
    longest = sorted(terms, key=lambda term: (-len(term), term))[:number]
    return [{"label": data.released_label(label), "terms": longest} for label in plan.proportions]


def write_records(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_durably(file, text, private=True)


@contextmanager
def keys_named(place: int) -> Iterator[None]:
    """In an InputError or a BudgetRefused, write `methods.PLACE.x` for each key `method.x`."""
    try:
        yield
    except InputError as error:
        raise InputError(_renamed(str(error), place)) from None
    except BudgetRefused as error:
        error.detail = _renamed(error.detail, place)
        raise


def _renamed(message: str, place: int) -> str:
    return re.sub(r"\bmethod\.(?=[a-z])", f"methods.{place}.", message)

"""A chain is a list of ordinary runs under one charge: what one releases is the next one's public
input. `make_plan` plans them one after the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed
from dpray.accounting.event import Event
from dpray.auditing.monte_carlo import Target
from dpray.config.base import MethodSettings
from dpray.config.config import Config
from dpray.engines.base import Engine
from dpray.io.files import write_durably
from dpray.mechanisms.labels import largest_remainder
from dpray.methods import part
from dpray.methods.chain.settings import INPUT_KEY, ChainSettings
from dpray.runs.plan import Plan, Reads, label_histogram
from dpray.types import BudgetRefused, InputError

S = TypeVar("S", bound=MethodSettings)


@dataclass(frozen=True)
class ChainPlan(Plan):
    """The plans of a chain's methods, by the names of their parts of the run.

    Claim: every number that a mechanism's cost depends on is in these plans, and is fixed before
    the data is opened. A method puts what the one before it released into prompts, among the texts
    that are voted on, or into the control codes of records, for which its event holds whatever they
    are. So the run is an adaptive composition and costs `dp_event`.
    Proof: docs/privacy.md, section 6.9.
    """

    settings: ChainSettings
    links: Mapping[str, Plan]

    @property
    def method_event(self) -> Event:
        return Composed(tuple(link.method_event for link in self.links.values()))

    @property
    def reads(self) -> Reads:
        each = {name: link.reads for name, link in self.links.items()}
        limits = [
            replace(limit, key=_renamed(limit.key, name))
            for name, reads in each.items()
            for limit in reads.token_limits
        ]
        columns = {c: v for reads in each.values() for c, v in reads.column_values.items()}
        checked_first = any(reads.checked_first for reads in each.values())
        return Reads(columns, token_limits=limits, checked_first=checked_first)

    def loader(self, build: Callable[..., Engine], **options: Any) -> Callable[[], Any]:
        """Return the loader of the first method that has a model; the later ones have the same."""
        name = next(name for name, link in self.links.items() if link.config.engine.is_local)
        load = self.links[name].loader(build)

        def load_as_named() -> Any:
            with keys_named(name):
                return load()

        return load_as_named

    def audit_targets(self) -> Iterator[Target]:
        for link in self.links.values():
            yield from link.audit_targets()

    def method_summary(self) -> dict[str, Any]:
        delta = self.config.privacy.delta
        links = {
            name: link.method_summary() | {"epsilon_alone": cost(link.method_event, delta).epsilon}
            for name, link in self.links.items()
        }
        methods = [link["method"] for link in links.values()]
        return {
            "method": {"name": self.settings.name, "methods": methods},
            "records": [*links.values()][-1]["records"],
            "llm_calls": sum(link["llm_calls"] for link in links.values()),
            "links": links,
            "warnings": [
                f"{name}: {_renamed(warning, name)}"
                for name, link in links.items()
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
    """Plan one method after the other. Raises InputError if a method has no plan, naming its
    key."""
    return planned(
        config, settings, lambda _, own: part(own.method.name, "plan").make_plan(own, own.method)
    )


def planned(
    config: Config, settings: ChainSettings, plan_link: Callable[[str, Config], Plan]
) -> ChainPlan:
    """Plan each method by `plan_link(name, config)`. Up to each of them, all together cost at most
    the sum of their shares of `privacy.epsilon`, measured label proportions included. So what joint
    accounting saves is left to the later methods.

    A method's public input does not exist yet: a file of the same shape stands in for it.
    """
    whole, number = config.privacy.epsilon, len(settings.methods)
    limits = [share * whole for share in accumulate(config.privacy.shares or [1 / number] * number)]
    limits[-1] = whole
    labels = label_histogram(config)
    spent: Event | None = None if labels is None else labels.dp_event
    links: dict[str, Plan] = {}
    before: Plan | None = None
    with TemporaryDirectory(prefix="dpray-") as folder:
        file = Path(folder, "public.jsonl")
        for (name, method), limit in zip(settings.links.items(), limits, strict=True):
            own = link_config(config, method, spent, limit, is_last=len(links) == number - 1)
            if before is not None:
                write_records(file, expected(before))
                own = own.model_copy(update={"method": naming(method, before, file)})
            with keys_named(name):
                made = plan_link(name, own)
            links[name] = made if before is None else with_input(made, before, None)
            before, spent = made, made.dp_event
    return ChainPlan(config, config.data.proportions, settings, links)


def link_config(
    config: Config, method: MethodSettings, spent: Event | None, epsilon: float, *, is_last: bool
) -> Config:
    """Return the configuration of one method, which may cost `epsilon` together with what is
    `spent` before it. Only the last method has a text written for its sequences."""
    privacy = config.privacy.model_copy(update={"epsilon": epsilon})
    changes: dict[str, Any] = {"method": method, "privacy": privacy}
    if method.name in ("dp_kps", "topics") and not is_last:
        changes["engine"] = config.engine.model_copy(update={"kind": "none"})
    return config.model_copy(update=changes).after(spent)


def naming(settings: S, before: Plan, file: Path | None) -> S:
    """Return the settings of a method that name the file of what the method before it released."""
    key = INPUT_KEY[before.settings.name]
    return settings.model_copy(update={key: None if file is None else str(file)})


def with_input(plan: Plan, before: Plan, file: Path | None) -> Plan:
    """Return the plan of a method that reads that file when it begins."""
    settings = naming(plan.settings, before, file)
    config = plan.config.model_copy(update={"method": settings})
    return replace(plan, settings=settings, config=config)


def expected(plan: Any) -> list[dict[str, Any]]:
    """Return public records of the shape that the method of a plan will release: as many texts, or
    for each label a sequence of the longest terms, which take most room in a prompt."""
    data, settings = plan.config.data, plan.settings
    if settings.name == "private_prediction":
        wanted = largest_remainder(plan.expected_records, plan.proportions)
        rows: list[tuple[str, dict[str, Any]]] = [
            (label, {"text": "-"}) for label, n in wanted.items() for _ in range(n)
        ]
    else:
        terms = part(settings.name, "plan").public_terms(plan)
        number = settings.sequence_length if settings.name == "dp_kps" else settings.words
        longest = sorted(terms, key=lambda term: (-len(term), term))[:number]
        rows = [(label, {"terms": longest}) for label in plan.proportions]
    return [{"label": data.released_label(label)} | row for label, row in rows]


def write_records(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_durably(file, text, private=True)


@contextmanager
def keys_named(link: str) -> Iterator[None]:
    """Name the keys of `method` as they stand in the list `methods`, in an InputError or a refused
    charge."""
    try:
        yield
    except InputError as error:
        raise InputError(_renamed(str(error), link)) from None
    except BudgetRefused as error:
        error.detail = _renamed(error.detail, link)
        raise


def _renamed(words: str, link: str) -> str:
    place = int(link.partition("-")[0]) - 1
    return re.sub(r"\bmethod\.(?=[a-z])", f"methods.{place}.", words)

"""A chain is two ordinary runs under one charge. The second method reads the sequences of terms
that the first one released, as its public `method.terms`.

The first run has a folder in the chain's `private`; the second one has the chain's own. Their units
have different names in the ledger, because no mechanism has the name of another method's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed
from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.config.sections import MethodSettings
from dpray.engines.base import Engine
from dpray.io.files import write_durably
from dpray.mechanisms.monte_carlo import Target
from dpray.mechanisms.randomness import named_key
from dpray.methods import load_module
from dpray.methods.config import ChainSettings
from dpray.runs.folder import FIRST, ReleaseFolder
from dpray.runs.forecast import Work
from dpray.runs.plan import Plan, PublicCalls, Reads, label_histogram
from dpray.types import InputError, Json, RunFailed

if TYPE_CHECKING:  # a plan needs no Ray
    from dpray.runs.session import Release, Session

TERMS_FILE = "terms.jsonl"
"""The file in the first run's folder with the sequences of terms that it released."""


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
        """Return both plans by their place and method."""
        return {f"1-{self.first.settings.name}": self.first} | {
            f"2-{self.second.settings.name}": self.second
        }

    @property
    def method_event(self) -> Event:
        return Composed((self.first.method_event, self.second.method_event))

    @property
    def work(self) -> Work:
        return self.first.work + self.second.work

    def public_calls(self, labels: Sequence[str]) -> PublicCalls:
        return self.second.public_calls(labels)

    def load_writer(self, build: Callable[..., Engine]) -> Engine:
        return self.second.load_writer(build)

    @property
    def reads(self) -> Reads:
        """Return the second method's `reads`: the first one reads texts and labels only, so that
        the second one's columns are looked at before it begins."""
        found = self.second.reads
        limits = [replace(limit, key=in_chain(limit.key, 1)) for limit in found.token_limits]
        return replace(found, token_limits=limits, checked_first=bool(found.column_values))

    def language_advice(self) -> list[str]:
        of_links = enumerate((self.first.language_advice(), self.second.language_advice()))
        each = [in_chain(line, place) for place, lines in of_links for line in lines]
        return [*dict.fromkeys(each)]

    def warnings_before_charge(self) -> list[str]:
        found = []
        for place, plan in enumerate((self.first, self.second)):
            with keys_of(place):
                found += [in_chain(line, place) for line in plan.warnings_before_charge()]
        return found

    def check_embedder(self) -> None:
        self.first.check_embedder()
        self.second.check_embedder()

    def load_model(self, build: Callable[..., Engine]) -> Any:
        with keys_of(1):
            return self.second.load_model(build)

    @property
    def trials(self) -> Sequence[tuple[str, Callable[[Engine], None]]]:
        numbered = enumerate(self.second.trials)
        return [(name, partial(self._try, number)) for number, (name, _) in numbered]

    def _try(self, number: int, engine: Engine) -> None:
        with keys_of(1):
            self.second.trials[number][1](engine)

    def audit_targets(self) -> Iterator[Target]:
        yield from self.first.audit_targets()
        yield from self.second.audit_targets()

    def method_summary(self) -> Json:
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
                f"{name}: {warning}" for name, link in links.items() for warning in link["warnings"]
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
    with keys_of(0):
        first = _plan_after(before, silent, settings.methods[0], share * epsilon)
    with TemporaryDirectory(prefix="dpray-") as folder, keys_of(1):
        file = Path(folder, TERMS_FILE)
        write_records(file, _stand_ins(first))
        method = settings.methods[1].model_copy(update={"terms": str(file)})
        second = _plan_after(first.dp_event, config, method, epsilon)
    return ChainPlan(
        config, config.data.proportions, settings, first, with_terms(second, terms=None)
    )


def _plan_after(
    spent: Event | None, config: Config, method: MethodSettings, epsilon: float
) -> Plan:
    """Plan one method, which may cost `epsilon` together with `spent`, the event before it."""
    privacy = config.privacy.model_copy(update={"epsilon": epsilon})
    own = config.model_copy(update={"method": method, "privacy": privacy}).after(spent)
    plan: Plan = load_module(method.name, "plan").make_plan(own, method)
    return plan


def with_terms(plan: Plan, terms: Path | None) -> Plan:
    """Return the second method's plan with its file of terms."""
    settings = plan.settings.model_copy(update={"terms": None if terms is None else str(terms)})
    config = plan.config.model_copy(update={"method": settings})
    return replace(plan, settings=settings, config=config)


def _stand_ins(plan: Any) -> list[dict[str, object]]:
    """Return a sequence for each label, of the longest terms that the first method may choose: no
    other sequence takes more room in a prompt."""
    data, settings = plan.config.data, plan.settings
    terms = load_module(settings.name, "plan").public_terms(plan)
    number = settings.sequence_length if settings.name == "dp_kps" else settings.words
    longest = sorted(terms, key=lambda term: (-len(term), term))[:number]
    return [{"label": data.released_label(label), "terms": longest} for label in plan.proportions]


def write_records(file: Path, records: Iterable[Mapping[str, object]]) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_durably(file, text, private=True)


@contextmanager
def keys_of(place: int) -> Iterator[None]:
    """Let an InputError name the keys of `method` as those of `methods.PLACE`."""
    try:
        yield
    except InputError as error:
        raise InputError(in_chain(str(error), place)) from None


def in_chain(message: str, place: int) -> str:
    """Return a message whose keys, which stand before its first colon, are those of a chain."""
    keys, colon, what = message.partition(":")
    return keys.replace("method.", f"methods.{place}.") + colon + what


def release(session: Session[Plan]) -> Release:
    """Run one method after the other. After a crash, the first one makes the same sequences again,
    from its published outputs."""
    plan = session.plan
    assert isinstance(plan, ChainPlan)
    show, (one, two) = session.on_progress, plan.links
    with closing(ReleaseFolder(str(session.folder.private / FIRST))) as folder, keys_of(0):
        run = replace(
            session,
            plan=as_run(session, plan.first),
            folder=folder,
            salt=named_key(session.salt, FIRST),
            on_progress=lambda p: show(replace(p, activity=f"{one}: {p.activity}")),
            engine=None,
            charged=plan.cost.epsilon,
        )
        with run.opened():
            measured: Release = load_module(plan.first.settings.name, "release").release(run)
        write_records(folder.root / TERMS_FILE, measured.records)

    # From here on the session is that of the second method.
    session.plan = as_run(session, with_terms(plan.second, folder.root / TERMS_FILE))
    session.on_progress = lambda p: show(replace(p, activity=f"{two}: {p.activity}"))
    with keys_of(1):
        name = plan.second.settings.name
        session.plan = load_module(name, "plan").with_public_files(session.plan)
        check_same_event(session.plan, plan.second)
        written: Release = load_module(name, "release").release(session)
    # An interrupted training is charged for more steps than it was planned with.
    session.plan, session.on_progress = replace(plan, first=run.plan, second=session.plan), show
    report = written.report.model_copy(update={"first": measured.report})
    return replace(written, report=report)


def as_run(session: Session[Plan], plan: Plan) -> Plan:
    """Return a method's plan with what is known since it was made: the actors' GPUs, the files'
    digests, and the measured label proportions and attributes."""
    known = {"runtime": session.config.runtime, "data": session.config.data}
    config = plan.config.model_copy(update=known)
    measured = session.plan
    return replace(plan, config=config, proportions=measured.proportions, joint=measured.joint)


def check_same_event(plan: Plan, charged: Plan) -> None:
    """Raise RunFailed if a plan that reads released terms is not the one that was charged. It is no
    `assert`, which `python -O` leaves out: the guarantee rests on it."""
    if plan.method_event != charged.method_event:
        raise RunFailed("the second method's cost depends on what the first one released")

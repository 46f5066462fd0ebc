"""A chain's plan costs at most the whole epsilon, and its methods their shares by joint accounting;
no cost depends on what is handed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed
from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.evaluation.audit import audit
from dpray.evaluation.compare import plain
from dpray.methods import load_module
from dpray.methods.chain import ChainPlan, check_same_event, with_terms, write_records
from dpray.methods.config import parse_config
from dpray.methods.dp_sgd.plan import DpSgdPlan
from dpray.methods.registry import make_plan
from dpray.runs.plan import label_histogram
from dpray.types import InputError, RunFailed
from dpray.workers.engine import build_engine
from dpray.workers.engine_pool import check_loads

KPS_AUG, KPS_PREDICT = ("dp_kps", "aug_pe"), ("dp_kps", "private_prediction")
KPS_SGD = ("dp_kps", "dp_sgd")
TOPICS_AUG, TOPICS_SGD = ("topics", "aug_pe"), ("topics", "dp_sgd")
EPSILON = 4.0

Make = Callable[..., Config]


def chain(config: Config) -> ChainPlan:
    plan = make_plan(config)
    assert isinstance(plan, ChainPlan)
    return plan


def epsilon(config: Config, *events: Event) -> float:
    return cost(Composed(events), config.privacy.delta).epsilon


@pytest.mark.parametrize(("names", "shares"), [(KPS_AUG, None), (TOPICS_AUG, (0.25, 0.75))])
def test_the_methods_use_up_epsilon_together(
    config: Make, shares: Any, names: tuple[str, ...]
) -> None:
    run = config(*names, privacy__epsilon=EPSILON, privacy__shares=shares)
    plan = chain(run)
    first, second = (stage.method_event for stage in plan.links.values())
    share = 0.5 if shares is None else shares[0]
    assert share * EPSILON * 0.999 < epsilon(run, first) <= share * EPSILON
    assert EPSILON * 0.999 < plan.cost.epsilon == epsilon(run, first, second) <= EPSILON
    # Joint accounting leaves the second method more than its share.
    assert epsilon(run, second) > 1.02 * (1 - share) * EPSILON


def test_batches_are_as_many_as_the_first_method_leaves(config: Make) -> None:
    run = config(*KPS_PREDICT, privacy__epsilon=EPSILON, private_prediction__texts=None)
    plan = chain(run)
    alone = config(*KPS_PREDICT, privacy__epsilon=0.5 * EPSILON, private_prediction__texts=None)
    assert 0.9 * EPSILON < plan.cost.epsilon <= EPSILON
    assert plan.summary()["records"] > chain(alone).summary()["records"]


@pytest.mark.parametrize("names", [KPS_PREDICT, TOPICS_AUG])
def test_measured_labels_are_charged_once(config: Make, names: tuple[str, ...]) -> None:
    measured = {"data__label_proportions": "measured", "privacy__epsilon_labels": 0.5}
    changes: dict[str, Any] = {"batches": "disjoint", "texts": None, "max_tokens": 2}
    disjoint = {f"private_prediction__{key}": value for key, value in changes.items()}
    if "private_prediction" not in names:
        disjoint = {}
    plan = chain(config(*names, privacy__epsilon=12.0, **measured, **disjoint))
    histogram = label_histogram(plan.config)
    assert histogram is not None
    assert plan.dp_event.terms()[histogram.dp_event] == 1
    assert plan.links["1-" + names[0]].config.spent == histogram.dp_event
    assert plan.cost.epsilon <= 12.0
    whole = [stage.method_event for stage in plan.links.values()]
    assert plan.dp_event.terms() == Composed((histogram.dp_event, *whole)).terms()


RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "label": st.sampled_from("ab"),
            "text": st.text(st.characters(codec="utf-8"), max_size=9),
            "terms": st.lists(st.text(st.characters(codec="utf-8"), max_size=9), min_size=1),
        }
    ),
    max_size=4,
)


@pytest.mark.parametrize("names", [KPS_AUG, KPS_PREDICT, KPS_SGD])
def test_no_cost_depends_on_what_the_method_before_released(
    config: Make, names: tuple[str, ...], tmp_path: Path
) -> None:
    """Whatever neighbouring data make the first method release, the second one's mechanisms have
    the same parameters, and the same event."""
    last = chain(config(*names)).second
    file = tmp_path / "released.jsonl"

    @trials(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
    @given(RECORDS)
    def check(records: Any) -> None:
        write_records(file, records)
        read = load_module(names[-1], "plan").with_public_files(with_terms(last, file))
        assert read.method_event == last.method_event
        assert read.proportions == last.proportions

    check()


def test_a_second_plan_of_another_cost_ends_the_run(config: Make) -> None:
    plan, other = (chain(config(*KPS_AUG, privacy__epsilon=e)).second for e in (EPSILON, 1.0))
    check_same_event(plan, plan)
    with pytest.raises(RunFailed, match="depends on what the first one released"):
        check_same_event(other, plan)


def test_pure_epsilon_is_the_sum(config: Make) -> None:
    run = config(*KPS_PREDICT, privacy__delta=0.0, private_prediction__texts=2)
    plan = chain(run)
    alone = [epsilon(run, stage.method_event) for stage in plan.links.values()]
    assert plan.cost.bound == "basic" and plan.cost.epsilon == pytest.approx(sum(alone))


def test_the_plan_says_what_each_method_makes(config: Make) -> None:
    summary = chain(config(*KPS_AUG)).summary()
    first, second = summary["links"].values()
    assert [method["name"] for method in summary["method"]["methods"]] == list(KPS_AUG)
    assert summary["records"] == second["records"] == 4
    assert first["llm_calls"] == 0 and summary["llm_calls"] == second["llm_calls"]
    assert {"1-dp_kps: vocabulary", "2-aug_pe: iterations"} < set(chain(config(*KPS_AUG)).lines())


def test_the_audit_covers_every_method(config: Make) -> None:
    measured = {"data__label_proportions": "measured", "privacy__epsilon_labels": 2.0}
    found = audit(config(*KPS_AUG, **measured), run=lambda *_: None, trials=300)
    names = {finding["name"] for finding in found["mechanisms"]}
    assert {"vocabulary histogram", "densities of a class", "vote histogram"} < names
    assert any("label" in name for name in names)
    assert found["holds"]
    names = {target.name for target in chain(config(*TOPICS_SGD)).audit_targets()}
    assert "topic histogram" in names


def test_a_model_whose_context_is_too_short_is_named_by_the_chains_key(config: Make) -> None:
    plan = chain(config(*KPS_SGD))
    assert isinstance(plan.second, DpSgdPlan)
    settings = plan.second.settings.model_copy(update={"max_length": 400})
    tried = replace(plan, second=replace(plan.second, settings=settings))
    load = partial(tried.load_model, build_engine)
    with pytest.raises(InputError, match=r"methods\.1\.max_length: 400 is more than"):
        check_loads(tried.config, load, lambda progress: None)


def test_a_configuration_reads_as_it_was_written(config: Make) -> None:
    run = config(*KPS_AUG)
    assert parse_config(plain(run)) == run


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        (("aug_pe", "dp_kps"), {}, "methods.0.name: one of 'dp_kps', 'topics'"),
        (("dp_kps", "topics"), {}, "methods.1.name: one of 'private_prediction', 'aug_pe', "),
        (("topics",), {}, "methods: a chain has two methods: dp_kps or topics, and then "),
        (("dp_kps", "private_prediction", "aug_pe"), {}, "methods: a chain has two methods"),
        (KPS_AUG, {"aug_pe__terms": "terms.jsonl"}, "methods.1.terms: is what dp_kps releases"),
        (TOPICS_AUG, {"privacy__epsilon": float("inf")}, "privacy.epsilon: infinity is not for"),
        (TOPICS_AUG, {"topics__topics": 0}, "methods.0.topics: Input should be greater"),
        (KPS_AUG, {"privacy__shares": [1.0]}, "privacy.shares: give one share"),
        (KPS_AUG, {"privacy__shares": [0.5, 0.6]}, "privacy.shares: shares sum to 1"),
        (KPS_AUG, {"privacy__epsilon": float("inf")}, "privacy.epsilon: infinity is not for"),
        (KPS_AUG, {"aug_pe__iteration": 3}, "methods.1.iteration: there is no such key"),
        (KPS_AUG, {"dp_kps__name": "auto"}, "methods.0.name: one of 'dp_kps'"),
        (KPS_AUG, {"engine": {"kind": "none"}}, "engine.kind: none is not for aug_pe, which takes"),
    ],
)
def test_a_wrong_chain_is_refused(
    config: Make, names: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as refused:
        config(*names, **changes)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        (KPS_AUG, {"aug_pe__template": "yelp"}, "methods.1.template: yelp: `random` has no"),
        (
            KPS_PREDICT,
            {"private_prediction__template": "json"},
            "methods.1.template: json: `user` has no",
        ),
        (KPS_AUG, {"aug_pe__noise_multiplier": 0.01}, "methods.1.noise_multiplier: 0.01 costs"),
        (KPS_AUG, {"dp_kps__epsilon_kde": 29.0}, "methods.0.epsilon_vocabulary and methods.0."),
        (KPS_PREDICT, {"private_prediction__texts": 10**6}, "methods.1.texts: 1000000 texts cost"),
        (TOPICS_AUG, {"topics__public": "no.jsonl"}, "methods.0.public: no such file"),
        (TOPICS_AUG, {"topics__topics": 10}, "methods.0.topics: 10 topics need as many texts, but"),
        (TOPICS_AUG, {"topics__noise_multiplier": 0.01}, "methods.0.noise_multiplier: 0.01 costs"),
        (TOPICS_AUG, {"topics__noise_multiplier": 1e9}, "methods.0.noise_multiplier: 1e+09 is"),
        (TOPICS_AUG, {"aug_pe__noise_multiplier": 1e-9}, "methods.1.noise_multiplier: 1e-09 is"),
        (TOPICS_SGD, {"dp_sgd__max_length": 16}, "methods.1.max_length: 16 has room for 7 tokens"),
    ],
)
def test_a_chain_without_a_plan_names_the_method(
    config: Make, names: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as refused:
        make_plan(config(*names, **changes))
    assert str(refused.value).startswith(said)


def test_shares_are_for_chains(settings: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(InputError, match=r"^privacy.shares: is for chained"):
        parse_config(settings(privacy__shares=[0.5, 0.5]))
    both = settings() | {"methods": []}
    with pytest.raises(InputError, match=r"^methods: stands in place of"):
        parse_config(both)

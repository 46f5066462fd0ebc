"""Chains beside single methods, in a comparison and in a rehearsal."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpray.accounting.accountant import cost
from dpray.config.config import Config
from dpray.methods.chain.plan import ChainPlan
from dpray.methods.config import parse_config
from dpray.planning.compare import METHODS, Answer, Comparison, compare, sections, wanted
from dpray.planning.rehearse import _on_twin
from dpray.registry import make_plan
from dpray.types import InputError

COUNTS = {f"word{rank}": 2**12 // (rank + 1) for rank in range(400)}
CHAINS = (
    "dp_kps+aug_pe",
    "dp_kps+private_prediction",
    "private_prediction+aug_pe",
    "topics+aug_pe",
)

Tree = Callable[..., dict[str, Any]]


@pytest.fixture
def tree(auto_settings: Callable[..., dict[str, Any]]) -> Tree:
    return partial(auto_settings, COUNTS, 40)


@pytest.fixture
def asked(tree: Tree, tmp_path: Path) -> Config:
    made, public = tree(privacy__epsilon=8.0), tmp_path / "public.jsonl"
    rows = [{"text": f"a fever number {n}", "label": "ab"[n % 2]} for n in range(60)]
    public.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made["method"]["chains"] = [name.split("+") for name in CHAINS]
    made["method"]["topics"] = {"public": str(public)}
    return parse_config(made)


def chosen(compared: Comparison, name: str) -> tuple[Answer, ChainPlan]:
    answer = compared.answers[name]
    assert answer.choice is not None, answer.why_not
    plan = answer.choice.plan
    assert isinstance(plan, ChainPlan)
    return answer, plan


def test_chains_are_asked_after_the_methods_and_written_as_they_are_chosen(asked: Config) -> None:
    assert list(sections(asked)) == [*METHODS, *CHAINS]
    compared = compare(asked, methods=CHAINS)
    for name in CHAINS:
        _, plan = chosen(compared, name)
        written = parse_config(compared.tree(name))
        assert "method" not in compared.tree(name)
        assert make_plan(written).summary() == plan.summary()
        assert plan.summary()["records"] == 40 and plan.cost.epsilon <= 8.0
    _, plan = chosen(compared, "topics+aug_pe")
    # The most of the numbers that are tried and the public texts allow.
    assert plan.settings.methods[0].topics == 50  # type: ignore[union-attr]
    _, plan = chosen(compared, "private_prediction+aug_pe")
    first, second = plan.settings.methods
    # The keys that are set stay; the free ones are chosen.
    assert (first.max_tokens, first.batch_size, first.clip) == (4, 16, "dclip")  # type: ignore[union-attr]
    assert {"iterations", "variations"} <= second.model_fields_set


def test_the_methods_of_a_chain_have_the_epsilon_that_is_left(asked: Config) -> None:
    """A later method has less by what an earlier one takes; together they cost what there is."""
    alone = compare(asked, methods=["dp_kps", "aug_pe"]).answers
    _, plan = chosen(compare(asked, methods=CHAINS[:1]), CHAINS[0])
    assert 0.999 * 8.0 < plan.cost.epsilon <= 8.0
    for stage, name in zip(plan.links.values(), ("dp_kps", "aug_pe"), strict=True):
        single = alone[name].choice
        assert single is not None
        spent = cost(stage.method_event, asked.privacy.delta).epsilon
        assert 0 < spent < 0.95 * single.plan.cost.epsilon


def test_errors_name_keys_as_they_are_written(tree: Tree, tmp_path: Path) -> None:
    """Under `name: auto` the keys of a chain's method are those under the method's name."""
    made = tree(privacy__epsilon=8.0)
    made["method"] |= {
        "chains": [["topics", "aug_pe"]],
        "topics": {"public": str(tmp_path / "nowhere.jsonl")},
    }
    refused = compare(parse_config(made), methods=["topics+aug_pe"]).answers["topics+aug_pe"]
    assert refused.choice is None and str(refused.why_not).startswith("method.topics.public: ")
    made["method"]["topics"]["words"] = 0
    with pytest.raises(InputError, match=r"^method\.topics\.words: "):
        compare(parse_config(made), methods=["topics+aug_pe"])


def test_the_signal_is_the_strongest_one_and_weak_ones_are_named(asked: Config) -> None:
    def at(size: int) -> Answer:
        data = asked.data.model_copy(update={"public_size": size})
        return compare(asked.model_copy(update={"data": data}), methods=CHAINS[:1]).answers[
            CHAINS[0]
        ]

    for size, enough, weak in ((4000, True, 0), (200, True, 1), (20, False, 2)):
        answer = at(size)
        assert answer.choice is not None and answer.choice.signal is not None
        assert answer.choice.signal.meaning.startswith("2-aug_pe: votes a text")
        named = [why for why in answer.choice.reasons if "below the" in why]
        assert len(named) == weak and all("-" in why.split(":")[0] for why in named)
        assert answer.is_enough is enough
        assert enough or (answer.needs is not None and at(answer.needs).is_enough)


def test_a_chain_that_is_configured_is_compared_with_its_methods(
    config: Callable[..., Config],
) -> None:
    run = config("dp_kps", "aug_pe", privacy__shares=[0.3, 0.7], dp_kps__records=12)
    compared = compare(run, methods=["dp_kps", "dp_kps+aug_pe"])
    assert compared.records == 4, "as many as the last method makes"
    _, plan = chosen(compared, "dp_kps+aug_pe")
    assert plan.config.privacy.shares == (0.3, 0.7)
    alone = compared.answers["dp_kps"].choice
    assert alone is not None and alone.plan.config.privacy.shares is None
    assert alone.plan.summary()["records"] == 4
    assert alone.plan.settings.model_dump()["vocabulary_size"] == 6
    assert list(sections(run)) == [*METHODS, "dp_kps+aug_pe"]


def test_wrong_chains_and_keys_are_named(tree: Tree) -> None:
    for chains, said in (
        ([["aug_pe", "dp_kps"]], r"^method\.chains: dp_kps cannot follow aug_pe"),
        ([["aug_pe"]], r"^method\.chains: a chain has two methods or more"),
        ([["dp_kps", "who"]], r"^method\.chains: who cannot follow dp_kps"),
    ):
        made = tree()
        made["method"]["chains"] = chains
        with pytest.raises(InputError, match=said):
            parse_config(made)
    made = tree()
    made["method"] |= {"aug_pe": {"iteration": 3}, "chains": [["dp_kps", "aug_pe"]]}
    with pytest.raises(InputError, match=r"^method\.aug_pe\.iteration: there is no such key"):
        compare(parse_config(made), methods=["dp_kps+aug_pe"])


def test_a_chain_whose_engine_does_not_fit_says_why(tree: Tree) -> None:
    engine = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
    made = tree(engine=engine)
    made["method"] |= {"private_prediction": {}, "chains": [["dp_kps", "private_prediction"]]}
    refused = compare(parse_config(made), methods=["dp_kps+private_prediction"]).answers
    (answer,) = refused.values()
    assert answer.choice is None and "engine.kind" in str(answer.why_not)


def test_a_rehearsal_cuts_what_the_last_method_makes_alone(asked: Config, tmp_path: Path) -> None:
    compared = compare(asked, methods=CHAINS)
    for name, records in zip(CHAINS, ((40, 40), (40, 20), (40, 40), (40, 40)), strict=True):
        run = _on_twin(asked, compared.answers[name], tmp_path / "x.jsonl", tmp_path / name, 20)
        method = run.method
        assert method.name == "chain"
        keys = [
            "max_records" if m.name == "private_prediction" else "records" for m in method.methods
        ]
        found = [getattr(m, key) for m, key in zip(method.methods, keys, strict=True)]
        # Votes are shared out over the texts of Aug-PE: fewer would have less noise.
        assert tuple(found) == records


def test_the_number_of_texts_is_what_is_wanted_and_not_what_a_chain_hands_on(
    config: Callable[..., Config],
) -> None:
    run = config("private_prediction", "aug_pe")
    assert wanted(run) == 4
    assert sections(run)["private_prediction"].keys().isdisjoint({"texts", "max_records"})
    assert wanted(config("dp_kps", "private_prediction")) == 6
    without = config("dp_kps", "private_prediction", private_prediction__texts=None)
    assert wanted(without) == 1000

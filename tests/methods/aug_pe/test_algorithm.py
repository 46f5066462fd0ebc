"""Algorithm 1 stepped with a scripted model, and embeddings and votes that can be worked out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteGaussian
from dpray.engines.base import Sampling
from dpray.engines.requests import Request
from dpray.io.template_file import Template
from dpray.mechanisms.randomness import generator, new_key
from dpray.mechanisms.votes import VoteHistogram
from dpray.methods.aug_pe.algorithm import (
    AugPe,
    AugPeRun,
    Checkpoint,
    Population,
    masked,
    sampling,
    select_by_probability,
    select_by_rank,
    words,
)
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.types import DprayError, Prompt
from tests.statistical.two_sided import fits_probabilities

SALT = "5a" * 16
KEY = "1" * 64
KEYS: dict[str, Any] = {
    "iterations": 4, "variations": 3, "lookahead": 0, "selection": "rank", "max_tokens": 64,
    "variation": "paraphrase", "mask_probability": 0.5, "temperature": 1.2, "top_p": 0.9,
    "word_var": 40.0, "tokens_per_word": 1.2, "min_words": 25, "max_retries": 2,
}  # fmt: skip
SETTINGS = AugPeSettings(name="aug_pe", **KEYS)
PLAN = AugPe(SETTINGS, {"World": 3, "Sports": 2}, VoteHistogram(4.0))


def changed(**changes: Any) -> AugPeSettings:
    return AugPeSettings(**(SETTINGS.model_dump() | changes))


def plan_with(records: Mapping[str, int] = PLAN.records, **changes: Any) -> AugPe:
    return replace(PLAN, records=records, settings=changed(**changes))


class Words:
    """Prompts that show all they were given."""

    template = Template({}, stop=("###",), refusals=("I cannot",))
    label_of = staticmethod(str)

    def random(self, label: str, rng: np.random.Generator) -> Prompt:
        return Prompt(f"random|{label}|{rng.integers(1000)}")

    def variation(
        self, kind: str, label: str, text: str, words: int | None, rng: np.random.Generator
    ) -> Prompt:
        return Prompt(f"{kind}|{label}|{text}|{words}|{rng.integers(1000)}")


class Model:
    """Answers a request with a text that is its own id, unless scripted otherwise."""

    def __init__(self, script: Callable[[Request], str | None] = lambda request: None) -> None:
        self.script = script
        self.asked: dict[str, Request] = {}
        self.sizes: list[int] = []

    def __call__(self, requests: Sequence[Request]) -> list[str]:
        self.sizes.append(len(requests))
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> str:
        assert request.request_id not in self.asked, "asked twice"
        self.asked[request.request_id] = request
        said = self.script(request)
        return f" text {request.request_id} \n" if said is None else said

    def named(self, beginning: str) -> list[str]:
        return [name for name in self.asked if name.startswith(beginning)]


def embed(texts: Sequence[str]) -> np.ndarray:
    """Two numbers made of the text."""
    assert all(texts), "nothing empty is embedded"
    sums = [sum(map(ord, text)) for text in texts]
    return np.array([[np.sin(s), np.cos(s)] for s in sums], dtype=np.float32)


class Voters:
    """Noisy votes made of the embeddings; keeps the checkpoints."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Population, Mapping[str, np.ndarray]]] = []
        self.checkpoints: list[Checkpoint] = []

    def __call__(self, t: int, S: Population, phi: Mapping[str, np.ndarray]) -> Any:
        self.seen.append((t, {k: list(v) for k, v in S.items()}, dict(phi)))
        votes = {label: np.rint(5 * rows[:, 0]).astype(np.int64) for label, rows in phi.items()}
        kept = {label: counts.tolist() for label, counts in votes.items()}
        self.checkpoints.append(Checkpoint(t, {k: list(v) for k, v in S.items()}, kept))
        return self.checkpoints[-1]


def run(
    plan: AugPe,
    model: Model,
    voters: Voters,
    done: Sequence[Checkpoint] = (),
    salt: str = SALT,
    **options: Any,
) -> Population:
    words: Any = Words()
    checkpoints = AugPeRun(plan, words, model, embed, voters, salt, **options).algorithm_1(done)
    assert checkpoints == [*done, *voters.checkpoints]
    return plan.kept(checkpoints[-1], salt)


def test_votes_that_choose_nothing_are_refused() -> None:
    """One candidate for each kept text: rank would keep them all."""
    with pytest.raises(ValidationError, match="the votes would choose nothing"):
        AugPeSettings(name="aug_pe", variations=1)
    assert AugPeSettings(name="aug_pe", variations=1, selection="probability").variations == 1
    kept = select_by_rank(np.array([5, 0, 3]), 3, np.random.default_rng(0))
    assert sorted(kept) == [0, 1, 2]


def test_the_steps_of_aug_pe() -> None:
    model, voters = Model(), Voters()
    result = run(PLAN, model, voters)
    assert {label: len(texts) for label, texts in result.items()} == {"World": 3, "Sports": 2}
    assert [t for t, _, _ in voters.seen] == [1, 2, 3, 4]
    t, first, phi = voters.seen[0]
    assert first["World"] == [f"text random-1-World/{i}/0" for i in range(9)], "L * n_syn"
    assert len(first["Sports"]) == 6
    np.testing.assert_array_equal(phi["World"], embed(first["World"]))
    for (t, S, _), checkpoint in zip(voters.seen[1:], voters.checkpoints, strict=False):
        for label, n_syn in PLAN.records.items():
            kept = S[label][:n_syn]
            votes = np.maximum(checkpoint.votes[label], 0)
            by_text = dict(zip(checkpoint.population[label], votes, strict=True))
            assert sorted((by_text[x] for x in kept), reverse=True) == sorted(votes)[::-1][:n_syn]
            assert S[label][n_syn:] == [
                f"text variation-{t}-{label}/{i}/0" for i in range(2 * n_syn)
            ]
            for i in range(2 * n_syn):
                parent = model.asked[f"variation-{t}-{label}/{i}/0"].prompt.user.split("|")[2]
                assert parent == kept[i // 2], "L - 1 variations of each kept text"
    last = voters.checkpoints[-1].population
    for label, texts in result.items():
        assert set(texts) <= set(last[label]), "the selected set, of the last population"
    assert not model.named("variation-5"), "nothing is written after the last vote"
    assert len(model.asked) == PLAN.llm_calls == 5 * (3 + 3 * 2)
    assert PLAN.calls_by_purpose == {"random texts": 15, "variations": 30, "lookahead": 0}
    assert model.sizes == [15, 10, 10, 10], "all labels are asked for together"


def test_the_cost_is_that_of_one_event_an_iteration() -> None:
    assert PLAN.dp_event == SelfComposed(DiscreteGaussian(4.0, 1), 4)
    of_units = replace(plan_with(iterations=10), votes=VoteHistogram(8.0, records_per_unit=2))
    assert of_units.dp_event == SelfComposed(DiscreteGaussian(8.0, 2), 10)
    with pytest.raises(ValueError, match="without noise"):
        _ = replace(PLAN, votes=None).dp_event


@pytest.mark.parametrize(
    ("selection", "lookahead", "stopped_after"),
    [("rank", 0, 1), ("probability", 2, 3), ("rank", 2, 4)],
)
def test_a_resumed_run_ends_like_an_undisturbed_one(
    selection: Any, lookahead: int, stopped_after: int
) -> None:
    plan = plan_with(selection=selection, lookahead=lookahead)
    whole, voters = Model(), Voters()
    result = run(plan, whole, voters)
    kept = json.dumps([asdict(done) for done in voters.checkpoints[:stopped_after]])
    rest, later = Model(), Voters()
    again = run(plan, rest, later, [Checkpoint(**done) for done in json.loads(kept)])
    assert again == result
    assert rest.asked.items() <= whole.asked.items(), "the same ids, prompts and parameters"
    assert later.checkpoints == voters.checkpoints[stopped_after:], "no vote is taken again"
    assert plan.kept(voters.checkpoints[-1], SALT) == result, "the output is in the last one"


def test_public_randomness_depends_on_the_salt_and_the_name() -> None:
    first, same, other = Model(), Model(), Model()
    run(PLAN, first, Voters())
    run(PLAN, same, Voters())
    run(PLAN, other, Voters(), salt="5b" * 16)
    assert first.asked == same.asked
    assert first.asked.keys() == other.asked.keys()
    prompts = [request.prompt.user for request in first.asked.values()]
    assert prompts != [request.prompt.user for request in other.asked.values()]
    drawn = [p.rpartition("|")[2] for p in prompts if p.startswith("random|World")]
    assert len(set(drawn)) > 5, "each prompt draws its own keyword"


def test_a_checkpoint_has_a_count_for_each_text() -> None:
    with pytest.raises(ValueError, match="one vote count for each"):
        Checkpoint(1, {"": ["a", "b"]}, {"": [1]})
    with pytest.raises(ValueError, match="one vote count for each"):
        Checkpoint(1, {"": ["a"]}, {})


def test_empty_and_refused_answers_are_asked_again_and_then_dropped() -> None:
    def script(request: Request) -> str | None:
        name, i, attempt = request.request_id.rsplit("/", 2)
        if name == "random-1-World" and i == "0":
            return ["", "I cannot write that.", "  at last "][int(attempt)]
        return " \n" if name == "random-1-World" and i == "1" else None

    model, voters = Model(script), Voters()
    run(PLAN, model, voters)
    population = voters.seen[0][1]["World"]
    assert population == ["at last"] + [f"text random-1-World/{i}/0" for i in range(2, 9)]
    tries = [model.asked[f"random-1-World/1/{attempt}"] for attempt in range(3)]
    assert "random-1-World/1/3" not in model.asked
    assert len({request.prompt.user for request in tries}) == 3, "with new random choices"
    assert model.sizes[:3] == [15, 2, 2]
    once = Model(script)
    run(plan_with(max_retries=0), once, Voters())
    assert once.named("random-1-World/0/") == ["random-1-World/0/0"]


def test_an_answer_with_too_few_words_is_asked_again() -> None:
    """An answer is `text NAME` here: two words."""
    run(plan_with(least_words=2), Model(), Voters())
    with pytest.raises(DprayError, match="label 'World'"):
        run(plan_with(least_words=3), model := Model(), Voters())
    assert len(model.named("random-1-World/0/")) == 3


def test_fewer_texts_than_wanted_go_on_and_none_is_an_error() -> None:
    def one_left(request: Request) -> str | None:
        return "" if request.request_id.rsplit("/", 1)[0] != "random-1-Sports/4" else None

    plan = replace(PLAN, records={"Sports": 2})
    model, voters = Model(one_left), Voters()
    result = run(plan, model, voters)
    assert result == {"Sports": ["text random-1-Sports/4/0"]}
    assert [S["Sports"] for _, S, _ in voters.seen] == [["text random-1-Sports/4/0"]] * 4
    nobody = Voters()
    with pytest.raises(DprayError, match=r"none of the requests for label 'World' in iteration 1"):
        run(PLAN, Model(lambda r: "" if "World" in r.request_id else None), nobody)
    assert not nobody.seen, "nothing is voted on"


def test_labels_without_records_take_no_part() -> None:
    model, voters = Model(), Voters()
    result = run(replace(PLAN, records={"World": 3, "Rare": 0}), model, voters)
    assert result.keys() == {"World"} == voters.seen[0][2].keys()
    assert not model.named("random-1-Rare")


def test_the_original_pe() -> None:
    """L = 1, draws by probability: each population is one variation of each text drawn."""
    plan = plan_with({"": 6}, variations=1, selection="probability", lookahead=2)
    model, voters = Model(), Voters()
    result = run(plan, model, voters)
    for t, S, _ in voters.seen:
        name = "random-1-" if t == 1 else f"variation-{t}-"
        assert S[""] == [f"text {name}/{i}/0" for i in range(6)], "the parents are not kept"
    last = voters.checkpoints[-1]
    voted = {x for x, v in zip(last.population[""], last.votes[""], strict=True) if v > 0}
    assert len(result[""]) == 6 and set(result[""]) <= voted, "drawn among those with votes"
    assert len(model.asked) == plan.llm_calls == 6 + 3 * 6 + 4 * 6 * 2


def test_lookahead_is_the_mean_over_the_variations_that_were_answered() -> None:
    def script(request: Request) -> str | None:
        name, i, _ = request.request_id.rsplit("/", 2)
        return "" if name == "lookahead-1-World" and int(i) in (1, 3, 4, 5) else None

    plan = plan_with(lookahead=3, iterations=1)
    model, voters = Model(script), Voters()
    run(plan, model, voters)
    _, S, phi = voters.seen[0]
    assert {label: rows.shape for label, rows in phi.items()} == {"World": (9, 2), "Sports": (6, 2)}

    def mean(label: str, *numbers: int) -> np.ndarray:
        return embed([f"text lookahead-1-{label}/{i}/0" for i in numbers]).mean(0)

    np.testing.assert_allclose(phi["World"][0], mean("World", 0, 2), atol=1e-6)
    np.testing.assert_array_equal(phi["World"][1], embed(S["World"][1:2])[0])
    np.testing.assert_allclose(phi["World"][8], mean("World", 24, 25, 26), atol=1e-6)
    np.testing.assert_allclose(phi["Sports"][5], mean("Sports", 15, 16, 17), atol=1e-6)
    assert model.asked["lookahead-1-World/8/0"].prompt.user.split("|")[2] == S["World"][2]


def test_adaptive_length() -> None:
    rng = generator("0" * 64)
    long, short = "word " * 200, "a short one"
    draws = np.array([words(SETTINGS, long, rng) for _ in range(4000)])
    assert abs(draws.mean() - 200) < 6 * 20 / np.sqrt(4000)
    assert abs(draws.std() - 0.5 * 40) < 6 * 20 / np.sqrt(2 * 4000)
    draws = np.array([words(SETTINGS, short, rng) for _ in range(500)])
    assert draws.min() == 25 and draws.max() > 25
    exact = changed(mask_probability=0.0)
    assert (words(exact, long, rng), words(exact, short, rng)) == (200, 25)
    assert sampling(exact, 25, ()).max_tokens == 30, "w * tokens_per_word"
    assert sampling(exact, 26, ()).max_tokens == 32, "rounded up"
    assert sampling(exact, 200, ()).max_tokens == 64, "the cap"
    off = changed(word_var=None)
    assert words(off, long, rng) is None and sampling(off, None, ()).max_tokens == 64


def test_requests_carry_the_length_and_the_parameters() -> None:
    model = Model(lambda request: "one two three " * 9)
    run(PLAN, model, Voters())
    asked = Sampling(64, temperature=1.2, top_p=0.9, stop=("###",))
    assert model.asked["random-1-World/0/0"].sampling == asked
    lengths = set()
    for name in model.named("variation-"):
        request = model.asked[name]
        w = int(request.prompt.user.split("|")[3])
        assert request.sampling.max_tokens == min(int(np.ceil(w * 1.2)), 64) and w >= 25
        lengths.add(w)
    assert len(lengths) > 5


def test_masks() -> None:
    rng = generator("1" * 64)
    x = "Not that great, terrible egg-rolls\n\nand don't smell!! 5.0"
    assert masked(changed(mask_probability=0.0), x, rng) == x
    every = masked(changed(mask_probability=1.0), x, rng)
    assert every == "_ _ __ _ _\n\n_ _ __ ___"
    many = masked(changed(mask_probability=0.3), "word " * 20_000, rng)
    assert abs(many.count("_") - 6000) < 6 * np.sqrt(20_000 * 0.3 * 0.7)


def test_blanks_are_made_for_that_variation_only() -> None:
    blanks = changed(variation="fill_in_the_blanks", mask_probability=1.0)
    for settings, shown in ((blanks, "_ _ _"), (SETTINGS, "a dog barks")):
        model = Model(lambda request: "a dog barks")
        run(replace(PLAN, settings=settings), model, Voters())
        kind, _, text, *_ = model.asked["variation-2-World/0/0"].prompt.user.split("|")
        assert (kind, text) == (settings.variation, shown)


@pytest.mark.parametrize(
    "wrong",
    [{"iterations": 0}, {"variations": 0}, {"lookahead": -1}, {"records": {"a": 0}}],
    ids=str,
)
def test_a_plan_that_makes_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        plan_with(**wrong)


def test_progress_has_public_numbers_only() -> None:
    seen: list[tuple[str, int, int, str]] = []
    plan = plan_with(iterations=2, lookahead=1)
    run(plan, Model(), Voters(), show=lambda *shown: seen.append(shown))
    assert [(done + 1, doing.partition(": ")[2], detail) for doing, done, _, detail in seen] == [
        (1, "random texts", "15 texts"),
        (1, "lookahead", "15 texts"),
        (1, "embeddings", "15 texts"),
        (1, "votes", "15 texts"),
        (2, "variations", "10 texts"),
        (2, "lookahead", "15 texts"),
        (2, "embeddings", "15 texts"),
        (2, "votes", "15 texts"),
    ]
    assert {total for _, _, total, _ in seen} == {2}


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=12), st.data())
def test_rank_takes_no_text_twice_and_no_worse_one(votes: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, len(votes)))
    kept = select_by_rank(counts(*votes), n, generator(KEY)).tolist()
    assert len(set(kept)) == len(kept) == n
    found = [max(votes[i], 0) for i in kept]
    assert found == sorted(found, reverse=True)
    rest = [max(votes[i], 0) for i in range(len(votes)) if i not in kept]
    assert all(max(votes[i], 0) >= value for i in kept for value in rest)


def test_ties_are_broken_at_random() -> None:
    rng = generator(new_key())
    chosen = Counter(int(select_by_rank(counts(-1, 0, -9, 0), 1, rng)[0]) for _ in range(8000))
    assert fits_probabilities([chosen[i] for i in range(4)], [0.25] * 4)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [((1, -4, 3, 0, 6), [0.1, 0.3, 0.6]), ((-4, 0, -1), [1 / 3] * 3)],
    ids=["in proportion to the cut counts", "without votes all alike"],
)
def test_draws_by_probability(votes: tuple[int, ...], expected: list[float]) -> None:
    drawn = select_by_probability(counts(*votes), 20_000, generator(new_key()))
    observed = np.bincount(drawn, minlength=len(votes))
    drawn_at_all = [i for i, vote in enumerate(votes) if vote > 0] or list(range(len(votes)))
    assert observed[drawn_at_all].sum() == 20_000
    assert fits_probabilities(observed[drawn_at_all].tolist(), expected)

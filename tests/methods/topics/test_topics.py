"""The topics of public texts, the private histogram over them, and the sequences that follow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpray.accounting.events import DiscreteGaussian
from dpray.config.config import Config
from dpray.mechanisms.votes import VoteHistogram
from dpray.methods.config import parse_config
from dpray.methods.topics.algorithm import PublicTopics, sequences
from dpray.methods.topics.plan import make_plan, public_terms
from dpray.methods.topics.settings import TopicsSettings
from dpray.types import InputError
from dpray.workers import shards
from dpray.workers.shards import Voters
from tests.methods.aug_pe.test_release import BagOfWords

SETTINGS = TopicsSettings(name="topics", public="", topics=3, words=2, threshold=2.0)
TEXTS = ["heart beat", "heart beat again", "skin rash", "skin rash rash", "sleep", "sleep sleep"]
LABELS = ["a", "a", "a", "b", "b", "b"]
WORDS = [["heart"], ["skin"], ["sleep"]]


def topics() -> PublicTopics:
    return PublicTopics.of(TEXTS, LABELS, BagOfWords("m").embed(TEXTS), SETTINGS)


def test_topics_are_the_same_every_time_and_have_their_words() -> None:
    found, again = topics(), topics()
    assert (found.means == again.means).all() and found.words == again.words
    counts = {
        tuple(words): [int(found.counts[label][topic]) for label in "ab"]
        for topic, words in enumerate(found.words)
    }
    assert counts == {("beat", "heart"): [2, 0], ("rash", "skin"): [1, 1], ("sleep",): [0, 2]}


@pytest.mark.parametrize(
    ("noisy", "public", "least_count", "expected"),
    [
        ([30, 5, 6], [0, 9, 0], 6.0, {"heart": 10, "sleep": 2}),
        ([-40, 5, 0], [1, 0, 3], 6.0, {"heart": 3, "sleep": 9}),  # none is left: the public texts
        ([0, 5, -9], [0, 0, 0], 6.0, {"heart": 4, "skin": 4, "sleep": 4}),  # there are none
        ([-40, 3, 1], [0, 0, 0], 0.0, {"skin": 9, "sleep": 3}),
    ],
)
def test_sequences_are_as_frequent_as_their_topics(
    noisy: list[int], public: list[int], least_count: float, expected: dict[str, int]
) -> None:
    drawn = sequences(12, noisy, public, WORDS, least_count)
    assert Counter(words[0] for words in drawn) == expected
    assert sequences(0, noisy, public, WORDS, least_count) == []


@pytest.mark.parametrize("k", [1, 3])
def test_a_unit_moves_the_histogram_by_its_sensitivity_at_most(
    k: int, settings: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add the k records of a unit, of any labels, in any places, to others: every record is in one
    count of all labels together, and moves no other record."""
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    config, rng = parse_config(settings()), np.random.default_rng(k)
    votes, means = VoteHistogram(1.5 * k, k), topics().means

    def exact(rows: list[dict[str, Any]]) -> np.ndarray:
        shard = Voters(config)
        shard.load(rows)
        return np.concatenate(list(shard.count(dict.fromkeys("ab", means)).values()))

    words = " ".join(TEXTS).split()
    assert votes.records_per_unit == k and votes.dp_event == DiscreteGaussian(1.5 * k, k)
    for trial in range(20):
        rows = [
            {"text": " ".join(rng.choice(words, 3)), "label": str(rng.choice(["a", "b"]))}
            for _ in range(10 + k)
        ]
        unit = [rows[10]] * k if trial % 2 else rows[10:]  # the same record several times, too
        moved = exact([*unit, *rows[:10]]) - exact(rows[:10])
        assert moved.min() >= 0 and moved.sum() == k and exact(rows[:10]).sum() == 10
        assert np.linalg.norm(moved) <= votes.records_per_unit


Make = Callable[..., tuple[Config, TopicsSettings]]


@pytest.fixture
def asked(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Make:
    """A configuration and the settings of topics over public `rows`."""

    def make(rows: list[dict[str, Any]], epsilon: float, data: Any = (), **keys: Any) -> Any:
        public = tmp_path / "public.jsonl"
        public.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = parse_config(settings(privacy__epsilon=epsilon, **dict(data)))
        return config, TopicsSettings(name="topics", public=str(public), **keys)

    return make


def rows(number: int, label: str = "a") -> list[dict[str, Any]]:
    return [{"text": f"Text {i} of elephants", "label": label} for i in range(number)]


def test_texts_without_words_are_left_out_and_the_longest_words_stand_in(asked: Make) -> None:
    blank = [{"text": "of the", "label": "b"}, {"text": "", "label": "a"}]
    plan = make_plan(*asked(rows(12) + blank, 2.0, topics=2, words=2))
    assert len(plan.public) == 12 and "elephants" not in repr(plan)
    assert public_terms(plan) == {"text", "elephants"}
    assert plan.cost.epsilon == pytest.approx(plan.config.privacy.epsilon, rel=1e-3)
    units = {"data__unit": "label", "data__max_records_per_unit": 3}
    of_three = make_plan(*asked(rows(2), 2.0, units, topics=2))
    assert of_three.votes.noise_std == pytest.approx(3 * plan.votes.noise_std, rel=0.02)
    assert of_three.noise_multiplier == of_three.votes.noise_std / 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"text": "Marlowe", "label": "c"}, "method.public: public.jsonl, row 3: the label is not"),
        ({"text": "Marlowe"}, "method.public: public.jsonl, row 3: no column 'label'"),
        ({"label": "a"}, "method.public: public.jsonl, row 3: no column 'text'"),
        ({"text": ["Marlowe"], "label": "a"}, "method.public: public.jsonl, row 3: column 'text'"),
    ],
)
def test_a_wrong_public_row_is_named(asked: Make, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        make_plan(*asked([*rows(2), wrong], 2.0, topics=2))
    assert str(refused.value).startswith(said) and "Marlowe" not in str(refused.value)


def test_too_few_texts_and_the_private_file_are_refused(asked: Make) -> None:
    with pytest.raises(InputError, match=r"^method.topics: 3 topics need as many texts, but only"):
        make_plan(*asked(rows(2), 2.0, topics=3))
    config, method = asked(rows(2), 2.0, topics=2)
    private = method.model_copy(update={"public": config.data.path})
    with pytest.raises(InputError, match=r"^method.public: .* is data.path itself"):
        make_plan(config, private)

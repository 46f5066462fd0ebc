"""Clusters of embeddings, and their words."""

from __future__ import annotations

import tracemalloc

import numpy as np

from dpray.io.languages import topic_words
from dpray.mechanisms.topics import class_terms, clusters_of, words_of


def test_terms_mark_a_topic_and_names_of_one_text_are_left_out() -> None:
    texts = ["heart patient marlowe"] + ["heart patient"] * 9 + ["skin patient"] * 10
    topic_of = np.array([0] * 10 + [1] * 10)
    assert class_terms(texts, topic_of, 2, 6, 3) == [["heart", "patient"], ["skin", "patient"]]
    assert class_terms(texts, topic_of, 2, 1, 1) == [["heart"], ["skin"]]
    assert class_terms(["the of"] * 4, np.array([0, 0, 1, 1]), 2, 6, 1) == [[], []]


def test_a_topic_has_the_words_that_its_texts_have() -> None:
    texts = ["The Heart!", "of a b 39", "skin2 12th élan"]
    assert [words_of()(text) for text in texts] == [["heart"], [], ["skin2", "élan"]]
    assert class_terms(texts, np.array([0, 1, 0]), 2, 6, 1) == [["heart", "skin2", "élan"], []]


def test_words_of_a_language_name_a_topic() -> None:
    german = words_of(*topic_words("German"))
    assert german("Die Heizung und der Regen sind nicht da") == ["heizung", "regen"]
    chinese = words_of(*topic_words("中文"))
    assert chinese("今天下雨，因为供暖设备坏了") == ["今天", "下雨", "供暖", "设备"]
    texts, topic_of = ["今天下雨", "明天下雨", "供暖设备坏了"], np.array([0, 0, 1])
    assert class_terms(texts, topic_of, 2, 1, 1, chinese) == [["下雨"], ["供暖"]]
    assert class_terms(texts, topic_of, 2, 1, 1)[0] != ["下雨"]
    for words in (None, "English", "Klingon"):
        assert words_of(*topic_words(words))("The Heart and die") == words_of()("The Heart and die")


def test_many_topics_of_many_words_take_little_memory() -> None:
    """A dense matrix of their counts would have 8 MB."""
    texts = [f"one{i} two{i}" for i in range(1000)]
    tracemalloc.start()
    terms = class_terms(texts, np.arange(1000) // 2, 500, 6, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert terms[499] == ["one998", "one999", "two998", "two999"] and peak < 4e6


def test_clusters_are_the_same_every_time_and_no_more_than_there_are_different_vectors() -> None:
    vectors = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    (one, means), (other, _) = (clusters_of(vectors, 7) for _ in range(2))
    assert (one == other).all() and set(one) == set(range(7))
    # A vector's cluster is that of the nearest mean.
    squared = ((vectors[:, None] - means[None]) ** 2).sum(axis=2)
    assert (squared.argmin(axis=1) == one).all()
    numbers, means = clusters_of(np.repeat(vectors[:2], 9, axis=0), 7)
    assert len(means) == 2 and len(set(numbers)) == 2

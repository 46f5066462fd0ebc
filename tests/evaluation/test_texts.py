"""Diversity, topics' terms and lengths of texts."""

import numpy as np
import pytest

from dpray.evaluation.texts import compare_diversity, compare_lengths, distinct
from dpray.evaluation.topics import compare_topics


def test_distinct_n_counts_different_n_grams_within_texts():
    texts = ["a b a b", "A b", ""]
    assert distinct(texts, 1) == 2 / 6
    assert distinct(texts, 2) == 2 / 4  # ab ba ab; ab
    assert distinct(texts, 3) == 1.0
    assert distinct(texts, 5) == 0.0


def test_diversity_is_of_equally_many_texts():
    real = [f"a{i} b{i}" for i in range(40)]
    found = compare_diversity(["same words"] * 20, real[:20], real[20:], seeds=3)

    assert found["records_a_side"] == 20
    few = {"mean": pytest.approx(2 / 40), "deviation": pytest.approx(0.0)}
    assert found["synthetic"]["distinct_1"] == few
    assert found["synthetic"]["distinct_texts"] == 1 / 20
    assert found["real"]["distinct_2"]["mean"] == found["other_real"]["distinct_2"]["mean"] == 1.0


def test_topics_of_few_or_identical_texts():
    alike = compare_topics([["x y"] * 9] * 3, [np.ones((9, 4))] * 3)
    assert alike == [{"terms": [], "synthetic": 1.0, "other_real": 1.0, "real": 1.0}]


def test_outliers_are_a_topic_without_terms_and_rare_words_are_shown_by_none():
    sides = [["heart"] * 5 + ["skin"] * 5, ["heart"] * 5 + ["skin"] * 5, ["skin marlowe"] * 10]
    clusters = {"heart": -1, "skin": 7, "skin marlowe": 3}

    def cluster(texts, vectors):
        assert vectors.shape == (30, 2)
        return np.array([clusters[text] for text in texts])

    vectors = [np.zeros((10, 2))] * 3
    found = compare_topics(sides, vectors, cluster)
    assert found == [
        {"terms": ["marlowe", "skin"], "synthetic": 0.0, "other_real": 0.0, "real": 1.0},
        {"terms": ["(outliers)"], "synthetic": 0.5, "other_real": 0.5, "real": 0.0},
        {"terms": ["skin"], "synthetic": 0.5, "other_real": 0.5, "real": 0.0},
    ]
    # Held by two records of thirty.
    sides[2] = ["skin marlowe"] * 2 + ["skin"] * 8
    assert [topic["terms"] for topic in compare_topics(sides, vectors, cluster)][1:] == [
        ["skin"],
        ["(outliers)"],
    ]


def test_the_histogram_covers_every_text():
    long = ["w " * 500] * 3
    texts = [("w " * (i % 30)).strip() for i in range(300)]
    found = compare_lengths(texts + long, texts, texts, seeds=1)["histogram"]

    assert sum(found["real"]) == pytest.approx(1.0) and sum(found["synthetic"]) == pytest.approx(
        1.0
    )
    assert len(found["edges"]) == len(found["real"]) + 1 == 25
    assert found["synthetic"][-1] >= 3 / 303
    assert len(set(np.diff(found["edges"]))) == 1

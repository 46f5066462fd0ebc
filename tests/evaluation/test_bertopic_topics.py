"""BERTopic itself, where the extra is installed."""

import numpy as np
import pytest

from dpray.evaluation.topics import OUTLIER, TOPICS, load_bertopic

pytestmark = pytest.mark.slow


def test_clusters_are_found_again_and_merged_with_outliers_apart():
    pytest.importorskip("bertopic", reason="the extra dpray[bertopic] is not installed")
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(2 * TOPICS, 16))
    vectors = np.repeat(centres, 40, axis=0) + rng.normal(0, 0.05, (80 * TOPICS, 16))
    texts = [f"word{i // 40}" for i in range(len(vectors))]
    cluster = load_bertopic()

    found = cluster(texts, vectors)

    assert len(set(found)) == TOPICS + 1
    for centre in found.reshape(2 * TOPICS, 40):
        names, counts = np.unique(centre[centre != OUTLIER], return_counts=True)
        assert len(names) == 0 or counts.max() > 0.9 * counts.sum()
    assert (found == OUTLIER).mean() < 0.2
    assert (cluster(texts, vectors) == found).all()
    alike = cluster(["да!"] * 12 + ["?"] * 12, np.ones((24, 16)))
    assert len(set(alike)) == 1

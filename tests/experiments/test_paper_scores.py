"""A release is measured as the papers do, by each of the models that are asked for."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import paper_scores
import pytest
from paper_evaluation import in_context

from ..evaluation.test_evaluate import BagOfWords, notes

ASKED: dict[str, Any] = {
    "networks": False, "encoder": None, "lm": None, "phrases": False, "embedder": "", "seeds": 1,
}  # fmt: skip


def test_networks_learn_beside_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_scores, "load_embedder", lambda name: BagOfWords())
    sets = {"synthetic": notes(120, 1), "ceiling": notes(120, 2), "test": notes(60, 3)}
    found = paper_scores.scores(sets, Namespace(**ASKED | {"networks": True}))["classifiers"]
    names = [one["classifier"] for one in found]
    assert names == ["3-layer network on embeddings", "3-layer network with Deep CORAL"]
    for one in found:
        assert one["floor"]["accuracy"]["mean"] < 0.7 < one["synthetic"]["accuracy"]["mean"]


def test_a_language_model_is_asked_for_phrases_and_words(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_context, "TEST_RECORDS", 4)
    monkeypatch.setattr(in_context, "SHOTS", (0, 4))
    records = [(f"a film by person{i} was seen again", f"person{i}") for i in range(30)]
    sets = {"synthetic": records[:10], "ceiling": records[10:20], "test": records[20:]}
    asked = Namespace(**ASKED | {"lm": model_folder, "phrases": True})
    found = paper_scores.scores(sets, asked)
    assert found["in_context"]["task"] == "extraction" and found["classifiers"] == []
    assert set(found["in_context"]["rows"][1]["synthetic"]) == {
        "fitted", "exact_match", "word_f1",
    }  # fmt: skip
    assert found["next_word"]["synthetic"]["train_records"] == 10

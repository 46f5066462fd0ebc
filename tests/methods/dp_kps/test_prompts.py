"""How DP-KPS asks for a text: packaged words, or the user's own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dpray.io.public_files import FewShot
from dpray.io.template_file import About
from dpray.methods.dp_kps.prompts import KeyphrasePrompts, load_keyphrase_prompts
from dpray.types import InputError, Prompt


def ask(prompts: KeyphrasePrompts, terms: list[str], label: str = "", seed: int = 0) -> Prompt:
    return prompts.prompt(terms, label, np.random.default_rng(seed), name_label=True)


def test_the_packaged_request_names_the_terms_and_no_class() -> None:
    prompts = load_keyphrase_prompts("texts", "medical record")
    asked = ask(prompts, ["aspirin", "heart failure"])
    assert asked.user.strip() == (
        "Write a medical record that contains the following terms: aspirin, heart failure"
    )
    assert asked.prefix == "Text:"
    assert prompts.template.refused("I'm sorry, but") and not prompts.template.refused(
        "Sorry sights of the war"
    )
    assert prompts.template.refused("I’m sorry, but") and prompts.template.refused("I CAN’T")


def test_public_classes_and_examples_are_shown() -> None:
    prompts = load_keyphrase_prompts("texts", "review", FewShot({None: ["Nice food."]}, 1))
    asked = ask(prompts, ["food"], "Restaurants").user
    assert asked.startswith("Here is a review:\nNice food.\n")
    assert "Write a review of the class Restaurants that contains" in asked
    unnamed = prompts.prompt(["food"], "Restaurants", np.random.default_rng(0), name_label=False)
    assert "Restaurants" not in unnamed.user


@pytest.mark.parametrize(
    ("about", "asked"),
    [
        (About(), "Write a text of the class a that contains the following terms: x"),
        (
            About("notes", "English"),
            "Write one of these: notes of the class a, in English, that contains the following "
            "terms: x",
        ),
        (
            About("", "German", {"a": "heart"}),
            "Write a text of the class heart, in German, that contains the following terms: x",
        ),
    ],
)
def test_the_sentence_of_a_prompt(about: About, asked: str) -> None:
    assert ask(load_keyphrase_prompts("texts", "text", about=about), ["x"], "a").user == asked


def test_examples_are_drawn_of_the_class_where_there_are_enough() -> None:
    bars = [f"bar {n}" for n in range(20)]
    examples: dict[str | None, list[str]] = {
        None: ["food 0", *bars],
        "Bars": bars,
        "Food": ["food 0"],
    }
    prompts = load_keyphrase_prompts("texts", "review", FewShot(examples, 2))
    seen = [re.findall(r"bar \d+|food 0", ask(prompts, ["x"], "Bars", n).user) for n in range(200)]
    assert all(len(set(shown)) == 2 and "food 0" not in shown for shown in seen)
    assert {text for shown in seen for text in shown} == set(bars)
    few = [ask(prompts, ["x"], label, n).user for label in ("Food", "") for n in range(20)]
    assert all(len(re.findall(r"bar \d+|food 0", asked)) == 2 for asked in few)


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("user: 'Write one with {terms}'\nprefix: 'Review:'\nstop: [x]\n")
    prompts = load_keyphrase_prompts(str(own), "review")
    assert ask(prompts, ["a", "{b}"]) == Prompt("Write one with a, {b}", "Review:")
    assert prompts.template.stop == ("x",)
    own.write_text("user: 'Write one'")
    with pytest.raises(InputError, match=r"own\.yaml: `user` has no \{terms\}"):
        load_keyphrase_prompts(str(own), "review")

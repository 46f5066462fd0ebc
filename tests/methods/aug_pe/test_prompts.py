from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dpray.io.template_file import packaged
from dpray.methods.aug_pe.prompts import PACKAGE, load_variation_prompts
from dpray.types import InputError, Prompt


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def write(tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"random": "R", "paraphrase": "P {text}"} | keys))
    return str(path)


@pytest.mark.parametrize("name", packaged(PACKAGE))
def test_packaged_templates(name: str) -> None:
    labels = ["Restaurants", "Something else | Review Stars: 2.0", ""]
    for label in labels:
        prompts = load_variation_prompts(name, "fill_in_the_blanks", labels)
        said = prompts.random(label, rng()).user
        assert label in said or name == "pubmed"
        for words, text in ((40, "a _ {{ b }} <i>&"), (None, "a _")):
            filled = prompts.variation("fill_in_the_blanks", label, text, words, rng()).user
            assert text in filled
            assert ("MUST be exactly 40 words" in filled) == (words is not None)
        rephrased = prompts.variation("paraphrase", label, "x y", 40, rng()).user
        assert rephrased.endswith(":\nx y") and "exactly 40 words" in rephrased
        assert "exactly" not in prompts.variation("paraphrase", label, "x y", None, rng()).user
        assert "  " not in said + rephrased, "a style or keyword is missing"
    assert prompts.template.refused("I’m sorry, but") and prompts.template.refused(
        "as an AI model I"
    )
    assert prompts.template.refused(" \n") and not prompts.template.refused(
        "The food was good, I cannot complain."
    )


def test_the_papers_yelp_prompts() -> None:
    prompts = load_variation_prompts("yelp", "fill_in_the_blanks")
    label = "Restaurants | Review Stars: 4.0"
    said = prompts.random(label, rng()).user.splitlines()[-1]
    assert said.startswith("Business Category: Restaurants | Review Stars: 4.0 with keyword ")
    assert said.rpartition("keyword ")[2] in prompts.keywords["Restaurants"]
    filled = prompts.variation("fill_in_the_blanks", label, "_ and wine", 26, rng()).user
    assert filled.endswith(
        "Business Category: Restaurants | Review Stars: 4.0\nInput: _ and wine\n"
        "Fill-in-Blanks and your answer MUST be exactly 26 words:"
    )


@pytest.mark.parametrize(("name", "demonstrations"), [("yelp", 3), ("openreview", 1)])
def test_demonstrations_are_filled_in_as_they_say(name: str, demonstrations: int) -> None:
    prompts = load_variation_prompts(name, "fill_in_the_blanks")
    said = prompts.variation("fill_in_the_blanks", "Bars", "a _", 40, rng()).user
    shown = re.findall(
        r"Input: (.*)\nFill-in-Blanks and your answer MUST be exactly (\d+) words: (.*)", said
    )
    assert len(shown) == demonstrations
    for blanks, words, filled in shown:
        assert int(words) == len(filled.split()) and "_" not in filled
        assert re.fullmatch(re.escape(blanks).replace("_", r"[^\s_]+"), filled)
    without = prompts.variation("fill_in_the_blanks", "Bars", "a _", None, rng()).user
    assert without.count("\nFill-in-Blanks:") == demonstrations + 1


def test_each_request_has_its_own_system_message(tmp_path: Path) -> None:
    prompts = load_variation_prompts("pubmed", "fill_in_the_blanks")
    assert prompts.random("", rng()).system.startswith("Please act as a sentence generator")
    assert prompts.variation("paraphrase", "", "x", 9, rng()).system == ""
    own = write(tmp_path, random_system="About {label}.", paraphrase_system="In {words} words.")
    asked = load_variation_prompts(own)
    assert asked.random("News", rng()) == Prompt("R", "", "About News.")
    assert asked.variation("paraphrase", "News", "x", 9, rng()).system == "In 9 words."
    with pytest.raises(InputError, match=r"`random_system` has no placeholder \{text\}"):
        load_variation_prompts(write(tmp_path, random_system="{text}"))


def test_styles_and_keywords_are_all_drawn(tmp_path: Path) -> None:
    keywords = {"A": ["a1", "a2"], "AB": ["b1"], "": ["c1", "c2"]}
    path = write(
        tmp_path,
        random="{label}: {keyword}",
        paraphrase="{style} {text}",
        styles=["s1", "s2", "s3"],
        keywords=keywords,
    )
    prompts = load_variation_prompts(path)
    draws = [rng(i) for i in range(60)]
    assert {prompts.random("Ax", r).user for r in draws} == {"Ax: a1", "Ax: a2"}
    assert {prompts.random("ABx", r).user for r in draws} == {"ABx: b1"}
    assert {prompts.random("x", r).user for r in draws} == {"x: c1", "x: c2"}
    said = {prompts.variation("paraphrase", "x", "t", None, r).user for r in draws}
    assert said == {"s1 t", "s2 t", "s3 t"}


def test_prefix_stop_and_opening(tmp_path: Path) -> None:
    parts = {"of": {"if": "words", "then": "New ({words}):", "else": "{label}:"}}
    path = write(tmp_path, prefix="{of}", stop=["\n\n"], paraphrase="{opening}", parts=parts)
    prompts = load_variation_prompts(path)
    assert prompts.template.stop == ("\n\n",)
    assert prompts.random("News", rng()).prefix == "News:"
    asked = prompts.variation("paraphrase", "News", "one two three", 9, rng())
    assert (asked.user, asked.prefix) == ("one two", "New (9):")
    assert not prompts.template.refused("I'm sorry"), "the template has no refusals"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"paraphrase": "P"}, "`paraphrase` has no {text} or {opening}"),
        ({"random": "{text}"}, "`random` has no placeholder {text}; there are {label}, "),
        ({"styles": "a"}, "`styles` Input should be a valid tuple"),
        ({"keywords": [True]}, "`keywords.0` Input should be a valid string"),
        ({"keywords": {"x": ["a"]}}, "`keywords` has none for the label 'News'"),
        ({"keywords": {"x": "a"}}, "`keywords.x` Input should be a valid tuple"),
    ],
)
def test_a_wrong_template_says_what_is_wrong(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=r"^method\.template: .*own\.yaml: `") as wrong:
        load_variation_prompts(write(tmp_path, **keys), labels=["News"])
    assert message in str(wrong.value) and "\n" not in str(wrong.value)


def test_the_configured_variation_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`fill_in_the_blanks` Field required"):
        load_variation_prompts(write(tmp_path), "fill_in_the_blanks")

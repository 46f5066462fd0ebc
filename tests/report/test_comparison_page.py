"""The page of the methods over epsilon: what it shows, in tables and pictures."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import dpray
from dpray.cli import run_command
from dpray.config.config import parse_config
from dpray.planning.compare import FACTORS, explore
from dpray.report.comparison_page import read_rehearsal, render_comparison
from dpray.types import InputError
from tests.report.browser import needs_browser, rendered_in_silence
from tests.report.reports import ATTACK
from tests.report.test_page import Visible

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A model that only answers prompts: two methods want one whose logits and weights they see."""
    words = tmp_path_factory.mktemp("words") / "words.txt"
    words.write_text("".join(f"word{n}\t{2**12 // (n + 1)}\n" for n in range(400)))
    return {
        "data": {"path": "/nowhere", "label": "label", "labels": ["a", "b"], "public_size": 4000},
        "privacy": {"epsilon": 4.0, "delta": 1e-5, "ledger": "sqlite:///x.db", "dataset": "notes"},
        "method": {
            "name": "auto",
            "records": 60,
            "aug_pe": {"iterations": 2},
            "dp_kps": {"vocabulary": str(words)},
        },
        "engine": {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:1/v1"},
    }


@pytest.fixture(scope="module")
def found(tree: Tree) -> Tree:
    return explore(parse_config(tree), [8.0, 0.5])


@pytest.fixture
def explored(found: Tree) -> Tree:
    return copy.deepcopy(found)


def a_rehearsal(explored: Tree) -> Tree:
    """Aug-PE with the settings that it has now, DP-KPS with others."""
    at = copy.deepcopy(explored["epsilons"][0])
    for place, (name, method) in enumerate(at["methods"].items()):
        score = {"mean": 0.5 + place / 10, "deviation": 0.025}
        method["scores"] = {"accuracy": score} if name in ("aug_pe", "dp_kps") else None
    at["methods"]["dp_kps"]["plan"]["method"]["sequence_length"] = 3
    real = {"records": 60, "accuracy": {"mean": 0.9375, "deviation": 0.0}}
    return {"score": "accuracy", "real_records": real, "epsilons": [at | {"best": "dp_kps"}]}


def test_every_number_of_the_pictures_is_in_a_table(explored: Tree) -> None:
    page = render_comparison(explored, None)
    text = Visible(page).text
    for stated in (
        "60 synthetic texts of 4,000 records",
        "Recommended Texts LLM calls 0.5 aug_pe 60 ",
        "Method Texts LLM calls Signal Enough aug_pe 60 ",
        "engine.kind: private prediction needs logits",
        "Its signal would be enough from ",
    ):
        assert stated in text, stated
    # A click leads to a row that is there.
    rows = re.findall(r'<tr class="head" id="([^"]*)"', page)
    assert len(set(rows)) == 8
    links = re.findall(r'xlink:href="#([a-z_]+-at-[^"]*)"', page)
    assert set(links) == set(rows) and 'target="_blank"' not in page
    assert page.count('<figure class="picture" role="img" aria-label="Line chart: ') == 3


def test_a_row_has_the_plan_and_the_reason(explored: Tree) -> None:
    page = render_comparison(explored, a_rehearsal(explored))
    text = Visible(page).text
    plan = explored["epsilons"][0]["methods"]["aug_pe"]
    settings = plan["plan"]["method"]
    for said in (
        plan["reasons"][0],
        f"variations {settings['variations']}, noise multiplier {settings['noise_multiplier']:.6g}",
        "0.500 ± 0.025",
        "0.800 ± 0.025",
    ):
        assert said in text, said
    assert "selection" not in text, "what is the same at every epsilon"
    assert text.count("It was rehearsed with other settings.") == 1
    assert page.count("<figure") == 4


def test_a_hostile_rehearsal_stays_text(explored: Tree, tmp_path: Path) -> None:
    rehearsal = a_rehearsal(explored)
    at = explored["epsilons"][0]["methods"]["aug_pe"]
    at["reasons"] = [ATTACK]
    explored["epsilons"][0]["methods"]["dp_sgd"]["why_not"] = ATTACK
    seen = Visible(render_comparison(explored, rehearsal | {"epsilons": []}))
    assert ATTACK in " ".join(seen.texts)
    assert not {"script", "img", "b", "iframe"} & set(seen.tags)
    for wrong in ({}, {"score": "f"}, rehearsal | {"epsilons": 5}, rehearsal | {"score": [ATTACK]}):
        (tmp_path / "rehearsal.json").write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=r"^--rehearsal: rehearsal\.json: not as dpray"):
            read_rehearsal(tmp_path)
    with pytest.raises(InputError, match=r"^--rehearsal: cannot read"):
        read_rehearsal(tmp_path / "nowhere")


def test_the_command_line(tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, one, page = tmp_path / "auto.yaml", tmp_path / "one.yaml", tmp_path / "new" / "page.html"
    # So many records that every signal is enough: nothing is searched for.
    file.write_text(yaml.safe_dump(tree | {"data": tree["data"] | {"public_size": 10**6}}))
    one.write_text(yaml.safe_dump(tree | {"method": {"name": "aug_pe"}}))

    def refused(match: str, config: Path, *options: str) -> None:
        assert run_command(["plan", str(config), *options]) == 2
        assert match in capsys.readouterr().err

    refused("--epsilon: it is for --html", file, "--epsilon", "2")
    refused("--rehearsal: it is for --html", file, "--rehearsal", str(tmp_path))
    refused("--html: it is for --compare", one, "--html", str(page))
    refused("--epsilon: it is for --html", one, "--epsilon", "2")
    refused("--write: it is for one epsilon", file, "--html", str(page), "--write", "x.yaml")
    refused("--epsilon: 0 is not above 0", file, "--html", str(page), "--epsilon", "0")
    refused("--rehearsal: cannot read", file, "--html", str(page), "--rehearsal", "/nowhere")
    assert not page.parent.exists()

    asked = ["plan", str(file), "--html", str(page), "--epsilon", "8", "--epsilon", "2"]
    assert run_command([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [at["epsilon"] for at in found["epsilons"]] == [2.0, 8.0]
    assert page.read_text() == render_comparison(found, None)
    # A rehearsal's epsilons stand beside the usual ones.
    rehearsal = a_rehearsal(found)
    rehearsal["epsilons"][0]["epsilon"] = 3.0
    (tmp_path / "rehearsal.json").write_text(json.dumps(rehearsal))
    found = dpray.explore(dpray.load(file), page, rehearsal=tmp_path)
    usual = [4.0 * factor for factor in FACTORS]
    assert [at["epsilon"] for at in found["epsilons"]] == sorted([*usual, 3.0])
    assert "in the rehearsal" in page.read_text()


@needs_browser
def test_a_browser_renders_it_in_silence(explored: Tree, tmp_path: Path) -> None:
    path = tmp_path / "comparison.html"
    page = render_comparison(explored, a_rehearsal(explored))
    path.write_text(page, encoding="utf-8")
    dom = rendered_in_silence(path)
    assert "Which method, at which" in dom and dom.count("<figure") == 4

"""docs/papers.md: its places exist, its defaults are those of the settings, its papers' values
those of the presets, and its figures those that were measured."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import papers_table
import pytest

from dpray.config.sections import TextSettings
from dpray.io.yaml_text import parse_yaml
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.config import RunConfig
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings

PAGE = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")

PAPERS: dict[str, type[TextSettings]] = {
    "Private prediction (Amin et al. 2024)": PrivatePredictionSettings,
    "DP-KPS (Nagesh et al. 2025)": DpKpsSettings,
    "Aug-PE (Xie et al. 2024)": AugPeSettings,
    "DP-SGD (Yue et al. 2023)": DpSgdSettings,
}

Cells = list[str]


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[Cells]:
    """Return the cells of all tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[0] not in ("component", "method", "paper")]


def settings(cell: str) -> Iterator[tuple[str, object]]:
    """Yield each `key: value` of a cell."""
    for written in re.findall(r"`([a-z_.]+: [^`]+)`", cell):
        [[key, value]] = parse_yaml(written).items()  # type: ignore[union-attr,attr-defined]
        yield key, value


def default(kind: type[TextSettings], key: str) -> object:
    """Return a key's default as YAML has it: a key of the method, or one with its section."""
    name, _, below = key.partition(".")
    model: Any = RunConfig.model_fields[name].annotation if below else kind
    value = model.model_fields[below or name].get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("paper", PAPERS)
def test_every_component_has_a_place_that_exists_or_is_missing(paper: str) -> None:
    for component, place, _, _, why in rows(section(paper)):
        named = re.findall(r"`((?:dpray|experiments)/[\w/]+)\.py:([\w.]+)`", place)
        assert named or (place == "missing" and why), component
        for file, name in named:
            module = importlib.import_module(file.removeprefix("experiments/").replace("/", "."))
            assert reduce(_member, name.split("."), module), f"{component}: {file} has no {name}"


def _member(owner: Any, name: str) -> Any:
    """Return an attribute, or the name of a field of a dataclass."""
    return name if name in getattr(owner, "__dataclass_fields__", {}) else getattr(owner, name)


@pytest.mark.parametrize("paper", PAPERS)
def test_defaults_are_those_of_the_settings_and_papers_values_the_preset_s(paper: str) -> None:
    kind, of_paper = PAPERS[paper], dict[str, object]()
    for component, _, ours, theirs, why in rows(section(paper)):
        own = dict(settings(ours))
        for key, value in own.items():
            assert value == default(kind, key), f"{component}: {key}"
        for key, value in settings(theirs):
            assert value == kind.presets["paper"][key], f"{component}: {key}"
            assert why or value == default(kind, key), f"{component}: {key} has no reason"
            of_paper[key] = value
    assert of_paper == kind.presets["paper"]


def test_the_presets_differ_from_the_first_one_as_the_page_says() -> None:
    named: dict[str, dict[str, object]] = {}
    for method, preset, _, others in rows(section("Presets")):
        named.setdefault(method, {})[preset.strip("`")] = dict(settings(others))
    methods = {get_args(kind.model_fields["name"].annotation)[0]: kind for kind in PAPERS.values()}
    assert named == {
        name: {
            preset: {k: v for k, v in keys.items() if kind.presets["paper"].get(k, k) != v}
            for preset, keys in kind.presets.items()
        }
        for name, kind in methods.items()
    }


def test_the_figures_are_those_that_were_measured() -> None:
    """`python experiments/make.py --only Headlines` writes the section."""
    assert section("Headlines").strip() == "\n".join(papers_table.section()[1:]).strip()
    figures = [row for row in rows(section("Headlines")) if re.search(r"\d", row[2])]
    assert len(figures) >= 20 and all(why and source for *_, source, why in figures)
    assert PAGE.index("### Did not reproduce") < PAGE.index("### Reproduced")

"""The evaluation's part of the page, and its pictures."""

import re
import warnings
from xml.etree import ElementTree

import pytest

from dpray.evaluation.evaluate import evaluate
from dpray.report import pictures
from dpray.report.page import templates
from dpray.report.pictures import (
    accuracy_svg,
    canaries_svg,
    figure_of_the_page,
    inline,
    standalone,
)
from dpray.report.tables import SYNTHETIC, evaluation_tables, plus_minus

from ..evaluation.test_evaluate import BagOfWords, notes

DOWNSTREAM = {
    name: {"accuracy": {"mean": mean, "deviation": 0.1}}
    for name, mean in {"floor": 0.25, "synthetic": 0.5, "ceiling": 0.75}.items()
}


def test_the_picture_of_accuracy_is_one_element_in_the_pages_colours_and_the_same_each_time():
    svg = accuracy_svg(DOWNSTREAM)
    assert svg == accuracy_svg(DOWNSTREAM)
    assert svg.startswith("<svg") and ElementTree.fromstring(svg).tag.endswith("svg")
    assert "var(--accent)" in svg and "var(--ink)" in svg and "<metadata" not in svg
    assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {"#000000", "#ffffff"}
    # The points lie at equal distances, from the floor to the ceiling.
    floor, synthetic, ceiling = (float(x) for x in re.findall(r'<use [^>]*x="([\d.]+)"', svg)[-3:])
    assert synthetic - floor == pytest.approx(ceiling - synthetic, abs=0.01) and floor < ceiling


def test_canaries_stand_at_their_rank_among_their_look_alikes():
    secrets = [
        {
            "kind": kind,
            "repetitions": times,
            "rank": rank,
            "candidates": 101,
            "perplexity": 10.0,
            "look_alikes": [8.0, 9.0, 12.0],
        }
        for kind in ("name", "plate")
        for times, rank in ((1, 51.0), (100, 1.0))
    ]
    svg = canaries_svg(secrets)
    texts = [
        text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"name", "plate", "put in 1 times", "put in 100 times"} <= set(texts)
    # In each plot, the secret at rank 51 of 101 stands in the middle, the leaked one below all.
    marks = re.findall(r'<use [^>]*y="([\d.]+)" style="fill: var\(--(accent|second)\)', svg)
    heights = [(float(y), colour) for y, colour in marks[:4]]
    assert heights[:2] == heights[2:] and [colour for _, colour in heights[:2]] == [
        "accent",
        "second",
    ]
    bottom, middle = heights[1][0], heights[0][0]
    grid = [float(y) for y in re.findall(r'<use [^>]*y="([\d.]+)"', svg)]
    assert bottom in grid and middle in grid and bottom - middle > 30
    alone = standalone(svg)
    assert ElementTree.fromstring(alone).attrib["style"].startswith("--paper: #")
    used = set(re.findall(r"var\((--[a-z]+)\)", alone))
    assert used == {name for name in used if f"{name}: #" in alone}


def test_the_part_shows_every_section():
    result = evaluate(notes(120, 1), notes(80, 2), BagOfWords(), seeds=2)

    page = (
        templates()
        .get_template("report_evaluation.html.j2")
        .render(
            evaluation=result,
            tables=evaluation_tables(result),
            synthetic_row=SYNTHETIC,
            pictures=pictures,
        )
    )

    assert page.count("<svg") == 1 == page.count('role="img"')
    for part in (
        "PRIVATE: not for release",
        "Logistic regression on embeddings",
        "MAUVE (1)",
        "longest shared run of words",
        "Topics:",
        "Accuracy of classifiers",
        "Note: near-duplicates are looked for in half",
    ):
        assert part in page
    mauve = result["fidelity"]["measures"]["mauve"]["synthetic_to_real"]
    assert plus_minus(mauve, 3) in page and result["topics"][0]["terms"][0] in page


def test_signs_that_the_font_lacks_are_not_spelled_on_stderr(capfd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with figure_of_the_page(1.0) as (figure, axes):
            axes.set(xlabel="\u7cd6\u5c3f\u75c5")
            svg = inline(figure)

    assert [str(warning.message) for warning in caught] == []
    assert capfd.readouterr().err == ""
    assert "\u7cd6\u5c3f\u75c5" in svg

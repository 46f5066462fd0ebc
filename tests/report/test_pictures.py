"""The evaluation's part of the page, and its pictures."""

import re
import warnings
from xml.etree import ElementTree

import pytest

from dpray.evaluation.evaluate import evaluate
from dpray.report import pictures
from dpray.report.page import templates
from dpray.report.pictures import accuracy_svg, figure_of_the_page, inline
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

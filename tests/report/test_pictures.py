"""The evaluation's part of the page, and its pictures."""

import re
import warnings
from xml.etree import ElementTree

import pytest

from dpray.evaluation.evaluate import evaluate
from dpray.report import pictures
from dpray.report.page import templates
from dpray.report.pictures import figure_of_the_page, inline, lengths_svg, map_svg
from dpray.report.tables import SYNTHETIC, evaluation_tables, plus_minus

from ..evaluation.test_evaluate import BagOfWords, notes

HISTOGRAM = {"edges": [0, 2, 4], "real": [0.25, 0.75], "synthetic": [0.5, 0.5]}
MAP = {"real": [[0.5, 1.0], [2.0, 3.0]], "synthetic": [[1.0, -1.0]], "explained": [0.4, 0.125]}


@pytest.mark.parametrize("svg", [lengths_svg(HISTOGRAM), map_svg(MAP)])
def test_a_picture_is_one_element_in_the_pages_colours(svg):
    assert svg.startswith("<svg") and ElementTree.fromstring(svg).tag.endswith("svg")
    assert "var(--accent)" in svg and "var(--ink)" in svg and "<metadata" not in svg
    own = set(re.findall(r"#[0-9a-f]{6}", svg)) - {"#000000", "#ffffff"}
    assert own == set()


def test_a_picture_is_the_same_each_time_and_shows_each_point():
    assert lengths_svg(HISTOGRAM) == lengths_svg(HISTOGRAM)
    svg = map_svg(MAP)
    between = MAP | {"synthetic": [*MAP["synthetic"], [1.5, 1.5], [1.0, 2.0]]}
    assert map_svg(between).count("<use") - svg.count("<use") == 2
    assert "40% of the variance" in svg and "12%" in svg


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

    assert page.count("<svg") == 2 == page.count('role="img"')
    for part in (
        "PRIVATE: not for release",
        "Logistic regression on embeddings",
        "MAUVE (1)",
        "longest shared run of words",
        "distinct-3",
        "Topics:",
        "cardio",
        "Scatter plot: embeddings of",
        "Note: near-duplicates are looked for in half",
    ):
        assert part in page
    mauve = result["fidelity"]["measures"]["mauve"]["synthetic_to_real"]
    assert plus_minus(mauve, 3) in page


def test_signs_that_the_font_lacks_are_not_spelled_on_stderr(capfd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with figure_of_the_page(1.0) as (figure, axes):
            axes.set(xlabel="\u7cd6\u5c3f\u75c5")
            svg = inline(figure)

    assert [str(warning.message) for warning in caught] == []
    assert capfd.readouterr().err == ""
    assert "\u7cd6\u5c3f\u75c5" in svg

"""The evaluation's part of the page, and its pictures."""

import re
from xml.etree import ElementTree

import pytest
from jinja2 import Environment, PackageLoader, StrictUndefined

from dpray.evaluation.evaluate import evaluate
from dpray.io.evaluation_pictures import lengths_svg, topics_svg
from dpray.io.report_page import number, spread, words

from .test_evaluate import BagOfWords, notes

TOPICS = [
    {"terms": ["heart", "<b>&$x^2$"], "real": 0.6, "synthetic": 0.8, "other_real": 0.5},
    {"terms": [], "real": 0.4, "synthetic": 0.2, "other_real": 0.5},
]
HISTOGRAM = {"edges": [0, 2, 4], "real": [0.25, 0.75], "synthetic": [0.5, 0.5]}


@pytest.mark.parametrize("svg", [lengths_svg(HISTOGRAM), topics_svg(TOPICS)])
def test_a_picture_is_one_element_in_the_pages_colours(svg):
    assert svg.startswith("<svg") and ElementTree.fromstring(svg).tag.endswith("svg")
    assert "var(--accent)" in svg and "var(--ink)" in svg
    assert "<b>" not in svg and "<metadata" not in svg
    own = set(re.findall(r"#[0-9a-f]{6}", svg)) - {"#000000", "#ffffff"}
    assert own == set()


def test_topics_are_named_by_their_terms():
    svg = topics_svg(TOPICS)
    assert "heart, &lt;b&gt;&amp;$x^2$" in svg and "no terms" in svg and "80%" in svg
    assert lengths_svg(HISTOGRAM) == lengths_svg(HISTOGRAM)


def test_the_part_shows_every_section():
    environment = Environment(
        loader=PackageLoader("dpray.io", "templates"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"number": number, "words": words, "spread": spread}
    result = evaluate(notes(120, 1), notes(80, 2), BagOfWords(), seeds=2, networks=True)
    pictures = {"lengths_svg": lengths_svg, "topics_svg": topics_svg}

    page = environment.get_template("report_evaluation.html.j2").render(
        evaluation=result, **pictures
    )

    assert page.count("<svg") == 2 and page.count('role="img"') == 2
    for part in (
        "PRIVATE: not for release",
        "3-layer network with Deep CORAL",
        "MAUVE (1)",
        "longest shared run of words",
        "distinct-3",
        "Topics:",
        "Note: near-duplicates are looked for in half",
    ):
        assert part in page
    mauve = result["fidelity"]["measures"]["mauve"]["synthetic_to_real"]
    assert spread(mauve, 3) in page

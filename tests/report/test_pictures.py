"""The evaluation's part of the page, and its pictures."""

import re
import warnings
from xml.etree import ElementTree

import pytest
from jinja2 import Environment, PackageLoader, StrictUndefined

from dpray.evaluation.evaluate import evaluate
from dpray.report import pictures
from dpray.report.figures import plus_minus
from dpray.report.pictures import (
    class_accuracy_svg,
    confusion_alternative,
    confusion_svg,
    lengths_svg,
    map_svg,
    topics_svg,
)
from dpray.report.tables import SYNTHETIC, evaluation_tables

from ..evaluation.test_evaluate import BagOfWords, notes

TOPICS = [
    {"terms": ["heart", "<b>&$x^2$"], "real": 0.6, "synthetic": 0.8, "other_real": 0.5},
    {"terms": [], "real": 0.4, "synthetic": 0.2, "other_real": 0.5},
]
HISTOGRAM = {"edges": [0, 2, 4], "real": [0.25, 0.75], "synthetic": [0.5, 0.5]}

SPREADS = [{"mean": 0.75, "deviation": 0.1}, {"mean": 0.5, "deviation": 0.0}]
CLASSES = {
    "labels": ["cardio <b>", "a $x$ label with a name that is far too long"],
    "records": [40, 20],
    "synthetic": {"accuracy": SPREADS, "confusion": [[0.75, 0.25], [0.5, 0.5]]},
    "ceiling": {"accuracy": SPREADS, "confusion": [[1.0, 0.0], [0.125, 0.875]]},
}
MAP = {"real": [[0.5, 1.0], [2.0, 3.0]], "synthetic": [[1.0, -1.0]], "explained": [0.4, 0.125]}
SVGS = [
    lengths_svg(HISTOGRAM),
    topics_svg(TOPICS),
    class_accuracy_svg(CLASSES),
    confusion_svg(CLASSES),
    map_svg(MAP),
]


@pytest.mark.parametrize("svg", SVGS)
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


def test_labels_and_shares_of_a_confusion_are_shown():
    svg = confusion_svg(CLASSES)
    assert "cardio &lt;b&gt;" in svg and "a $x$ label with a name" in svg and "too long" not in svg
    shown = re.findall(r">(\d+)</text>", svg)
    assert sorted(map(int, shown)) == sorted([75, 25, 50, 50, 100, 0, 12, 88])
    many = {
        "labels": [f"label {i}" for i in range(30)],
        "records": [*range(1, 31)],
        "synthetic": {"accuracy": SPREADS[:1] * 30, "confusion": [[1 / 30] * 30] * 30},
        "ceiling": {"accuracy": SPREADS[:1] * 30, "confusion": [[1 / 30] * 30] * 30},
    }
    for svg in (confusion_svg(many), class_accuracy_svg(many)):
        assert "label 29" in svg and "label 10<" in svg and "label 9<" not in svg
    assert not re.findall(r">(\d+)</text>", confusion_svg(many))


def test_the_text_alternative_says_what_was_taken_for_what():
    assert confusion_alternative(CLASSES) == (
        "Confusion matrices. Trained on synthetic records: cardio <b>: 75% right, 25% taken for a "
        "$x$ label with a name that is far too long; a $x$ label with a name that is far too long: "
        "50% right, 50% taken for cardio <b>."
    )


def test_the_map_shows_each_point():
    svg = map_svg(MAP)
    between = MAP | {"synthetic": [*MAP["synthetic"], [1.5, 1.5], [1.0, 2.0]]}
    assert map_svg(between).count("<use") - svg.count("<use") == 2
    assert "40% of the variance" in svg and "12%" in svg


def test_the_part_shows_every_section():
    environment = Environment(
        loader=PackageLoader("dpray.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    result = evaluate(notes(120, 1), notes(80, 2), BagOfWords(), seeds=2, networks=True)
    spreads = {"accuracy": SPREADS[0], "fitted": 3.5}
    result["in_context"] = {
        "task": "classification", "test_records": 60, "seeds": 2,
        "rows": [{"shots": 4, "synthetic": spreads, "ceiling": spreads}],
    }  # fmt: skip
    of_set = {"accuracy": SPREADS[0], "train_records": 80}
    result["next_word"] = {
        "test_records": 60, "seeds": 2, "base": 0.125, "synthetic": of_set, "ceiling": of_set,
    }  # fmt: skip

    page = environment.get_template("report_evaluation.html.j2").render(
        evaluation=result,
        tables=evaluation_tables(result),
        synthetic_row=SYNTHETIC,
        pictures=pictures,
    )

    assert page.count("<svg") == 5 == page.count('role="img"')
    for part in (
        "PRIVATE: not for release",
        "3-layer network with Deep CORAL",
        "MAUVE (1)",
        "longest shared run of words",
        "distinct-3",
        "Topics:",
        "In-context classification",
        "0.750 ± 0.100 (4)",
        "the model as it came",
        "Scatter plot: embeddings of",
        "Confusion matrices.",
        "Note: near-duplicates are looked for in half",
    ):
        assert part in page
    mauve = result["fidelity"]["measures"]["mauve"]["synthetic_to_real"]
    assert plus_minus(mauve, 3) in page


def test_signs_that_the_font_lacks_are_not_spelled_on_stderr(capfd):
    topics = [{"terms": ["\u7cd6\u5c3f\u75c5"], "real": 0.5, "synthetic": 0.4}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        svg = topics_svg(topics)

    assert [str(warning.message) for warning in caught] == []
    assert capfd.readouterr().err == ""
    assert "\u7cd6\u5c3f\u75c5" in svg

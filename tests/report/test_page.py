"""The privacy report states everything it has to, and a record's text stays text."""

import math
import re
from html.parser import HTMLParser

import pytest

from dpray.report.answers import attacker_accuracy
from dpray.report.page import render_report
from dpray.report.tables import at_most, bound, one_in
from dpray.runs.privacy_report import PrivacyReport, parse_report
from dpray.types import InputError
from tests.report.reports import ATTACK, RUN, SAMPLES, a_report, an_evaluation


def page(public=False, evaluation=True, samples=SAMPLES, **changes):
    measured = an_evaluation() if evaluation else None
    return render_report(parse_report(a_report(**changes)), samples, measured, RUN, public)


class Visible(HTMLParser):
    """The text that a reader sees, and every tag with its attributes."""

    def __init__(self, html):
        super().__init__()
        self.texts, self.tags, self.attributes, self.hidden = [], [], [], 0
        self.feed(re.sub("</?bdi>", "", html))
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self.hidden += tag == "style"

    def handle_endtag(self, tag):
        self.hidden -= tag == "style"

    def handle_data(self, data):
        if not self.hidden:
            self.texts.append(data)


COST = "2,600 3.9 details epsilon alone 3.9 delta 1e-6 bound zcdp"
STATED = (
    "patient (column patient_id)",
    "add or remove one",
    "one privacy unit is added or removed",
    "Contribution bound 3 records of one privacy unit, at most",
    "3.98765",
    "1e-6",
    "dpray over dp-accounting",
    "0.6.0",
    "Canonne et al. 2020, Theorem 1",
    f"exponential mechanism clip bound 10 batch size 255 temperature 2 {COST} zcdp rho 0.49981",
    f"above threshold threshold 0.5 noise 0.2 {COST} zcdp rho 0.0021",
    "records are hashed to batches by unit id; no amplification",
    "none: parameters were chosen on public data",
    "labels cardiology, dermatology public size, in persons, by data.unit 4,000",
    "ChaCha20 keyed with 256 bits from the operating system",
    "Timing: how long a batch takes is not protected.",
    "Floating point: real-valued noise is drawn in float64.",
    "repeated 2",
    "failed 1",
    "published 31",
    "run-5f1c9a",
    "Begun more than once: 2, only after an interruption, the loss of a machine.",
    "Lost starts: 3 by the loss of a machine; 1 by an interruption.",
    "made by private prediction",
    "batch size 255 private tokens 2,600",
    "1,412 synthetic records",
    "The patient reports chest pain on effort.",
    "0.32.0",
)


def test_every_item_is_stated():
    text = Visible(page()).text
    assert [stated for stated in STATED if stated not in text] == []


def test_a_text_from_right_to_left_stands_by_itself():
    """Every value of the data is in an element whose direction is its own."""
    label, about, text = "أمراض القلب", "رسائل المرضى", "هطل المطر هذا الصباح."
    samples = [{"text": text, "label": label, "terms": ["مطر", "قلب"]}]
    measured = an_evaluation()
    measured["replays"] = {
        "synthetic_records": 1, "held_out_records": 1, "kinds": {},
        "found": [{"kind": "words", "string": "الخشناوي", "in_held_out": False}],
    }  # fmt: skip
    run = RUN | {"config": {"data": {"language": "Arabic", "about": about, "labels": [label]}}}
    report = a_report(public_inputs={"labels": [label], "about": about, "public_size": 7})
    html = render_report(parse_report(report), samples, measured, run, public=False)
    assert f'<blockquote dir="auto" lang="ar">{text}</blockquote>' in html
    words = re.findall("[\u0600-\u06ff]+(?: [\u0600-\u06ff]+)*", html.replace(text, ""))
    assert {label, about, "مطر", "الخشناوي"} <= {*words}
    assert html.count("<bdi>") >= len(words)
    assert all(f"<bdi>{each}</bdi>" in html for each in words)
    bare = re.sub("<bdi>[^<]*</bdi>|<blockquote.*?</blockquote>", "", html)
    assert not re.search("[\u0600-\u06ff]", bare)


def test_the_page_begins_with_the_date_the_model_and_the_unit_in_words() -> None:
    inputs = {"model": "HuggingFaceTB/SmolLM2-1.7B (sha256 0123)", "public_size": 7}
    report = a_report(privacy_unit="record", public_inputs=inputs)
    html = render_report(parse_report(report), [], None, {"created": "2026-03-04T05:06"}, True)
    text = Visible(html).text
    assert "with SmolLM2-1.7B on 2026-03-04" in text
    assert "What is protected one record" in text and "public size, in records 7" in text
    # The terms of art are in what has to be opened.
    opened = re.sub(r"<details>.*?</details>", "", html, flags=re.DOTALL)
    assert "zcdp rho" in text and "zcdp rho" not in Visible(opened).text


def test_the_guarantee_is_given_in_words_and_in_symbols():
    text = Visible(page(epsilon=1.0)).text

    assert "at most 2.72 times as likely" in text
    assert "an extra probability of at most 1 in 1,000,000 ." in text
    assert "at most 73.11 % of the time" in text
    assert "at most 88.11 % of the time" in Visible(page(epsilon=2.0021)).text  # 88.1018
    assert "Pr[ M ( D ) ∈ S ] ≤ e ε · Pr[ M ( D′ ) ∈ S ] + δ" in text


def test_the_page_says_what_a_person_with_several_records_has():
    persons = [
        {"records": 2, "epsilon": 7.9753, "delta": 5.4e-5},
        {"records": 49, "epsilon": 195.4, "delta": 1.0},
    ]
    of_records = Visible(page(persons=persons)).text
    assert (
        "is protected record by record: for example, (7.976, 5.4e-05)-DP with 2 records, no "
        "guarantee" in of_records
    )
    of_units = Visible(page(persons=[])).text
    assert "is one unit, with at most 3 of its records; further ones are left out" in of_units


def test_bounds_are_rounded_up():
    assert [at_most(x) for x in (2.7183, 1.0, 54.598, 403.43, 2980.96)] == [
        "2.72", "1", "54.6", "404", "2,990",
    ]  # fmt: skip
    assert [one_in(x) for x in (1e-6, 3e-6, 0.0)] == ["1 in 1,000,000", "1 in 333,333", ""]
    assert [at_most(x, digits=4) for x in (50.0, 88.1018, 100.0)] == ["50", "88.11", "100"]
    bounds = (1.1646547, 3.98765, 4, 1.0, 1.2345641e-6, 1e-6, 0.0, 123456.7)
    assert [bound(x) for x in bounds] == [
        "1.16466", "3.98765", "4", "1", "1.23457e-6", "1e-6", "0", "123457",
    ]  # fmt: skip
    assert attacker_accuracy(0.0, 0.0) == 0.5
    assert attacker_accuracy(0.0, 1.0) == 1.0
    assert attacker_accuracy(1000.0, 1e-6) == 1.0


REQUIRED = [name for name, field in PrivacyReport.model_fields.items() if field.is_required()]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_report_that_leaves_something_out_is_refused(key):
    report = a_report()
    del report[key]
    with pytest.raises(InputError, match=f"^privacy_report.json: no {key};"):
        parse_report(report)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ledger": {"dataset": "notes"}}, "no ledger.url_kind, ledger.reservation, ledger.budget"),
        ({"epsilon": "secret"}, "epsilon is not as dpray writes it"),
        ({"epsilon": None}, "not_private is not as"),
        ({"accountant": None}, "not_private is not as"),
        ({"epsilon": -3.0}, "epsilon is not as dpray writes it"),
        ({"delta": math.nan}, "delta is not as dpray writes it"),
        (
            {"mechanisms": [{"name": "x", "parameters": [], "count": 1, "cost": {}}]},
            "no mechanisms.0",
        ),
        ({"method": "aug_pe"}, "method is not as"),
        ({"method": {"methods": ["x"]}}, "method is not as"),
    ],
)
def test_a_broken_report_is_refused_by_its_key(changes, said):
    with pytest.raises(InputError, match=f"^privacy_report.json: {said}") as caught:
        parse_report(a_report(**changes))
    assert "secret" not in str(caught.value)


def test_a_report_is_written_as_it_was_read():
    assert parse_report(a_report()).to_json() == a_report()
    assert parse_report(a_report(of_later_versions=1)).to_json() == a_report()


def test_the_ledger_bar_has_a_text_alternative():
    html = page()

    assert "60 % of the budget is spent: ε 5.98765 of 10, 4.01235 left</title>" in html
    assert '<rect class="bar-spent" width="598.8"' in html


def test_the_markup_of_a_record_stays_text():
    seen = Visible(page())

    assert ATTACK in " ".join(seen.texts)
    assert "<b>dermatology</b>" in " ".join(seen.texts)
    assert not {"script", "img", "b", "iframe"} & set(seen.tags)
    assert not [a for a in seen.attributes if a[1].startswith("on")]


def test_nothing_is_fetched():
    html = page()
    addresses = [a[2] for a in Visible(html).attributes if a[1] in ("src", "href", "action")]

    assert addresses == ["data:,"]
    assert "default-src 'none'" in html
    assert not re.search(r"url\((?!#)", html) and "@import" not in html


def test_a_public_page_has_no_private_part():
    private, public = page(), page(public=True)
    removed = re.sub(r"<!-- BEGIN PRIVATE -->.*<!-- END PRIVATE -->", "", private, flags=re.DOTALL)

    assert "PRIVATE: not for release" in private
    assert "0.812 ± 0.013" in private and "777" in private and "91.3" in private
    assert "<svg" in public and private.count("<svg") == public.count("<svg") + 1
    assert public.split() == removed.split() == page(evaluation=False).split()
    for number in ("PRIVATE", "0.812 ±", "777", "91.3", "3.50 ± 0.10"):
        assert number not in public


@pytest.mark.parametrize("public", [True, False])
def test_places_and_secrets_of_the_configuration_are_not_shown(public):
    html = page(public=public)

    assert "google/gemma-3-1b-it" in html
    for secret in ("hunter2", "hunter3", "secret-place", "10.0.0.7", "ledger.internal"):
        assert secret not in html


def test_a_run_that_is_not_private_says_so_first():
    text = Visible(page(not_private=True)).text

    assert text.index("This run is NOT private.") < text.index("What is guaranteed")
    assert "NOT private" not in Visible(page()).text


HISTORY = [
    {
        "iteration": 1, "population": 28, "kept": 7, "top_tenth_share": 0.4321,
        "effective_texts": 5.1,
        "words": {"0.1": 3.0, "0.5": 5.0, "0.9": 8.0},
    }
]  # fmt: skip


def test_a_run_without_noise_claims_none():
    noiseless = {
        "epsilon": None, "delta": None, "not_private": True, "mechanisms": [],
        "iterations": HISTORY,
    }  # fmt: skip
    text = Visible(page(**noiseless)).text

    assert "Private records were used without noise: nothing was charged." in text
    assert "The votes are counted without noise, and the texts" in text
    assert "computed from private records and is not for release" in text
    for false in ("No private record was used", "noisy", "cost nothing", "the noise it used"):
        assert false not in text

    public = page(public=True, **noiseless)
    assert "43 %" in text and "43 %" not in public and "Iterations" not in public


@pytest.mark.parametrize("public", [True, False])
def test_the_iterations_of_a_private_run_are_shown(public):
    text = Visible(page(public=public, iterations=HISTORY)).text

    assert "The votes are counted with noise, and the texts with the most of them are kept" in text
    assert "43 %" in text
    assert "made from noisy counts and from the texts that these kept: they cost nothing" in text


def test_a_run_without_ledger_batches_or_records_has_a_page():
    report = a_report(records=0, mechanisms=[], not_covered=[])
    del report["ledger"], report["batches"]

    text = Visible(render_report(parse_report(report), [], None, {}, True)).text

    assert "No record was released." in text and "No private record was used." in text
    assert "Budget" not in text and "Batches" not in text


def test_files_of_another_version_are_refused_without_their_content():
    given = [an_evaluation() | {name: {"records": "secret"}} for name in ("fidelity", "lengths")]
    for evaluation in given:
        with pytest.raises(InputError, match="not as this version of dpray writes") as caught:
            render_report(parse_report(a_report()), SAMPLES, evaluation, RUN, False)
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)

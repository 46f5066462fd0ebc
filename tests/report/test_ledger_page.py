"""The page of all budgets: what it states, and that a hostile name stays text."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.ledger.ledger import Ledger
from dpray.report.page import RUNS_SHOWN, render_ledger
from dpray.report.pictures import spending_svg
from dpray.types import Budget
from tests.report.browser import needs_browser, rendered_in_silence
from tests.report.reports import ATTACK
from tests.report.test_page import Visible

MADE_AT = "2031-05-06T07:08:09+00:00"
UNIT = f"all records with the same '{ATTACK}'"


def a_ledger(folder: Path) -> dict:
    ledger = Ledger.create_or_open(f"sqlite:///{folder}/ledger.db")
    stated_for = (UNIT, NEIGHBORING_RELATION)
    ledger.create_dataset("hospital", Budget(4.0, 1e-6), *stated_for)
    ledger.create_dataset("clinic", Budget(2.0, 1e-6), *stated_for, "renyi")
    ledger.create_dataset("unused", Budget(1.0, 0.0), *stated_for)
    for run, epsilon in (("run-1", 0.5), ("run-2", 0.25)):
        charge = {run: (DiscreteLaplace(1 / epsilon, 1), Budget(epsilon, 1e-8))}
        ledger.reserve("clinic", charge, *stated_for)
    ledger.begin("run-1", "attempt-1", ["a/0", "a/1"])
    ledger.publish("run-1", "attempt-1", [("a/0", "a" * 64)])
    ledger.commit("run-1")
    return ledger.show()


def test_everything_is_stated(tmp_path: Path):
    shown = a_ledger(tmp_path)
    html = render_ledger(shown, MADE_AT)
    text = Visible(html).text
    for stated in (
        "3 data sets in",
        "as of 2031-05-06 07:08 UTC",
        "hospital 4 / 1e-6 0 / 0 4 / 1e-6 0",
        "renyi at order",
        "1 of 2 finished",
        "none started open",
        "run-2",
        "unused 1 / 0 0 / 0 1 / 0 0",
        "No run has been charged.",
    ):
        assert stated in text, stated
    assert html.count('role="img"') == 3 + 1, "bars of data sets, one chart"


def test_a_hostile_name_stays_text(tmp_path: Path):
    shown = a_ledger(tmp_path)
    shown["ledger"] = f"sqlite:///{ATTACK}"
    for dataset in shown["datasets"]:
        dataset["dataset"] += ATTACK
        for run in dataset["entries"]:
            run |= {"key": ATTACK}
    html = render_ledger(shown, MADE_AT)
    seen = Visible(html)
    assert ATTACK in " ".join(seen.texts)
    assert not {"script", "img", "b", "iframe"} & set(seen.tags)
    assert not [a for a in seen.attributes if a[1].startswith("on")]
    fetched = [a[2] for a in seen.attributes if a[1] in ("src", "href", "action")]
    assert fetched == ["data:,"] + [f"#data-set-{n}" for n in (1, 2, 3)]
    assert not re.search(r"url\((?!#)", html) and "@import" not in html


def test_the_chart_has_a_step_for_each_run():
    runs = [
        {"at": f"2031-01-{day:02}T00:00:00+00:00", "spent": spent}
        for day, spent in ((1, 1.0), (2, 3.0), (9, 3.5))
    ]
    svg = spending_svg(runs, 4.0, "2031-01-31T00:00:00+00:00")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    lines = [path for path in re.findall(r'd="([^"]*)"', svg) if path.count("L") >= 7]
    points = [tuple(map(float, xy)) for xy in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", lines[-1])]
    heights = list(dict.fromkeys(y for _, y in points))
    assert len(heights) == 4, "nothing spent, then three levels"
    rises = [a - b for a, b in pairwise(heights)]
    assert [round(rise / rises[0], 3) for rise in rises] == [1.0, 2.0, 0.5]
    # One run, charged in the very second of the page.
    assert "<svg" in spending_svg(runs[:1], 4.0, runs[0]["at"])


def test_a_long_table_is_cut_and_says_so(tmp_path: Path):
    shown = a_ledger(tmp_path)
    [clinic] = [each for each in shown["datasets"] if each["dataset"] == "clinic"]
    [first, last] = clinic["entries"]
    clinic["entries"] = [first | {"key": f"old-{n}"} for n in range(RUNS_SHOWN)] + [last]
    text = Visible(render_ledger(shown, MADE_AT)).text
    assert f"The last {RUNS_SHOWN} of {RUNS_SHOWN + 1} runs" in text
    assert "old-0 " not in text and "old-1 " in text and "run-2" in text


@needs_browser
def test_a_browser_renders_it_in_silence(tmp_path: Path):
    path = tmp_path / "budgets.html"
    path.write_text(render_ledger(a_ledger(tmp_path), MADE_AT), encoding="utf-8")
    dom = rendered_in_silence(path)
    assert "Privacy budgets</title>" in dom and dom.count("<svg") == 4
    assert "&lt;script&gt;" in dom

"""`dpray report`: where its pages go, and that a browser shows them."""

import json

import pytest

from dpray.commands.report import report
from dpray.report.page import write_report
from dpray.report.review import TOOLS, write_review
from dpray.types import InputError
from tests.report.browser import needs_browser, rendered_in_silence
from tests.report.reports import ATTACK, RUN, a_report, an_evaluation


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "privacy_report.json").write_text(json.dumps(a_report()))
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    rows = [{"text": f"note {i} of {label}", "label": label} for label in "ab" for i in range(50)]
    (tmp_path / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "evaluation.json").write_text(json.dumps(an_evaluation()))
    return tmp_path


def test_the_page_beside_the_run_is_public_and_the_other_is_in_its_private_folder(run_dir):
    # A page with the evaluation, as an older version left it here.
    (run_dir / "privacy_report.html").write_text("PRIVATE: not for release")
    path, private_path = write_report(run_dir, public=False)

    assert path == run_dir / "privacy_report.html"
    assert private_path == run_dir / "private" / "evaluation.html"
    public, private = (p.read_text(encoding="utf-8") for p in (path, private_path))
    assert "PRIVATE: not for release" in private and "0.812 ± 0.013" in private
    assert "farthest pair: age and route" in private and "0.271 ± 0.010" in private
    assert "URLs: 4, phone numbers: 2" in private and "5 of 1,412" in private
    assert "PRIVATE" not in public and "0.812 ±" not in public
    for html in (public, private):
        assert html.index("note 0 of a") < html.index("note 0 of b") < html.index("note 1 of a")
        assert "note 4 of b" in html and "note 5 of a" not in html


def test_only_the_public_page_is_written_where_it_is_asked_for_or_nothing_was_measured(run_dir):
    path, private_page = run_dir / "privacy_report.html", run_dir / "private/evaluation.html"
    assert write_report(run_dir, public=True) == (path, None)
    (run_dir / "private" / "evaluation.json").unlink()
    assert write_report(run_dir, public=False) == (path, None)
    assert path.exists() and not private_page.exists()


def test_the_command_says_where_the_pages_are(run_dir, capsys):
    report(run_dir, as_json=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"Written to {run_dir / 'privacy_report.html'}"
    assert str(run_dir / "private" / "evaluation.html") in second and "PRIVATE" in second

    report(run_dir, public=True, as_json=True)
    found = {"path": str(run_dir / "privacy_report.html"), "private_path": None, "review": None}
    assert json.loads(capsys.readouterr().out) == found


def test_a_folder_that_is_no_run_is_refused(run_dir, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        write_report(tmp_path / "missing", public=False)

    (run_dir / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json is not JSON"):
        write_report(run_dir, public=False)

    (run_dir / "privacy_report.json").unlink()
    with pytest.raises(InputError, match=r"cannot read .*privacy_report\.json"):
        write_report(run_dir, public=False)
    assert not (run_dir / "privacy_report.html").exists()


@needs_browser
def test_a_browser_renders_it_in_silence(run_dir):
    (run_dir / "synthetic.jsonl").write_text(json.dumps({"text": ATTACK, "label": "a"}) + "\n")
    _, path = write_report(run_dir, public=False)
    dom = rendered_in_silence(path)
    assert "Privacy report: clinic-notes</title>" in dom
    assert "&lt;script&gt;document.title" in dom


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sample_for_reviewers_has_released_texts_only(run_dir, tool):
    released = [json.loads(line) for line in (run_dir / "synthetic.jsonl").open()]
    path = write_review(run_dir, tool, 30)
    sample = json.loads(path.read_text())
    assert path == run_dir / f"review_{tool.replace('-', '_')}.json"
    assert len(sample) == 30 == len({each["id"] for each in sample})
    for each in sample:
        # The forms of Label Studio's tasks, and of `Record.from_dict` of Argilla 2.8.
        if tool == "label-studio":
            assert {*each} == {"id", "data"} and type(each["id"]) is int
            row, label, text = (each["data"].pop(key) for key in ("row", "label", "text"))
            assert not each["data"]
        else:
            assert {*each} == {
                "id", "fields", "metadata", "suggestions", "responses", "vectors",
            }  # fmt: skip
            assert {*each["fields"]} == {"text"} and type(each["id"]) is str
            row, label, text = (
                each["metadata"]["row"],
                each["metadata"]["label"],
                each["fields"]["text"],
            )
        assert released[row - 1] == {"text": text, "label": label}
    # A sample of all parts of the release, the same each time, and a part of a larger one.
    assert max(int(each["id"]) for each in sample) > 60
    before = path.read_bytes()
    assert write_review(run_dir, tool, 30).read_bytes() == before
    more = json.loads(write_review(run_dir, tool, 60).read_text())
    assert more[:30] == json.loads(before)


def test_labels_of_a_sample_are_texts_and_may_be_missing(run_dir):
    rows = [{"text": "one", "label": 1}, {"text": "two", "label": None}]
    (run_dir / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads(write_review(run_dir, "argilla", 9).read_text())
    assert sorted([each["metadata"] for each in found], key=str) == [
        {"row": 1, "label": "1"},
        {"row": 2},
    ]


def test_what_is_no_sample_to_show(run_dir, capsys):
    with pytest.raises(InputError, match=r"^--review: not doccano; one of label-studio, argilla"):
        report(run_dir, review="doccano")
    report(run_dir, review="argilla", records=2, as_json=True)
    assert json.loads(capsys.readouterr().out)["review"] == str(run_dir / "review_argilla.json")
    (run_dir / "privacy_report.json").write_text(json.dumps(a_report(not_private=True)))
    with pytest.raises(InputError, match="this run is not private, and nothing of it may be"):
        write_review(run_dir, "argilla", 2)
    with pytest.raises(InputError):
        write_review(run_dir / "none", "argilla", 2)

"""`dpray card`: what its files say, of a run's public files alone."""

import json

import datasets
import mlcroissant
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dpray.commands.card import card
from dpray.evaluation.personal_data import LIMITS
from dpray.report.card import CARD, CROISSANT, SHEET, hub_license, license_there, write_card
from dpray.types import InputError
from tests.report.browser import needs_browser, rendered_in_silence
from tests.report.reports import ATTACK, a_report
from tests.report.test_page import Visible


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "privacy_report.json").write_text(json.dumps(a_report()))
    rows = [
        {"text": "note " * (n + 1), "label": "ab"[n % 2], "terms": ["x", "y"]} for n in range(10)
    ]
    (tmp_path / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "evaluation.json").write_text('{"secret": 0.123456}')
    return tmp_path


def test_the_card_states_the_guarantee_and_figures_of_the_released_texts(run_dir):
    """And the sheet gives the same answers."""
    write_card(run_dir, None, "cc-by-4.0")
    card, sheet = (run_dir / CARD).read_text(), Visible((run_dir / SHEET).read_text()).text
    for text in (card, sheet):
        told = " ".join(text.split())
        assert "at most 54 times as likely" in told and "1 in 1,000,000" in told
        assert "at most 98.18 % of the time" in told
    _, header, body = (run_dir / CARD).read_text().split("---\n", 2)
    found = yaml.safe_load(header)
    assert found["pretty_name"] == "clinic-notes" and found["license"] == "cc-by-4.0"
    assert found["configs"] == [
        {"config_name": "records", "data_files": "synthetic.jsonl", "default": True}
    ]
    for said in (
        "| epsilon, at most | 3.98765 |",
        "| what is protected | patient (column patient_id) |",
        "- Timing: how long a batch takes is not protected.",
        "| `\"a\"` | 5 |",
        "Words of a text: 2 at 10 %, 6 at 50 %, 9 at 90 %.",
    ):  # fmt: skip
        assert said in body
    assert "0.123456" not in "".join(
        (run_dir / name).read_text() for name in (CARD, CROISSANT, SHEET)
    )


def test_the_card_names_the_model_the_language_and_the_share_of_cut_texts(run_dir):
    inputs = {"model": "owner/SmolLM2 (sha256 01)", "language": "German", "public_size": 9}
    unit = "all records with the same 'person' <b>"
    report = a_report(public_inputs=inputs, privacy_unit=unit)
    (run_dir / "privacy_report.json").write_text(json.dumps(report))
    ends = ["length"] * 3 + ["stop"]
    rows = [{"text": "note", "label": "a", "finish_reason": end} for end in ends]
    (run_dir / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_card(run_dir, None, "unknown")
    card = (run_dir / CARD).read_text()
    assert "with the language model SmolLM2 (dpray" in card
    assert "Language of the texts: German." in card
    assert "75 % of the texts reached the most tokens" in card
    assert "the same 'person' &lt;b&gt;" in card and "&#39;" not in card and "<b>" not in card


def test_the_card_says_what_the_texts_are_and_what_labels_mean(run_dir):
    def card(inputs):
        (run_dir / "privacy_report.json").write_text(json.dumps(a_report(public_inputs=inputs)))
        write_card(run_dir, None, "unknown")
        return (run_dir / CARD).read_text()

    said = card(
        {"about": "letters of <b>guests", "label_about": {"1": "praise", "2": "complaints"}}
    )
    assert "The texts are: letters of &lt;b&gt;guests.\n" in said
    assert "What the labels mean: `1` praise; `2` complaints.\n" in said
    silent = card({})
    assert "The texts are" not in silent and "What the labels mean" not in silent


def test_the_libraries_read_what_the_card_promises(run_dir):
    table = pa.table({"year": [1999, 2001], "cast": [["A"], ["B", "C"]], "odd": [{"a": 1}] * 2})
    pq.write_table(table, run_dir / "table.parquet")
    rows = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (run_dir / "table.jsonl").write_text(rows)
    write_card(run_dir, "my notes", "unknown")
    metadata = mlcroissant.Dataset(str(run_dir / CROISSANT))
    assert metadata.metadata.name == "my notes" and not metadata.metadata.issues.errors
    assert [row["table/year"] for row in metadata.records("table")] == [1999, 2001]
    first = next(iter(metadata.records("records")))
    assert first["records/text"] == b"note " and set(first) == {
        "records/text", "records/label", "records/terms",
    }  # fmt: skip
    cache = run_dir / "private" / "cache"
    for name, rows in (("records", 10), ("table", 2)):
        loaded = datasets.load_dataset(str(run_dir), name, split="train", cache_dir=cache)
        assert len(loaded) == rows


def test_a_changed_file_no_longer_fits_the_metadata(run_dir):
    write_card(run_dir, None, "unknown")
    (run_dir / "synthetic.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(Exception, match=r"Download\(synthetic.jsonl\)"):
        list(mlcroissant.Dataset(str(run_dir / CROISSANT)).records("records"))


def test_the_sheet_answers_from_the_report_and_leaves_the_rest_to_the_owner(run_dir):
    def sheet(**changes):
        (run_dir / "privacy_report.json").write_text(json.dumps(a_report(**changes)))
        write_card(run_dir, None, "unknown")
        return " ".join(Visible((run_dir / SHEET).read_text()).text.split())

    by_patient, by_record = sheet(), sheet(privacy_unit="record")
    assert "epsilon 3.98765, delta 1e-6, both upper bounds. from: epsilon, delta" in by_patient
    assert "delta times" not in by_patient and "record by record" not in by_patient
    assert "record by record" in by_record and "delta times records is 0.004" in by_record
    assert by_patient.count("For you to answer:") == 4 and "Questions left to you 4" in by_patient
    size = "public size, in persons, by data.unit: 4000"
    assert f"labels: cardiology, dermatology; {size} from: public_inputs" in by_patient


@needs_browser
def test_a_browser_shows_the_sheet_and_runs_nothing_of_a_report(run_dir):
    report = a_report(privacy_unit=ATTACK, public_inputs={"labels": [ATTACK], "public_size": 7})
    (run_dir / "privacy_report.json").write_text(json.dumps(report))
    write_card(run_dir, ATTACK, "unknown")
    page = rendered_in_silence(run_dir / SHEET)
    assert "owned" not in page.partition("</title>")[0].partition("document.title")[0]
    assert ATTACK.split("'")[0].split("<img")[0] in Visible((run_dir / SHEET).read_text()).text


def test_the_card_says_which_patterns_of_personal_data_its_texts_have(run_dir):
    write_card(run_dir, None, "unknown")
    said = "Personal data, as far as patterns find it in these texts: "
    assert f"{said}none (0 of 10 texts). {LIMITS}" in (run_dir / CARD).read_text()
    rows = [{"text": "call +41 44 668 18 00 or write to a@b.org"}, {"text": "nothing"}]
    (run_dir / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_card(run_dir, None, "unknown")
    card = (run_dir / CARD).read_text()
    assert f"{said}e-mail addresses: 1, phone numbers: 1 (1 of 2 texts). {LIMITS}" in card
    assert "a@b.org" not in card and "668" not in card


def test_a_name_cannot_break_the_header_or_a_table(run_dir):
    row = {"text": "x", "label": "a|b`c\n| d", "k`|\n": 1}
    (run_dir / "synthetic.jsonl").write_text(json.dumps(row) + "\n")
    write_card(run_dir, "a: b\n---\n# c", "unknown")
    header = (run_dir / CARD).read_text().split("\n---\n")[0].removeprefix("---\n")
    assert yaml.safe_load(header)["license"] == "unknown"
    lines = (run_dir / CARD).read_text().splitlines()
    assert '| `"a/b\'c\\n/ d"` | 1 |' in lines and "| `k'/` | a value of the record |" in lines


def test_a_card_that_somebody_wrote_is_kept(run_dir):
    (run_dir / CARD).write_text("# ours\n")
    with pytest.raises(InputError, match="move it first"):
        write_card(run_dir, None, "unknown")
    assert (run_dir / CARD).read_text() == "# ours\n" and not (run_dir / SHEET).exists()
    (run_dir / CARD).unlink()
    assert write_card(run_dir, None, "unknown") == write_card(run_dir, None, "unknown")


def test_half_a_character_in_a_text_has_a_card_too(run_dir):
    (run_dir / "synthetic.jsonl").write_text(json.dumps({"text": "x \ud800", "label": "a"}) + "\n")
    write_card(run_dir, None, None)
    metadata = json.loads((run_dir / CROISSANT).read_text())
    fields = {each["name"]: each["dataType"] for each in metadata["recordSet"][0]["field"]}
    assert fields == {"text": "sc:Text", "label": "sc:Text"}


def test_a_card_keeps_its_licence_unless_another_one_is_given(run_dir):
    kept = ((None, "unknown"), ("OpenRAIL++", "openrail++"), (None, "openrail++"), ("mit", "mit"))
    for given, stated in kept:
        write_card(run_dir, None, given)
        header = yaml.safe_load((run_dir / CARD).read_text().split("---\n")[1])
        assert header["license"] == license_there(run_dir) == stated
    for line in ("license: [a, b]", "license: &x *x", "license:", "pretty_name: x"):
        (run_dir / CARD).write_text(f"---\n{line}\ntags:\n- dpray\n---\nlicense: mit\n")
        assert license_there(run_dir) == "unknown"


@pytest.mark.parametrize(
    ("given", "stated"),
    [
        ("CC-BY-4.0", "cc-by-4.0"),
        ("cc by 4.0", "cc-by-4.0"),
        ("Apache-2.0", "apache-2.0"),
        (" MIT ", "mit"),
        ("GPL-3.0-or-later", "gpl-3.0"),
        ("LGPL-2.1-only", "lgpl-2.1"),
        ("AGPL-3.0+", "agpl-3.0"),
        ("ODC-By-1.0", "odc-by"),
        ("PDDL-1.0", "pddl"),
        ("OpenRAIL++", "openrail++"),
        ("other", "other"),
    ],
)
def test_a_licence_goes_by_the_name_that_the_hub_has_for_it(given, stated):
    assert hub_license(stated) == hub_license(given) == stated


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cc-by-4", "one of cc-by-4.0?"),
        ("cc-bz-4.0", "did you mean 'cc-by-4.0'?"),
        ("Apache", "one of apache-2.0?"),
        ("EUPL-1.2", "did you mean 'eupl-1.1'?"),
        ("proprietary terms of a hospital", "`other` is any other"),
        ("", "`other` is any other"),
        ("mit\nlicense: x", "`other` is any other"),
    ],
)
def test_an_unknown_licence_is_refused_with_a_near_one(run_dir, given, said):
    with pytest.raises(
        InputError, match=r"^--license: the hub has no licence of this name"
    ) as wrong:
        write_card(run_dir, None, given)
    assert said in str(wrong.value) and "\n" not in str(wrong.value)
    assert not (run_dir / CARD).exists()


def test_what_is_no_private_run_has_no_card(run_dir, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        write_card(tmp_path / "none", None, "unknown")
    for changes, message in (({"not_private": True}, "not private"), (None, "no epsilon")):
        report = {"not_private": False} if changes is None else a_report(**changes)
        (run_dir / "privacy_report.json").write_text(json.dumps(report))
        with pytest.raises(InputError, match=message):
            write_card(run_dir, None, "unknown")
    assert not (run_dir / CARD).exists()


def test_the_command_says_where_the_files_are(run_dir, capsys):
    card(run_dir)
    assert capsys.readouterr().out.splitlines() == [
        f"Written to {run_dir / name}" for name in (CARD, CROISSANT, SHEET)
    ]
    card(run_dir, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "paths": [str(run_dir / name) for name in (CARD, CROISSANT, SHEET)],
        "url": None,
    }

"""The privacy report states everything it has to, and a record's text stays text."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from dpray.commands.report import report, write_report
from dpray.io.report_page import REQUIRED, at_most, attacker_accuracy, one_in, render_report
from dpray.types import InputError

ATTACK = (
    "<script>document.title='owned'</script><img src=https://evil.example/x onerror=alert(1)>"
    '</blockquote>{{ 7 * 7 }} & "quoted" it\'s'
)
ACCURACY = {"mean": 0.8125, "deviation": 0.0125}
ROW = {"accuracy": ACCURACY, "macro_f1": ACCURACY, "train_records": 412}
LENGTHS = {"mean": 41.5, "quantiles": {"0.05": 12.0, "0.5": 38.0, "0.95": 88.0}}


def a_report(**changes):
    report = {
        "epsilon": 3.98765,
        "delta": 1e-6,
        "neighboring_relation": "add_or_remove_one",
        "privacy_unit": "patient (column patient_id)",
        "contribution_bound": 3,
        "accountant": {
            "name": "zCDP",
            "version": "dp-accounting 0.6.0",
            "bound": "Canonne et al. 2020, Theorem 1",
        },
        "mechanisms": [
            {
                "name": "exponential_mechanism",
                "parameters": {"clip_bound": 10.0, "batch_size": 255, "temperature": 2.0},
                "count": 2600,
                "cost": {"rho": 0.49981},
            },
            {
                "name": "above_threshold",
                "parameters": {"threshold": 0.5, "noise": 0.2},
                "count": 2600,
                "cost": {"rho": 0.0021},
            },
        ],
        "sampling": "records are hashed to batches by unit id; no subsampling amplification",
        "tuning_cost": "none: parameters were chosen on public data",
        "public_inputs": {"labels": ["cardiology", "dermatology"], "public_size": 4000},
        "noise_source": "ChaCha20 keyed with 256 bits from the operating system",
        "not_covered": [
            "Timing: how long a batch takes is not protected.",
            "Floating point: real-valued noise is drawn in float64.",
        ],
        "not_private": False,
        "batches": {"total": 32, "published": 31, "repeated": 2, "dropped": 1, "failed": 0},
        "ledger": {
            "url_kind": "sqlite",
            "dataset": "clinic-notes",
            "budget": {"epsilon": 10.0, "delta": 1e-5},
            "spent": {"epsilon": 5.98765, "delta": 2e-6},
            "left": {"epsilon": 4.01235, "delta": 8e-6},
            "reservation": "run-5f1c9a",
        },
        "records": 1412,
        "lost_batches": "repeat",
        "method": {"name": "private_prediction", "batch_size": 255, "private_tokens": 2600},
        "versions": {"dpray": "0.1.0", "vllm": "0.32.0"},
    }
    return report | changes


def an_evaluation():
    return {
        "private": "computed from private data; not for release",
        "test_records": 777,
        "downstream": {
            "classifier": "logistic regression on embeddings",
            "seeds": 5,
            "synthetic": ROW,
            "ceiling": ROW,
            "floor": ROW | {"kind": "majority class"},
            "classes": {
                "labels": ["cardiology", "dermatology"],
                "records": [431, 346],
                "synthetic": {"accuracy": [ACCURACY] * 2, "confusion": [[0.83, 0.17], [0.2, 0.8]]},
                "ceiling": {"accuracy": [ACCURACY] * 2, "confusion": [[0.9, 0.1], [0.1, 0.9]]},
            },
        },
        "map": {"real": [[0.5, 0.1]], "synthetic": [[0.6, 0.2]], "explained": [0.371, 0.113]},
        "lengths": {
            "unit": "words",
            "real": LENGTHS,
            "synthetic": LENGTHS,
            "wasserstein": {
                "synthetic_to_real": {"mean": 3.5, "deviation": 0.1},
                "real_to_real": {"mean": 0.7, "deviation": 0.1},
                "sample_size": 300,
            },
        },
        "structure": {
            "real": {"json_parse_share": 1.0, "schema_share": None},
            "synthetic": {"json_parse_share": 0.913, "schema_share": None},
        },
    }


RUN = {
    "config": {
        "data": {"path": "/srv/secret-place/notes.jsonl", "labels": ["cardiology", "dermatology"]},
        "privacy": {"ledger": "postgresql://user:hunter2@ledger.internal/dp"},
        "method": {"name": "private_prediction", "batch_size": 255},
        "engine": {"kind": "openai", "model": "google/gemma-3-1b-it", "api_key": "sk-hunter3"},
        "runtime": {"ray_address": "ray://10.0.0.7:10001"},
    }
}
SAMPLES = [
    {"text": "The patient reports chest pain on effort.\nECG normal.", "label": "cardiology"},
    {"text": ATTACK, "label": "<b>dermatology</b>"},
    {"text": '{"title": "A rash", "year": 2021}', "label": None, "batch": 3},
]


def page(public=False, evaluation=True, samples=SAMPLES, **changes):
    measured = an_evaluation() if evaluation else None
    return render_report(a_report(**changes), samples, measured, RUN, public)


class Visible(HTMLParser):
    """What a reader sees: text outside style and head, and every tag with its attributes."""

    def __init__(self, html):
        super().__init__()
        self.texts, self.tags, self.attributes, self.hidden = [], [], [], 0
        self.feed(html)
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


@pytest.mark.parametrize(
    "stated",
    [
        "patient (column patient_id)",
        "add or remove one",
        "one privacy unit is added or removed",
        "Contribution bound 3 records of one privacy unit, at most",
        "3.98765",
        "1e-6",
        "zCDP",
        "dp-accounting 0.6.0",
        "Canonne et al. 2020, Theorem 1",
        "exponential mechanism clip bound 10 batch size 255 temperature 2 2,600 rho 0.49981",
        "above threshold threshold 0.5 noise 0.2 2,600 rho 0.0021",
        "records are hashed to batches by unit id; no subsampling amplification",
        "none: parameters were chosen on public data",
        "labels cardiology, dermatology public size 4,000",
        "ChaCha20 keyed with 256 bits from the operating system",
        "Timing: how long a batch takes is not protected.",
        "Floating point: real-valued noise is drawn in float64.",
        "repeated 2",
        "dropped 1",
        "published 31",
        "run-5f1c9a",
        "before anything of it is published: repeat.",
        "made by private prediction",
        "batch size 255 private tokens 2,600",
        "1,412 synthetic records",
        "The patient reports chest pain on effort.",
        "0.32.0",
    ],
)
def test_every_item_is_stated(stated):
    assert stated in Visible(page()).text


def test_the_guarantee_is_given_in_words_and_in_symbols():
    text = Visible(page(epsilon=1.0)).text

    assert "at most 2.72 times as likely" in text
    assert "an extra probability of at most 1 in 1,000,000 ." in text
    assert "at most 73.11 % of the time" in text
    assert "at most 88.11 % of the time" in Visible(page(epsilon=2.0021)).text  # 88.1018
    assert "Pr[ M ( D ) ∈ S ] ≤ e ε · Pr[ M ( D′ ) ∈ S ] + δ" in text


def test_bounds_are_rounded_up():
    assert [at_most(x) for x in (2.7183, 1.0, 54.598, 403.43, 2980.96)] == [
        "2.72", "1", "54.6", "404", "2,990",
    ]  # fmt: skip
    assert [one_in(x) for x in (1e-6, 3e-6, 0.0)] == ["1 in 1,000,000", "1 in 333,333", ""]
    assert [at_most(x, digits=4) for x in (50.0, 88.1018, 100.0)] == ["50", "88.11", "100"]
    assert attacker_accuracy(0.0, 0.0) == 0.5
    assert attacker_accuracy(0.0, 1.0) == 1.0
    assert attacker_accuracy(1000.0, 1e-6) == 1.0


@pytest.mark.parametrize("key", REQUIRED)
def test_a_report_that_leaves_something_out_is_refused(key):
    report = a_report()
    del report[key]
    with pytest.raises(InputError, match=f"^privacy_report.json: no {key}$"):
        render_report(report, SAMPLES, None, RUN, False)


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
    assert "17% taken for dermatology" in private and "37% of the variance" in private
    assert "<svg" in public and private.count("<svg") == public.count("<svg") + 3
    assert public.split() == removed.split() == page(evaluation=False).split()
    for number in ("PRIVATE", "0.812 ±", "777", "91.3", "3.50 ± 0.10", "431", "17%", "37%"):
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
    assert "counted without noise, are kept" in text
    assert "computed from private records and is not for release" in text
    for false in ("No private record was used", "noisy", "cost nothing", "the noise it used"):
        assert false not in text

    public = page(public=True, **noiseless)
    assert "43 %" in text and "43 %" not in public and "Iterations" not in public


@pytest.mark.parametrize("public", [True, False])
def test_the_iterations_of_a_private_run_are_shown(public):
    text = Visible(page(public=public, iterations=HISTORY)).text

    assert "counted with noise, are kept" in text and "43 %" in text
    assert "made from noisy counts and released texts: they cost nothing" in text


def test_a_run_without_ledger_batches_or_records_has_a_page():
    report = a_report(records=0, mechanisms=[], not_covered=[])
    del report["ledger"], report["batches"]

    text = Visible(render_report(report, [], None, {}, True)).text

    assert "No record was released." in text and "No private record was used." in text
    assert "Budget" not in text and "Batches" not in text


def test_files_of_another_version_are_refused_in_one_line():
    for name in ("fidelity", "lengths"):
        evaluation = an_evaluation() | {name: {"records": "secret"}}
        with pytest.raises(InputError, match=r"written by another version of dpray \(") as caught:
            render_report(a_report(), SAMPLES, evaluation, RUN, False)
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="another version"):
        render_report(a_report(ledger={"dataset": "notes"}), SAMPLES, None, RUN, True)


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
    assert private_path == run_dir / "private" / "privacy_report.html"
    public, private = (p.read_text(encoding="utf-8") for p in (path, private_path))
    assert "PRIVATE: not for release" in private and "0.812 ± 0.013" in private
    assert "PRIVATE" not in public and "0.812 ±" not in public
    for html in (public, private):
        assert html.index("note 0 of a") < html.index("note 0 of b") < html.index("note 1 of a")
        assert "note 4 of b" in html and "note 5 of a" not in html


def test_only_the_public_page_is_written_where_it_is_asked_for_or_nothing_was_measured(run_dir):
    path, private_page = run_dir / "privacy_report.html", run_dir / "private/privacy_report.html"
    assert write_report(run_dir, public=True) == (path, None)
    (run_dir / "private" / "evaluation.json").unlink()
    assert write_report(run_dir, public=False) == (path, None)
    assert path.exists() and not private_page.exists()


def test_the_command_says_where_the_pages_are(run_dir, capsys):
    report(run_dir, as_json=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"Written to {run_dir / 'privacy_report.html'}"
    assert str(run_dir / "private" / "privacy_report.html") in second and "PRIVATE" in second

    report(run_dir, public=True, as_json=True)
    found = {"path": str(run_dir / "privacy_report.html"), "private_path": None}
    assert json.loads(capsys.readouterr().out) == found


def test_a_folder_that_is_no_run_is_refused(run_dir, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        write_report(tmp_path / "missing", public=False)

    (run_dir / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json: not JSON"):
        write_report(run_dir, public=False)

    (run_dir / "privacy_report.json").unlink()
    with pytest.raises(InputError, match=r"cannot read privacy_report\.json"):
        write_report(run_dir, public=False)
    assert not (run_dir / "privacy_report.html").exists()


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def browse(path):
    """The page's DOM, the browser's log and its network log."""
    network_log = path.with_suffix(".net.json")
    # --no-sandbox: a container's root user has no sandbox to use.
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", f"--log-net-log={network_log}",
            f"--user-data-dir={path.with_suffix('.profile')}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr, network_log.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_renders_it_in_silence(run_dir):
    (run_dir / "synthetic.jsonl").write_text(json.dumps({"text": ATTACK, "label": "a"}) + "\n")
    _, path = write_report(run_dir, public=False)
    control = run_dir / "control.html"
    control.write_text("<script>console.error('heard')</script><img src=http://evil.example/x>")

    dom, log, network = browse(path)
    _, control_log, control_network = browse(control)

    assert "Privacy report: clinic-notes</title>" in dom
    assert "&lt;script&gt;document.title" in dom
    assert "CONSOLE" not in log and "CONSOLE" in control_log
    assert "evil.example" not in network and "evil.example" in control_network

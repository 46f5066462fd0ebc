"""The names that `import dpray` offers, frozen, and their use from a configuration to a release."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import dpray

NAMES = [
    "Budget", "BudgetRefused", "Config", "DprayError", "InputError", "Ledger", "Progress",
    "Resumable", "SyntheticData", "__version__", "audit", "check", "compare", "evaluate",
    "load", "plan", "preview", "progress_bar", "rehearse", "run",
]  # fmt: skip


def test_the_names_are_frozen() -> None:
    assert dpray.__all__ == NAMES
    assert set(NAMES) <= set(dir(dpray))
    for name in NAMES:
        assert getattr(dpray, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'launch'"):
        _ = dpray.launch


def test_an_import_brings_nothing_heavy() -> None:
    heavy = ["torch", "ray", "numpy", "scipy", "sqlalchemy", "pydantic", "rich"]
    code = f"import sys, dpray; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """DP-KPS without a language model: two classes of forty notes."""
    notes = [
        {"text": f"{word} in the morning", "label": label}
        for label, word in (("a", "cough"), ("b", "fever"))
        for _ in range(40)
    ]
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    (tmp_path / "words.txt").write_text("cough\nfever\nmorning\nnight\n")
    job = tmp_path / "job.yaml"
    job.write_text(
        f"""
data: {{path: {tmp_path}/notes.jsonl, label: label, labels: [a, b], public_size: 80}}
privacy: {{epsilon: 8, delta: 1e-6, ledger: "sqlite:///{tmp_path}/ledger.db", dataset: notes}}
method: {{name: dp_kps, vocabulary: {tmp_path}/words.txt, sequence_length: 2, records: 20}}
engine: {{kind: none}}
runtime: {{ray_address: none}}
output: {{path: {tmp_path}/run}}
"""
    )
    return job


def test_from_a_configuration_to_a_release(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dpray.load(job, "method.records=30")
    planned = dpray.plan(config)
    assert planned.cost.epsilon <= 8 and planned.summary()["records"] == 30
    shown: list[dpray.Progress] = []
    synthetic = dpray.run(config, on_progress=shown.append)
    stages = list(dict.fromkeys(progress.activity for progress in shown))
    assert stages == [
        "planning", "hashing files", "charging the budget", "vocabulary", "densities",
        "writing the release",
    ]  # fmt: skip
    assert len(synthetic.records) == synthetic.report["records"] == 30
    frame = synthetic.to_pandas()
    assert list(frame.columns) == ["text", "label", "terms"] and set(frame.label) == {"a", "b"}
    assert synthetic.report["epsilon"] == planned.cost.epsilon
    assert (synthetic.folder / "privacy_report.html").exists()
    account = dpray.Ledger.open(config.privacy.ledger).account("notes")
    assert account is not None and account.spent.epsilon == planned.cost.epsilon
    assert dpray.SyntheticData(synthetic.folder).records == synthetic.records
    assert dpray.run(config).report == synthetic.report, "a finished run is not made again"
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


def test_audit(job: Path) -> None:
    found = dpray.audit(dpray.load(job), trials=500)
    assert found["holds"] and len(found["mechanisms"]) == 3


def test_evaluate(job: Path) -> None:
    real = job.with_name("real.jsonl")
    rows = [{"text": f"note {n} of a cough", "label": "ab"[n % 2]} for n in range(40)]
    real.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(dpray.InputError, match="seed: there is no such key"):
        dpray.evaluate(real, real, seed=3)
    with pytest.raises(dpray.InputError, match="embedder: cannot load"):
        dpray.evaluate(real, real, embedder=str(job.with_name("none")))
    with pytest.raises(dpray.InputError, match="--train: "):
        dpray.evaluate(real, real, train=job.with_name("none.jsonl"))


def test_what_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(dpray.InputError, match=r"cannot read .*privacy_report\.json"):
        dpray.SyntheticData(tmp_path)


def test_without_the_package_of_hugging_face(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic = dpray.run(dpray.load(job))
    module: Any = None
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(dpray.InputError, match="needs the package `datasets`"):
        synthetic.to_datasets()


def test_an_error_shows_no_text_of_the_library_that_raised(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python prints an error together with its cause, whose message may quote a record."""
    from dpray.methods.dp_kps.release import VocabularyShard

    def load(shard: VocabularyShard, rows: Any) -> None:
        raise ValueError(f"cannot read {rows[0]['text']!r}")

    monkeypatch.setattr(VocabularyShard, "load", load)
    with pytest.raises(dpray.DprayError, match="the run stopped: ValueError") as caught:
        dpray.run(dpray.load(job))
    assert "in the morning" not in "".join(traceback.format_exception(caught.value))


def test_a_configuration_shows_no_password_of_its_ledger(job: Path) -> None:
    url = "postgresql://nurse:s3cret@host/ledger"
    config = dpray.load(job, f"privacy.ledger={url}")
    assert config.privacy.ledger == url
    assert "s3cret" not in f"{config!r} {config} {dpray.plan(config)!r}"

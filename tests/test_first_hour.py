"""A newcomer's first hour: a semicolon file in Windows' encoding, from `init` to `report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dpray
from dpray.cli import run_command

DEMO = Path(dpray.__file__).parent / "demo"


def export(folder: Path) -> None:
    """Write demo notes as a spreadsheet of a German Windows exports them."""
    with (DEMO / "data" / "private.jsonl").open(encoding="utf-8") as lines:
        notes = [json.loads(line) for line, _ in zip(lines, range(120), strict=False)]
    rows = [f'{note["label"]};"Größe 1,70; {note["text"][:150]}"' for note in notes]
    text = "\r\n".join(["Dringlichkeit;Notiz", *rows]) + "\r\n"
    (folder / "Notizen.csv").write_text(text, encoding="cp1252", newline="")


@pytest.mark.slow
def test_from_a_spreadsheet_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    export(tmp_path)
    options = "--text Notiz --label Dringlichkeit --labels Urgent,Routine --public-size 120"
    chosen = f"{options} --epsilon 8 --method private_prediction --model {DEMO}/model".split()

    # Without a look at the rows the encoding is not known, and `check` proposes it.
    assert run_command(["init", "Notizen.csv", *chosen]) == 0
    capsys.readouterr()
    assert run_command(["check", "Notizen.yaml", "engine.kind=transformers", "--json"]) == 2
    proposals = json.loads(capsys.readouterr().out)["proposals"]
    assert [f"{p['key']}={p['value']}" for p in proposals] == ["data.encoding=cp1252"]

    assert run_command(["init", "Notizen.csv", *chosen, "--look", "--force"]) == 0
    # Small, and in this process, so that a test can wait for it.
    keys = [
        "engine.kind=transformers", "engine.max_model_len=512", "runtime.ray_address=none",
        "method.batches=disjoint", "method.batch_size=20", "method.max_tokens=4",
        "method.max_records=2",
    ]  # fmt: skip
    for command in ("check", "plan", "run"):
        assert run_command([command, "Notizen.yaml", *keys]) == 0, capsys.readouterr().err
    assert run_command(["report", "out/Notizen"]) == 0
    out = capsys.readouterr().out
    assert "120 rows, 120 records" in out and "2 synthetic records" in out

    records = dpray.SyntheticData("out/Notizen").records
    assert len(records) == 2
    assert {record["label"] for record in records} <= {"Urgent", "Routine"}
    assert "Notizen" in (tmp_path / "out/Notizen/privacy_report.html").read_text(encoding="utf-8")
    # Everything but the notes and their configuration is where the configuration says.
    assert {path.name for path in tmp_path.iterdir()} == {
        "Notizen.csv", "Notizen.yaml", "ledger.db", "out",
    }  # fmt: skip

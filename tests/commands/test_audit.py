"""`dpray audit`: what it prints for people and programs, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.cli import run_command
from dpray.commands.audit import show_audit
from dpray.mechanisms.labels import LabelHistogram
from dpray.terminal import Terminal
from tests.evaluation.cases import noiseless

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MEASURED = {"data__label_proportions": "measured", "privacy__epsilon_labels": 2.0}


def test_findings_for_people_and_for_programs(
    config_file: Callable[..., str], records_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No data is there to be opened, and no ledger is made."""
    config = config_file(**MEASURED)
    records_file.unlink()
    out = records_file.with_name("new") / "audit.json"
    assert run_command(["audit", config, "--trials", "200", "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == result
    assert result["epsilon"] <= 50 and result["holds"] is True and result["confidence"] == 0.95
    names = [found["name"] for found in result["mechanisms"]]
    assert names[:2] == ["label histogram", "private token"]
    assert len(names) == 3 and names[2].endswith(" private tokens")
    for found in result["mechanisms"]:
        assert 0 <= found["lower_bound"] <= min(found["claimed"], found["most"])
        assert found["claimed"] <= result["epsilon"] and found["trials"] == 200
    assert run_command(["audit", config, "--trials", "200"]) == 0
    shown = capsys.readouterr().out
    assert "label histogram" in shown and "That is no proof" in shown
    assert "this number of trials" not in shown
    assert run_command(["audit", config, "privacy.epsilon_labels=10", "--trials", "200"]) == 0
    assert "note: label histogram: this number of trials" in capsys.readouterr().out
    assert not (records_file.parent / "ledger.db").exists()


def test_a_bound_above_its_claim_ends_with_a_red_line_and_code_1(
    config_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(**MEASURED)
    with noiseless(LabelHistogram)():
        assert run_command(["audit", config, "--trials", "400"]) == 1
        shown = capsys.readouterr().out
        assert "EXCEEDED: label histogram: eps is at least" in shown
        assert run_command(["audit", config, "--trials", "400", "--json"]) == 1
    found, *others = json.loads(capsys.readouterr().out)["mechanisms"]
    assert not found["holds"] and found["lower_bound"] > found["claimed"]
    assert all(other["holds"] for other in others)


def test_members_and_canaries_are_shown_as_not_private(capsys: pytest.CaptureFixture[str]) -> None:
    score = {"auc": 0.75, "auc_interval": [0.7, 0.8], "true_positive_rate": 0.05}
    result: dict[str, Any] = {
        "not_private": True,
        "membership": {
            "private": "not for release", "members": 100, "non_members": 120, "synthetic": 30,
            "confidence": 0.95, "scores": {"nearest_cosine": score},
        },
        "canaries": {
            "private": "not for release", "ledger": "nothing was charged",
            "secrets": [
                {"kind": "name", "repetitions": 10, "leaks": leaks, "rank": 2.0,
                 "candidates": 1001, "exposure": 9.0}
                for leaks in (0, 3)
            ],
        },
    }  # fmt: skip
    show_audit(result, Terminal())
    shown = capsys.readouterr().out
    assert shown.count("NOT PRIVATE") == 2 and "nothing was charged" in shown
    assert "nearest cosine" in shown and "0.750" in shown and "0.700 to 0.800" in shown
    assert "mean rank" in shown and "2.0" in shown and "9.0" in shown


def test_a_place_that_cannot_be_written_is_refused_before_anything_else(
    config_file: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file()
    for out in (tmp_path, tmp_path / "config.yaml" / "audit.json"):
        assert run_command(["audit", config, "--trials", "10", "--out", str(out)]) == 2
        assert f"dpray: --out: cannot write {out}" in capsys.readouterr().err


@pytest.mark.parametrize("attack", [["--members", "x.jsonl"], ["--canaries"]])
@pytest.mark.parametrize("place", ["", "model"])
def test_an_attack_on_private_records_is_not_written_where_a_run_releases(
    config_file: Callable[..., str],
    attack: list[str],
    place: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.json").write_text("{}")
    out = tmp_path / place / "audit.json"
    assert run_command(["audit", config_file(), *attack, "--out", str(out)]) == 2
    assert f"may not; give a folder such as {tmp_path / 'private'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trials", "10"], "trials: 10 prove nothing"),
        (["--confidence", "1"], "confidence: 1 is not at least 0.5 and below 1"),
        (["--members", "x.jsonl"], "members and non-members: give both, or neither"),
        (["--canaries", "--candidates", "0"], "candidates: 0"),
        (["--canaries", "--picture", "x.svg"], "--picture: needs --canaries and the model"),
    ],
)
def test_bad_options_end_with_one_line(
    config_file: Callable[..., str],
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["audit", config_file(), *arguments]) == 2
    assert f"dpray: {named}" in capsys.readouterr().err


def test_without_noise_there_is_no_claim(
    config_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(method={"name": "aug_pe", "records": 4, "iterations": 3})
    assert run_command(["audit", config, "privacy.epsilon=.inf"]) == 2
    assert (
        "privacy.epsilon: infinite epsilon claims nothing, so there is nothing to audit"
        in capsys.readouterr().err
    )
    arguments = ["--canaries", "--candidates", "0", "--confidence", "1.5"]
    assert run_command(["audit", config, "privacy.epsilon=.inf", *arguments]) == 2
    assert "confidence: 1.5 is not at least 0.5" in capsys.readouterr().err

"""A run prints at its end its cost, what is left, and the key to turn if the texts are cut,
alike or no words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpray.accounting.composition import Charge
from dpray.accounting.events import Gaussian
from dpray.cli import run_command
from dpray.commands.run import advice, show_run
from dpray.io.columns import cut_advice
from dpray.ledger.account import Account, new_account
from dpray.runs.privacy_report import parse_report
from dpray.terminal import Terminal
from dpray.types import Budget
from tests.report.reports import a_report

GOOD = [f"the {place} was clean and the staff helped us" for place in "abcdefghij"]

METHOD = {"name": "aug_pe"}


@pytest.mark.parametrize(
    ("texts", "cut", "key"),
    [
        (GOOD, 1, None),
        ([], 0, "no text was released"),
        (GOOD, 2, cut_advice(0.2, METHOD)),
        (GOOD[:6] + GOOD[:4], 0, "raise method.temperature"),
        (GOOD[:7] + [f"{n} 1.5 % (3)" for n in range(3)], 0, "lower method.temperature"),
        ([f"{word} हिन्दी में लिखा" for word in "कखगघचछजझटठ"], 0, None),
    ],
)
def test_the_key_to_turn(tmp_path: Path, texts: list[str], cut: int, key: str | None) -> None:
    rows = [
        {"text": text, "finish_reason": "length" if n < cut else "stop"}
        for n, text in enumerate(texts)
    ]
    (tmp_path / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = advice(tmp_path, METHOD)
    assert found is None if key is None else key in (found or "")


def test_records_that_do_not_say_how_they_ended_are_not_called_cut(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in GOOD)
    (tmp_path / "synthetic.jsonl").write_text(rows)
    assert advice(tmp_path, METHOD) is None


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ({"name": "private_prediction"}, "method.max_tokens: "),
        ({"name": "dp_sgd"}, "method.max_length: "),
        ({"name": "chain", "methods": [{"name": "dp_kps"}, {"name": "dp_sgd"}]},
         "methods.1.max_length: "),
    ],
)  # fmt: skip
def test_the_key_is_one_of_the_method(method: dict[str, object], key: str) -> None:
    assert (cut_advice(0.33, method) or "").startswith(f"33% of the texts reach {key}")


@pytest.fixture
def job(tmp_path: Path) -> str:
    """DP-KPS without a language model: two classes of forty notes."""
    rows = [{"text": f"{word} here", "label": word} for word in ("cough", "fever")] * 40
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.txt").write_text("cough\nfever\nmorning\nnight\n")
    job = tmp_path / "job.yaml"
    job.write_text(f"""
data: {{path: {tmp_path}/notes.jsonl, label: label, labels: [cough, fever], public_size: 80}}
privacy: {{epsilon: 8, delta: 1e-6, ledger: "sqlite:///{tmp_path}/ledger.db", dataset: notes}}
method: {{name: dp_kps, vocabulary: {tmp_path}/words.txt, sequence_length: 2, records: 20}}
engine: {{kind: none}}
runtime: {{ray_address: none}}
output: {{path: {tmp_path}/run}}
""")
    return str(job)


def test_a_finished_run_says_so_and_what_is_left_now(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed() -> str:
        assert run_command(["run", job]) == 0
        return capsys.readouterr().out

    first = printed()
    assert "A new ledger with a budget of epsilon 8 was made" in first
    assert "Finished before" not in first and "; left on 'notes': epsilon " in first
    raised = ["--ledger", f"sqlite:///{tmp_path}/ledger.db", "--dataset", "notes"]
    assert run_command(["ledger", "raise", *raised, "--epsilon", "16", "--reason", "more"]) == 0
    capsys.readouterr()
    again = printed()
    assert "Finished before: nothing was charged or made\n" in again and "A new" not in again
    assert "; left on 'notes': epsilon 8" in again
    (tmp_path / "ledger.db").unlink()
    unread = printed()
    assert "Spent: epsilon " in unread and "left on" not in unread
    assert not (tmp_path / "ledger.db").exists()


@pytest.mark.parametrize("without", [None, 0, 12])
def test_batches_without_a_text_are_counted(
    without: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = {"total": 32, "published": 31, "repeated": 2, "failed": 1, "without_text": without}
    show_run(parse_report(a_report(batches=batches)), Path("out"), Terminal())
    words = "31 of 32 batches (2 repeated, 12 without a text)" if without else "(2 repeated)"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("account", "spent"),
    [
        (new_account("notes", Budget(2.0, 1e-6), "record", "add_or_remove_one"), True),
        (new_account("notes", Budget(2.0, 2e-6), "record", "add_or_remove_one"), False),
        (new_account("notes", Budget(2.0, 1e-6), "record", "add_or_remove_one", "renyi", 8.0),
         False),
    ],
)  # fmt: skip
def test_a_delta_that_is_spent_allows_no_further_run(
    account: Account, spent: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    charge = Charge(Gaussian(8.0), Budget(1.0, 1e-6))
    account = replace(account, total=account.composition.total([charge]))
    spend = {"spent": {"epsilon": 1.0, "delta": 1e-6}}
    report = parse_report(a_report(ledger=a_report()["ledger"] | spend))
    show_run(report, Path("out"), Terminal(), account)
    words = "delta 0 (no delta is left, so a further run that needs delta is refused)\n"
    assert (words in capsys.readouterr().out) == spent

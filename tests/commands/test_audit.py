"""`dpray audit`: what it says of a plan, what it refuses, and its canaries on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dpray.accounting.ledger import Ledger
from dpray.audit import canaries
from dpray.audits import targets
from dpray.cli import run_command
from dpray.config.config import parse_config
from dpray.mechanisms.label_histogram import LabelHistogram
from dpray.registry import make_plan
from dpray.types import Budget, Resumable
from tests.audit.cases import noiseless
from tests.methods.aug_pe.test_release import BagOfWords

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

Settings = Callable[..., dict[str, Any]]

SGD = {
    "name": "dp_sgd", "epochs": 1, "batch_size": 10, "micro_batch_size": 8, "max_length": 24,
    "lora_rank": 2, "learning_rate": 0.01, "records": 6, "noise_multiplier": 0.8,
}  # fmt: skip
WORDS = {
    "name": "dp_kps", "vocabulary": "words.txt", "epsilon_vocabulary": 20.0,
    "epsilon_kde": 20.0, "records": 10, "sequence_length": 3,
}  # fmt: skip


MEASURED = {"data__label_proportions": "measured", "privacy__epsilon_labels": 2.0}


def test_findings_for_people_and_for_programs(
    config_file: Callable[..., str], records_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No data is there to be opened, and no ledger is made."""
    config = config_file(**MEASURED)
    records_file.unlink()
    out = records_file.with_name("audit.json")
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
    assert "so few trials" not in shown
    assert run_command(["audit", config, "privacy.epsilon_labels=10", "--trials", "200"]) == 0
    assert "note: label histogram (Monte Carlo): so few trials" in capsys.readouterr().out
    assert not (records_file.parent / "ledger.db").exists()


def test_a_bound_above_its_claim_ends_with_a_red_line_and_code_1(
    config_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(**MEASURED)
    with noiseless(LabelHistogram)():
        assert run_command(["audit", config, "--trials", "400"]) == 1
        shown = capsys.readouterr().out
        assert "EXCEEDED: label histogram (Monte Carlo): eps is at least" in shown
        assert run_command(["audit", config, "--trials", "400", "--json"]) == 1
    found, *others = json.loads(capsys.readouterr().out)["mechanisms"]
    assert not found["holds"] and found["lower_bound"] > found["claimed"]
    assert all(other["holds"] for other in others)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ({"name": "aug_pe", "records": 4, "iterations": 3},
         ["vote histogram", "vote histogram, 3 iterations"]),
        (WORDS, ["vocabulary histogram", "densities of a class"]),
        (WORDS | {"estimator": "rff", "features": 20, "bandwidth": 1.0},
         ["vocabulary histogram", "densities of a class"]),
        (SGD, ["DP-SGD, 6 steps", "DP-SGD, 6 steps"]),
    ],
)  # fmt: skip
def test_what_is_audited_is_what_the_plan_charges(
    settings: Settings,
    method: dict[str, Any],
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("cough\nfever\n")
    tree = settings() | {"method": method}
    plan = make_plan(parse_config(tree))
    found = list(targets(plan))
    assert [target.name for target in found] == names
    charged = plan.dp_event.terms()
    assert all(event in charged for target in found for event in target.event.terms())


def test_the_sparse_vector_is_audited_where_it_is_on(settings: Settings) -> None:
    tree = settings(method__sparse_vector={"threshold": 0.5, "noise": 0.4})
    found = list(targets(make_plan(parse_config(tree))))
    assert found[-1].name.startswith("sparse vector")
    assert found[-1].event.pure_epsilon() == pytest.approx(2 / 5 / 0.4)


def test_members_are_told_from_others_by_the_finished_run(
    config_file: Callable[..., str],
    settings: Settings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The release holds the members' texts."""
    files = {}
    for name, word in (("members", "in"), ("others", "out"), ("release", "in")):
        folder = tmp_path / ("out" if name == "release" else "records")
        folder.mkdir(exist_ok=True)
        files[name] = folder / ("synthetic.jsonl" if name == "release" else f"{name}.jsonl")
        rows = [{"text": f"{word} {i} {i * i} Marlowe b c d"} for i in range(100)]
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["audit", config_file(), "--trials", "200"]
    arguments += ["--members", str(files["members"]), "--non-members", str(files["others"])]
    with patch("dpray.engines.embedder.SentenceTransformerEmbedder", BagOfWords):
        assert run_command([*arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["membership"]
        assert run_command(arguments) == 0
    assert found["scores"]["nearest_cosine"]["auc"] == 1.0
    shown = capsys.readouterr().out
    assert "NOT PRIVATE" in shown and "Marlowe" not in shown
    # What is wrong is said before the draws.
    with patch("dpray.commands.audit._bounds", side_effect=AssertionError):
        assert run_command([*arguments, "embedder.model=/no/model"]) == 2
        assert "embedder.model: cannot load /no/model" in capsys.readouterr().err
        assert run_command([*arguments, "--members", "no.jsonl"]) == 2
        assert "--members: no such file" in capsys.readouterr().err
        files["others"].write_text('{"text": "one"}\n')
        assert run_command(arguments) == 2
        assert "non-members: too few records" in capsys.readouterr().err
        files["release"].unlink()
        assert run_command(arguments) == 2
        assert "output.path" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_the_draws(
    config_file: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file()
    with patch("dpray.commands.audit._bounds", side_effect=AssertionError):
        for out in (tmp_path, tmp_path / "config.yaml" / "audit.json"):
            assert run_command(["audit", config, "--out", str(out)]) == 2
            assert f"dpray: --out: cannot write {out}" in capsys.readouterr().err
    found = {"holds": True}
    with (
        patch("dpray.commands.audit._bounds", return_value=found),
        patch("dpray.commands.audit._show"),
    ):
        out = tmp_path / "new" / "audit.json"
        assert run_command(["audit", config, "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == found


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trials", "10"], "trials: 10 prove nothing"),
        (["--confidence", "1"], "confidence: 1 is not at least 0.5 and below 1"),
        (["--members", "x.jsonl"], "--members and --non-members: give both, or neither"),
        (["--canaries", "--candidates", "0"], "candidates: 0"),
    ],
)
def test_bad_options_end_with_one_line(
    config_file: Callable[..., str],
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--canaries" in arguments:
        arguments = [*arguments, "--trials", "200"]
    assert run_command(["audit", config_file(), *arguments]) == 2
    assert f"dpray: {named}" in capsys.readouterr().err


def test_without_noise_there_is_no_claim(
    config_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(method={k: v for k, v in SGD.items() if k != "noise_multiplier"})
    assert run_command(["audit", config, "privacy.epsilon=.inf"]) == 2
    assert "privacy.epsilon: is infinite, so nothing is claimed" in capsys.readouterr().err
    arguments = ["--canaries", "--candidates", "0", "--confidence", "1.5"]
    assert run_command(["audit", config, "privacy.epsilon=.inf", *arguments]) == 2
    assert "confidence: 1.5 is not at least 0.5" in capsys.readouterr().err


def test_canaries_of_a_fine_tuned_model_are_ranked_and_cost_nothing(
    config_file: Callable[..., str],
    settings: Settings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    privacy = settings()["privacy"]
    ledger = Ledger.create_or_open(privacy["ledger"])
    ledger.create_dataset("notes", Budget(100, 1e-3), "record", "add_or_remove_one")
    before = {path.name for path in tmp_path.iterdir()}
    config = config_file(method=SGD | {"records": 2, "epochs": 0.4})
    with patch.object(canaries, "REPETITIONS", (1, 3)):
        arguments = ["--canaries", "--candidates", "20", "--trials", "200", "--json"]
        assert run_command(["audit", config, *arguments]) == 0
    secrets = json.loads(capsys.readouterr().out)["canaries"]["secrets"]
    assert len(secrets) == 2 * len(canaries.KINDS)
    assert all(1 <= s["rank"] <= 21 and s["candidates"] == 21 for s in secrets)
    assert all(s["leaks"] == 0 for s in secrets)
    account = ledger.account("notes")
    assert account is not None and account.spent.epsilon == 0
    assert {path.name for path in tmp_path.iterdir()} == before | {"config.yaml"}


def test_canaries_of_a_run_that_does_not_finish_start_anew(
    config_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(method={k: v for k, v in SGD.items() if k != "noise_multiplier"})
    unfinished = Resumable("interrupted; the same command goes on from there")
    with patch("dpray.registry.run", side_effect=unfinished):
        assert run_command(["audit", config, "privacy.epsilon=.inf", "--canaries"]) == 1
    told = capsys.readouterr().err
    assert "starts anew" in told and "goes on" not in told


def test_a_secret_that_the_release_keeps_is_found(
    config_file: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """DP-KPS with a public vocabulary that holds the secrets, and far too little noise."""
    made = canaries.make_canaries

    def known(rng: Any) -> list[canaries.Canary]:
        found = [c for c in made(rng) if c.repetitions == 100 and c.kind.name == "name"]
        (tmp_path / "words.txt").write_text(found[0].secret + "\ncough\nfever\n")
        return found

    (tmp_path / "words.txt").write_text("cough\nfever\n")
    method = WORDS | {"vocabulary": str(tmp_path / "words.txt")}
    config = config_file(method=method, engine__kind="none")
    with patch("dpray.canaries.make_canaries", known):
        assert run_command(["audit", config, "--canaries", "--trials", "200", "--json"]) == 0
    (secret,) = json.loads(capsys.readouterr().out)["canaries"]["secrets"]
    assert secret["kind"] == "name" and secret["leaks"] > 0 and "rank" not in secret

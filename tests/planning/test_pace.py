"""How long a plan takes: the short runs that measure it, what is kept, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import dpray
from dpray.cli import run_command
from dpray.config.config import parse_config
from dpray.planning.compare import compare, with_paces
from dpray.planning.pace import Pace, bench, known_pace
from dpray.report.figures import duration
from dpray.types import DprayError, InputError, Progress

Settings = Callable[..., dict[str, Any]]

START, A_RECORD, A_TEXT = 20.0, 0.01, 1.5


class Runs:
    """Stands in for `dpray run`, and takes as long as it is told."""

    def __init__(self, a_record: float = A_RECORD) -> None:
        self.a_record = a_record
        self.trees: list[dict[str, Any]] = []

    def __call__(self, file: Path) -> tuple[float, float]:
        tree = yaml.safe_load(file.read_text())
        lines = Path(tree["data"]["path"]).read_text().splitlines()
        tree["rows"] = [json.loads(line) for line in lines]
        self.trees.append(tree)
        method = tree["methods"][-1] if "methods" in tree else tree["method"]
        texts = method.get("texts") or method.get("max_records") or method.get("records")
        # The first run takes longer, as it does where nothing is in memory yet.
        late = 30.0 if len(self.trees) == 1 else 0.0
        return late + START + self.a_record * len(tree["rows"]) + A_TEXT * texts, 0.5


@pytest.fixture
def public(tmp_path: Path) -> str:
    path = tmp_path / "public.jsonl"
    rows = [{"text": f"public {number}", "label": "ab"[number % 2]} for number in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text("cough\nfever\nmorning\n")
    return str(path)


PRIVATE_PREDICTION = {
    "name": "private_prediction",
    "batch_size": 5,
    "max_tokens": 4,
    "clip_bound": 1.0,
}
METHODS: dict[str, dict[str, Any]] = {
    "poisson": PRIVATE_PREDICTION | {"batches": "poisson"},
    "disjoint": PRIVATE_PREDICTION | {"batches": "disjoint"},
    "dp_kps": {"name": "dp_kps", "sequence_length": 2},
    "dp_sgd": {"name": "dp_sgd", "batch_size": 16, "max_length": 16},
    "aug_pe": {"name": "aug_pe", "iterations": 2},
}
METHODS["chain"] = {
    "name": "chain",
    "methods": [METHODS["dp_kps"] | {"records": 60}, METHODS["aug_pe"] | {"records": 20}],
}


@pytest.mark.parametrize("kind", METHODS)
def test_three_runs_tell_the_time_of_every_plan(
    settings: Settings, public: str, vocabulary: str, tmp_path: Path, kind: str
) -> None:
    method = deepcopy(METHODS[kind])
    for one in method.get("methods", [method]):
        if one["name"] == "dp_kps":
            one["vocabulary"] = vocabulary
    config = parse_config(settings(method=method, data__public_size=400))
    runs = Runs()
    pace = bench(config, public, run=runs, cache=tmp_path / "cache", records=100, texts=6)
    assert (pace.start, pace.per_record, pace.per_text) == pytest.approx((START, A_RECORD, A_TEXT))
    assert known_pace(config, tmp_path / "cache") == pace
    plan = dpray.plan(config)
    texts = plan.summary()["records"]
    assert pace.seconds(plan) == pytest.approx(START + 400 * A_RECORD + texts * A_TEXT)

    # Public records, drawn again where they do not suffice; a ledger of the runs' own.
    sizes = [(len(tree["rows"]), tree["data"]["public_size"]) for tree in runs.trees]
    assert sizes == [(50, 50), (100, 100), (100, 100), (50, 50)]
    assert pace.memory_gib == 0.5
    for tree in runs.trees:
        assert all(row["text"].startswith("public") for row in tree["rows"])
        assert str(tmp_path / "ledger.db") not in tree["privacy"]["ledger"]
        assert tree["output"]["path"] != config.output.path
        assert not Path(tree["output"]["path"]).exists()
        assert tree["engine"] | {"dtype": "float32"} == settings()["engine"] | {"dtype": "float32"}
    if kind == "chain":  # three sequences of terms for each text, as in the plan
        made = [[one["records"] for one in tree["methods"]] for tree in runs.trees]
        assert made == [[18, 6], [18, 6], [54, 18], [18, 6]]
    if kind == "disjoint":  # a text takes its part of as many private tokens as in the plan
        tokens = {tree["method"]["private_tokens"] for tree in runs.trees}
        assert tokens == {plan.private_tokens}  # type: ignore[attr-defined]


def test_all_methods_are_measured_as_they_would_be_chosen(
    settings: Settings, public: str, vocabulary: str, tmp_path: Path
) -> None:
    method = {"name": "auto", "records": 20, "dp_kps": {"vocabulary": vocabulary}}
    config = parse_config(settings(method=method, data__public_size=9000, privacy__epsilon=8.0))
    said: list[Progress] = []
    compared = compare(config, methods=("dp_kps", "aug_pe"), cache=tmp_path)
    assert all(answer.pace is None for answer in compared.answers.values())
    options = {"run": Runs(), "cache": tmp_path, "records": 100, "texts": 6}
    measured = with_paces(compared, public, said.append, **options).answers
    for name, answer in measured.items():
        pace = known_pace(parse_config(compared.tree(name)), tmp_path)
        assert pace is not None and answer.pace == pace
    assert {progress.stage for progress in said} == {"dp_kps: runs", "aug_pe: runs"}


@pytest.mark.slow
def test_the_command_measures_all_methods_where_none_is_chosen(
    settings: Settings,
    public: str,
    vocabulary: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a model only DP-KPS has a plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "config.yaml"
    method = {
        "name": "auto",
        "records": 20,
        "dp_kps": {"sequence_length": 2, "vocabulary": vocabulary},
    }
    path.write_text(yaml.safe_dump(settings(method=method, engine={"kind": "none"})))
    options = ["--public", public, "--records", "50", "--rate", "2", "--json"]
    assert run_command(["bench", str(path), *options]) == 0
    answers = json.loads(capsys.readouterr().out)["methods"]
    assert answers["dp_kps"]["time"]["price"] > 0 and not answers["aug_pe"]["feasible"]
    with pytest.raises(InputError, match="records: are for short runs"):
        dpray.compare(dpray.load(str(path)), records=50)


def test_what_chance_makes_negative_is_none() -> None:
    seconds = {(100, 4): 10.0, (100, 12): 9.0, (50, 4): 11.0}
    assert Pace.fitted(seconds, 1.0) == Pace(
        10.0, 0.0, 0.0, 1.0, Pace.fitted(seconds, 1.0).measured
    )


def test_another_method_model_or_cluster_was_not_measured(
    settings: Settings, public: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"

    def known(**changes: Any) -> bool:
        return known_pace(parse_config(settings(**changes)), cache) is not None

    assert not known()
    bench(parse_config(settings()), public, run=Runs(), cache=cache, records=60)
    assert known() and known(method__max_records=99, privacy__epsilon=8.0, data__public_size=999)
    for change in (
        {"method__batch_size": 6},
        {"engine__dtype": "bfloat16"},
        {"runtime__actors": 2},
        {"engine__model": "another"},
    ):
        assert not known(**change)
    (name,) = kept = json.loads((cache / "bench.json").read_text())
    for wrong in (
        kept | {name: 5},
        kept | {name: kept[name] | {"more": 1}},
        kept | {name: {"start": 1.0}},
        kept | {name: kept[name] | {"start": "a"}},
        kept | {name: kept[name] | {"per_text": float("nan")}},
        [kept],
    ):
        (cache / "bench.json").write_text(json.dumps(wrong))
        assert not known()
    (cache / "bench.json").write_text("{")
    assert not known()


def test_what_cannot_be_measured_is_said(
    settings: Settings, public: str, records_file: Path, tmp_path: Path
) -> None:
    def refused(message: str, file: str = public, **changes: Any) -> None:
        options = {name: changes.pop(name) for name in ("records", "texts") if name in changes}
        with pytest.raises(InputError, match=message) as wrong:
            bench(parse_config(settings(**changes)), file, run=Runs(), cache=tmp_path, **options)
        assert "Marlowe" not in str(wrong.value)

    refused("^--public: .* is data.path itself", str(records_file))
    refused("^--public: public.jsonl, row 1: the label is not one", data__labels=["c", "d"])
    refused("^--records, --texts: are too few", records=1)
    refused("^--records, --texts: are too few", texts=0)
    with open(tmp_path / "lists.jsonl", "w") as lists:
        lists.write('{"text": "a", "label": "a", "patient": [1]}\n')
    refused("row 1: column 'patient' holds no text and no number", lists.name, data__unit="patient")
    (tmp_path / "file").touch()
    refused("^output.path: cannot write", output__path=str(tmp_path / "file" / "a" / "b"))
    refused("^privacy.epsilon: infinity", method={"name": "aug_pe"}, privacy__epsilon=float("inf"))
    rare = METHODS["poisson"] | {"clip_bound": 5.0, "temperature": 1.0, "texts": 4}
    rare |= {"max_tokens": 100}
    refused(
        "^--records: a run of 30 has no plan: ", method=rare, data__public_size=10**8, records=60
    )


def test_a_run_that_fails_says_why(settings: Settings, public: str, tmp_path: Path) -> None:
    config = parse_config(settings(engine={"kind": "transformers", "model": f"{tmp_path}/none"}))
    with pytest.raises(InputError, match=r"engine\.model: no such folder"):
        bench(config, public, cache=tmp_path, records=60)

    def killed(file: Path) -> tuple[float, float]:
        raise DprayError("a run on public records was killed by signal 9")

    with pytest.raises(DprayError, match="killed by signal 9"):
        bench(parse_config(settings()), public, run=killed, cache=tmp_path, records=60)
    assert not list(tmp_path.glob("bench-*"))


@pytest.mark.slow
def test_a_request_to_end_leaves_nothing_behind(
    settings: Settings, public: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    # An endpoint that nobody is at: the run waits for it.
    engine = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1", "attempts": 50}
    path.write_text(yaml.safe_dump(settings(method=METHODS["aug_pe"], engine=engine)))
    command = [sys.executable, "-m", "dpray", "bench", str(path), "--public", public]
    started = subprocess.Popen(command, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)})
    process = psutil.Process(started.pid)
    deadline = time.monotonic() + 300
    while not (children := process.children()):
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.1)
    assert list(tmp_path.glob("bench-*"))
    started.terminate()
    assert started.wait(300) == 143
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not list(tmp_path.glob("bench-*"))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (5400, "90 minutes"),
     (9000, "2.5 hours"), (100_000, "28 hours"), (200_000, "2.3 days"), (2e6, "23 days")],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.slow
def test_the_command_line(
    settings: Settings,
    public: str,
    vocabulary: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "config.yaml"
    method = METHODS["dp_kps"] | {"vocabulary": vocabulary}
    path.write_text(yaml.safe_dump(settings(method=method, engine={"kind": "none"})))

    assert run_command(["plan", str(path), "--rate", "2"]) == 2
    assert "`dpray bench CONFIG --public FILE` measures it" in capsys.readouterr().err
    assert run_command(["bench", str(path), "--public", public, "--rate", "2", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["pace"]["start"] > 0.5 and 0.01 < measured["time"]["memory_gib"] < 20
    assert run_command(["plan", str(path), "--rate", "2", "--json"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    assert time == measured["time"] and time["price"] == pytest.approx(time["seconds"] / 1800)
    assert run_command(["plan", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "about" in said and "seconds; the largest process takes" in said
    # Nothing of the short runs is left, and the plan's own folder was not touched.
    assert sorted(each.name for each in tmp_path.iterdir() if "bench" in each.name) == []
    assert not (tmp_path / "out").exists()

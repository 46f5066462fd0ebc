"""Methods tried out on public records: what they are run on, how they are scored, what is said."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from sklearn.feature_extraction.text import HashingVectorizer

import dpray
from dpray.cli import run_command
from dpray.commands.rehearse import show_rehearsal
from dpray.config.config import Config
from dpray.evaluation.compare import Chosen
from dpray.evaluation.rehearse import (
    Rehearsal,
    Rehearsed,
    as_released,
    draw,
    on_stand_in,
    public_records,
    rehearse,
    write_stand_in,
)
from dpray.methods.config import parse_config
from dpray.report.page import render_rehearsal
from dpray.runs.plan import Choice, Signal
from dpray.terminal import Terminal
from dpray.types import InputError, OnProgress
from dpray.workers.rows import data_files, record_rows
from tests.report.browser import needs_browser, rendered_in_silence

WORDS = {"a": "cough fever throat sneeze", "b": "brake tyre engine road"}


class Hashed:
    """Hashed word counts of length 1."""

    def embed(self, texts: Sequence[str]) -> Any:
        counts = HashingVectorizer(n_features=64, alternate_sign=False).transform(texts)
        return np.asarray(counts.todense(), dtype=np.float32)


def text(label: str, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS[label].split(), k=6))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def public(tmp_path: Path) -> str:
    """120 public records of two classes that words tell apart."""
    rng = random.Random(2)
    rows = [{"text": f"{text('ab'[n % 2], rng)} {n}", "label": "ab"[n % 2]} for n in range(120)]
    return write(tmp_path / "public.jsonl", rows)


class Runs:
    """Stands in for `dpray.run`: a method's texts have as many right labels as it is told."""

    def __init__(self, right: dict[str, float]) -> None:
        self.right, self.configs = right, []
        self.stand_ins: list[list[dict[str, Any]]] = []

    def __call__(self, config: Config, on_progress: OnProgress) -> None:
        self.configs.append(config)
        self.stand_ins.append(read(config.data.path))
        rng, share = random.Random(3), self.right[config.method.name]
        rows = []
        for number in range(40):
            label = "ab"[number % 2]
            said = label if rng.random() < share else "ab"[1 - number % 2]
            rows.append({"text": text(label, rng), "label": said})
        folder = Path(config.output.path)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "synthetic.jsonl", rows)


@pytest.fixture
def tree(auto_settings: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    counts = {word: 100 for label in WORDS.values() for word in label.split()}
    return partial(auto_settings, counts, 60)


RIGHT = {"aug_pe": 0.6, "dp_sgd": 0.5, "private_prediction": 1.0, "dp_kps": 0.7}


def rehearsed(tree: dict[str, Any], public: str, out: Path, runs: Runs, **more: Any) -> Rehearsal:
    parts = {"run": runs, "load_embedder": lambda name: Hashed(), "out": out}
    return rehearse(parse_config(tree), public, **(parts | more))


@pytest.mark.slow
def test_the_best_method_on_the_twin_is_chosen(
    tree: Callable[..., dict[str, Any]], public: str, tmp_path: Path
) -> None:
    runs, out = Runs(RIGHT), tmp_path / "rehearsal"
    found = rehearsed(tree(), public, out, runs, records=20, methods=list(RIGHT))
    assert found.best(4.0) == "private_prediction"
    scores = {name: one.scores for name, one in found.found[4.0].items()}
    means = {name: score["accuracy"]["mean"] for name, score in scores.items() if score}
    assert means["private_prediction"] > 0.95 > means["dp_kps"] > means["dp_sgd"]
    assert found.real["accuracy"]["mean"] > 0.95

    # The stand-in: half of the public records, as many as the private data has, nearly equally
    # often.
    (stand_in,) = {json.dumps(rows) for rows in runs.stand_ins}
    drawn = Counter(row["text"] for row in json.loads(stand_in))
    assert drawn.total() == 4000 and max(drawn.values()) - min(drawn.values()) == 1
    assert len(drawn) + found.public["test_records"] == 120

    # The runs: the plans' noise, fewer texts but for Aug-PE, and nothing of the private run's.
    for config in runs.configs:
        name, settings = config.method.name, config.method
        plan = found.found[4.0][name].answer.choice
        assert plan is not None
        key = "max_records" if name == "private_prediction" else "records"
        assert getattr(settings, key) == (60 if name == "aug_pe" else 20)
        given = {key: 20} if name != "aug_pe" else {}
        assert settings.model_dump() == plan.plan.settings.model_dump() | given
        assert config.privacy.epsilon == 4.0 and config.data.public_size == 4000
        for place in (config.privacy.ledger, config.data.path, config.output.path):
            assert str(out) in place

    # What is written for the private records has all texts, and the private paths.
    made = found.tree(4.0)
    assert made["method"]["name"] == "private_prediction"
    assert made["method"]["max_records"] == 60
    assert {key: made[key] for key in ("data", "output", "engine")} == {
        key: tree()[key] for key in ("data", "output", "engine")
    }
    parse_config(made)


def test_methods_below_their_noise_are_left_out(
    tree: Callable[..., dict[str, Any]], public: str, tmp_path: Path
) -> None:
    """At so small an epsilon DP-KPS is not above it, and the others want a language model."""
    runs = Runs(RIGHT)
    found = rehearsed(
        tree(engine={"kind": "none"}), public, tmp_path / "out", runs, epsilons=[0.001]
    )
    assert runs.configs == [] and found.best(0.001) is None
    for one in found.found[0.001].values():
        assert one.scores is None and one.why_not
    with pytest.raises(InputError, match=r"^privacy\.epsilon: at 0\.001 no method was rehearsed"):
        found.tree(0.001)
    page = render_rehearsal(found.summary())
    assert "<svg" not in page and "its signal does not stand above its noise" in page


@pytest.mark.slow
def test_a_method_whose_run_is_refused_leaves_the_others_their_turn(
    tree: Callable[..., dict[str, Any]], public: str, tmp_path: Path
) -> None:
    runs = Runs(RIGHT)

    def run(config: Config, on_progress: OnProgress) -> None:
        if config.method.name == "aug_pe":
            raise InputError("engine.kv_cache_gib: raise it")
        runs(config, on_progress)

    tried = ["aug_pe", "dp_kps"]
    found = rehearsed(tree(), public, tmp_path / "out", runs, run=run, methods=tried)
    refused = found.found[4.0]["aug_pe"]
    assert (refused.scores, refused.why_not) == (None, "engine.kv_cache_gib: raise it")
    assert found.best(4.0) == "dp_kps"


def scored(measure: str, mean: float, deviation: float = 0.1, signal: float = 2.0) -> Rehearsed:
    """A method with this score, whose signal is enough from 1 on."""
    choice = Choice(cast("Any", None), Signal(signal, 1.0, "signal"), ())
    score = {"mean": mean if measure == "accuracy" else -mean, "deviation": deviation}
    return Rehearsed(Chosen(choice), {"records": 60, measure: score})


@pytest.mark.parametrize("measure", ["accuracy", "frechet_distance"])
def test_a_method_below_its_noise_has_to_be_better_by_a_deviation(measure: str) -> None:
    enough, better = scored(measure, 0.3), scored(measure, 0.4)
    below, above = (scored(measure, mean, signal=0.5) for mean in (0.49, 0.51))
    found = {
        1.0: {"dp_kps": below},
        2.0: {"dp_kps": below, "aug_pe": enough, "dp_sgd": better},
        4.0: {"dp_kps": above, "aug_pe": enough, "dp_sgd": better},
    }
    rehearsal = Rehearsal(cast("Any", None), {}, measure, {}, found)
    assert [rehearsal.best(epsilon) for epsilon in found] == ["dp_kps", "dp_sgd", "dp_kps"]


@pytest.mark.parametrize("measure", ["accuracy", "frechet_distance"])
def test_what_chance_may_have_put_behind_the_best_is_named(
    measure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deviations of 0.03 and 0.04 make one of 0.05 of the difference."""
    best = scored(measure, 0.5, 0.03)
    near, far = (scored(measure, mean, 0.04) for mean in (0.451, 0.449))
    above_by_chance = scored(measure, 0.53, 0.04, signal=0.5)
    refused = Rehearsed(Chosen(None), why_not="no model")
    found = {
        1.0: {"aug_pe": best, "dp_sgd": far, "dp_kps": refused},
        2.0: {"aug_pe": near, "dp_sgd": best, "private_prediction": far},
        4.0: {"aug_pe": best, "dp_kps": above_by_chance},
        8.0: {"dp_kps": refused},
    }
    public = {"records": 100, "drawn": 200, "test_records": 90}
    rehearsal = Rehearsal(cast("Any", None), public, measure, best.scores or {}, found)
    chosen = [(rehearsal.best(epsilon), rehearsal.as_good(epsilon)) for epsilon in found]
    assert chosen == [("aug_pe", []), ("dp_sgd", ["aug_pe"]), ("aug_pe", ["dp_kps"]), (None, [])]
    show_rehearsal(rehearsal, Terminal())
    assert "dp_sgd; within chance of it: aug_pe" in " ".join(capsys.readouterr().out.split())


def test_units_are_drawn_whole_and_anew(
    tree: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    rng = random.Random(4)
    rows = [{"text": f"{text('a', rng)} {n}", "patient": f"p{n // 3}"} for n in range(150)]
    data = {
        "path": "/nowhere/x.jsonl",
        "unit": "patient",
        "max_records_per_unit": 3,
        "public_size": 1000,
    }
    method = {"name": "aug_pe", "records": 20, "iterations": 2, "variations": 2}
    asked, runs = tree(data=data, method=method), Runs(RIGHT)
    file = write(tmp_path / "patients.jsonl", rows)
    found = rehearsed(asked, file, tmp_path / "out", runs, methods=["aug_pe"])
    assert found.score == "frechet_distance" and found.best(4.0) == "aug_pe"
    (stand_in,) = runs.stand_ins[:1]
    assert 1000 <= len(stand_in) < 1003
    assert max(Counter(row["patient"] for row in stand_in).values()) <= 3


def test_bad_public_records_are_errors(
    tree: Callable[..., dict[str, Any]], public: str, tmp_path: Path
) -> None:
    runs = Runs(RIGHT)

    def error(match: str, asked: dict[str, Any], file: str, **more: Any) -> None:
        with pytest.raises(InputError, match=match):
            rehearsed(asked, file, tmp_path / "out", runs, **more)

    error("^--public: .* is data.path", tree(data__path=public), public)
    error("^--public: .* is data.path", tree(data__path=f"{tmp_path}/*.jsonl"), public)
    rows = read(public)
    few = write(tmp_path / "few.jsonl", rows[:30])
    error("^--public: 30 records are too few", tree(), few)
    odd = write(tmp_path / "odd.jsonl", [*rows, {"text": "Marlowe", "label": "Marlowe"}])
    error(r"^--public: odd\.jsonl, row 121: the label is not one of data\.labels$", tree(), odd)
    bare = write(tmp_path / "bare.jsonl", [*rows, {"text": "Marlowe"}])
    error(r"^--public: bare\.jsonl, row 121: no column 'label'", tree(), bare)
    error("^--public: no such file", tree(), "/nowhere/public.jsonl")
    error("^--epsilon: 0 is not above 0", tree(), public, epsilons=[0.0])
    error("^--records: 3 are too few", tree(), public, records=3)
    error("^--method: pe is not one of aug_pe, ", tree(), public, methods=["pe"])
    assert runs.configs == []


@pytest.mark.slow
def test_real_runs_are_scored_written_and_gone_on_with(
    tree: Callable[..., dict[str, Any]],
    public: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DP-KPS without a language model: the others want one, and say so."""
    words = tree()["method"]["dp_kps"]
    method = {"name": "auto", "records": 60, "dp_kps": words | {"vocabulary_size": 8}}
    asked = tree(method=method, engine={"kind": "none"}, data__public_size=400)
    out = tmp_path / "rehearsal"

    def again() -> Rehearsal:
        return dpray.rehearse(
            parse_config(asked), public, out, epsilons=[2.0, 8.0], methods=["aug_pe", "dp_kps"],
            load_embedder=lambda name: Hashed(),
        )  # fmt: skip

    found = again()
    assert found.best(8.0) == "dp_kps"
    for methods in found.found.values():
        assert [one.scores is None for one in methods.values()] == [True, False]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("synthetic.jsonl")}
    assert len(before) == 2
    assert again().summary() == found.summary() == json.loads((out / "rehearsal.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not (tmp_path / "ledger.db").exists(), "the ledger of the private data is not touched"

    page = (out / "rehearsal.html").read_text()
    assert page.count("<figure") == 1 and "best" in page

    file = tmp_path / "auto.yaml"
    file.write_text(yaml.safe_dump(asked))
    assert run_command(["rehearse", str(file), "--public", str(file)]) == 2
    assert "a kind of file that is not read (.yaml)" in capsys.readouterr().err
    assert run_command(["rehearse", str(file), "--public", public, "--method", "pe"]) == 2
    assert "--method: pe is not one of aug_pe, " in capsys.readouterr().err


@needs_browser
@pytest.mark.slow
def test_the_page_needs_no_network_and_no_script(
    tree: Callable[..., dict[str, Any]], public: str, tmp_path: Path
) -> None:
    tried = {"epsilons": [2.0, 8.0], "methods": ["aug_pe", "dp_kps"]}
    found = rehearsed(tree(), public, tmp_path / "out", Runs(RIGHT), **tried)
    page = tmp_path / "rehearsal.html"
    summary = found.summary()
    summary["epsilons"][0] |= {"best": "dp_kps", "as_good": ["aug_pe"]}
    page.write_text(render_rehearsal(summary))
    dom = rendered_in_silence(page)
    assert "real records" in dom and dom.count("<figure") == 1
    assert dom.count("<td>best</td>") == 2 and "<td>within chance of the best</td>" in dom


Settings = Callable[..., dict[str, Any]]
KEYS = {"data__labels": [0, True], "data__encoding": "cp1252"}


def test_a_twin_is_read_as_the_data_would_be(settings: Settings, tmp_path: Path) -> None:
    """CSV has no types. The stand_in is JSON in UTF-8 with the types of data.labels."""
    public = tmp_path / "public.csv"
    public.write_text("text;label;who\nKäse;0;x\n;0;y\nBrot;true;y\n")
    config = parse_config(settings(**KEYS, data__unit="who", data__max_records_per_unit=1))
    found = list(public_records(config, str(public)))
    assert [text for text, _ in found] == ["Käse", "Brot"]
    rows = [row for _, row in found]
    assert as_released(config, rows) == [
        {"text": "Käse", "label": 0},
        {"text": "Brot", "label": True},
    ]
    stand_in = write_stand_in(draw(rows, 3, "who"), tmp_path / "stand_in")
    tree = on_stand_in(config, config.model_dump(mode="json")["method"], stand_in, tmp_path / "run")
    data = parse_config(tree).data
    records = [record for part in data_files(data) for record in record_rows(part, data)]
    assert sorted({record["text"] for record in records}) == ["Brot", "Käse"]
    assert {record["label"] for record in records} == {"0", "true"}


def test_nested_and_several_columns(settings: Settings, tmp_path: Path) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text('{"note": {"title": "x", "body": "y"}, "label": "a"}\n')
    for text, made in (("note.body", "y"), (["note.title", "note.body"], None)):
        config = parse_config(settings(data__text=text))
        [(found, row)] = public_records(config, str(public))
        [released] = as_released(config, [row])
        assert released["text"] == found == (made or '{"note.title": "x", "note.body": "y"}')


def test_a_label_that_is_not_configured(settings: Settings, tmp_path: Path) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text(json.dumps({"text": "x", "label": "0"}) + "\n")
    config = parse_config(settings(**KEYS))
    with pytest.raises(InputError, match=r"^--public: public.jsonl, row 1: the label is a text"):
        list(public_records(config, str(public)))

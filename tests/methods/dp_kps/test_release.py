"""DP-KPS runs in this process: what is charged, released and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import dpray
from dpray.config.config import Config
from dpray.engines.base import Completion, EngineError
from dpray.ledger.ledger import Ledger
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.methods.dp_kps import release as dp_kps_run
from dpray.methods.dp_kps.mechanisms import GRID
from dpray.types import Budget, InputError, Progress, Resumable
from dpray.workers.shards import ROWS_AT_ONCE
from tests.engines.schemas import VISIT
from tests.workers.outcomes import lines

WORDS = ["fever", "cough", "rash", "itch", "sleep", "chest pain", "pain"]
TEXTS = {"a": "a fever and a cough, chest pain too", "b": "the rash and the itch, no sleep"}


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Config]:
    """400 records of two classes, whose words do not overlap; Marlowe is in every text."""
    vocabulary, data = tmp_path / "words.txt", tmp_path / "kps.jsonl"
    vocabulary.write_text("\n".join([*WORDS, *(f"unseen{i}" for i in range(20))]) + "\n")
    rows = [{"text": f"Marlowe has {TEXTS[c]}", "label": c} for c in "ab" for _ in range(200)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    tree = {
        "data__path": str(data), "data__public_size": 400, "privacy__epsilon": 10.0,
        "engine": {"kind": "none"},
        "method": {
            "name": "dp_kps", "vocabulary": str(vocabulary), "vocabulary_size": 7,
            "phrases_per_record": 4, "sequence_length": 3, "records": 40, "stop_words": "keep",
        },
    }  # fmt: skip
    return lambda **changes: parse_config(settings(**tree | changes))


class Echo:
    """A model that writes the prompt's end, and nothing the first time it sees the word fever."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def generate(self, prompts: Any, sampling: Any, on_completion: Any) -> list[Completion]:
        made = []
        for number, prompt in enumerate(prompts):
            text = prompt.user.rsplit(": ", 1)[1]
            if "fever" in text and prompt.user not in self.prompts:
                text = ""
            self.prompts.append(prompt.user)
            made.append(Completion(text, 5, 3))
            on_completion(number, made[-1])
        return made

    def close(self) -> None: ...


def test_sequences_say_what_their_class_says(config: Callable[..., Config]) -> None:
    run = config()
    report = methods.run(run)
    assert (report["epsilon"], report["delta"]) == (
        pytest.approx(10.0, rel=1e-4),
        run.privacy.delta,
    )
    assert report["method"]["noise_factor"] < 1
    records = lines(run)
    assert len(records) == report["records"] == 40
    mine = {"a": {"fever", "cough", "chest pain"}, "b": {"rash", "itch", "sleep"}}
    right = [term in mine[r["label"]] for r in records for term in r["terms"]]
    assert np.mean(right) > 0.9
    assert "calls" not in report and report["llm_calls"] == 0


class Forgetful(Echo):
    """A model that leaves out the last term: of its first prompt after the trial always, of others
    when it is asked for the first time."""

    def generate(self, prompts: Any, sampling: Any, on_completion: Any) -> list[Completion]:
        made = []
        for number, prompt in enumerate(prompts):
            terms = prompt.user.rsplit(": ", 1)[1].split(", ")
            again = prompt.user in self.prompts[2:] and prompt.user != self.prompts[1]
            self.prompts.append(prompt.user)
            made.append(Completion(" ".join(terms if again else terms[:-1]), 5, 3))
            on_completion(number, made[-1])
        return made


def test_a_text_that_lacks_terms_is_asked_for_again_and_then_left_out(
    config: Callable[..., Config],
) -> None:
    run = config(engine={"kind": "openai", "model": "m"}, method__least_terms=3)
    model = Forgetful()
    methods.run(run, build=lambda section: model)
    records = lines(run)
    assert 0 < len(records) < 40
    for record in records:
        assert record["text"] == " ".join(record["terms"])
        assert not model.prompts[1].endswith(", ".join(record["terms"]))
    with pytest.raises(InputError, match="least_terms: more than sequence_length"):
        config(method__least_terms=4)


def test_one_charge_pays_for_both_passes(config: Callable[..., Config]) -> None:
    run = config(
        method__epsilon_vocabulary=2.0, method__epsilon_kde=5.0, privacy__delta=1e-6,
        data__label_proportions="measured", privacy__epsilon_labels=0.5,
    )  # fmt: skip
    report = methods.run(run)
    ledger = Ledger.open(run.privacy.ledger)
    account = ledger.account("notes")
    assert account is not None and len(account.charges) == 1
    assert account.spent == Budget(report["epsilon"], 1e-6)
    assert report["epsilon"] == pytest.approx(7.5, rel=1e-5)
    assert report["accountant"]["bound"] == "pld"
    published = [unit for unit, _ in ledger.published(report["ledger"]["reservation"])]
    assert sorted(published) == ["density", "labels", "vocabulary"]
    assert ledger.verify() == []
    ledger.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "rff", "features": 50, "noise": "gaussian"},
        {"estimator": "rff", "features": 50, "sampling": "iterative", "ensemble": "linear"},
        {"estimator": "rff", "features": 50, "sampling": "iterative"},
    ],
)
def test_every_estimator_runs(
    config: Callable[..., Config], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors_ND = np.eye(8, dtype=np.float32)
    vectors_ND[[2, 5]] = 0.0  # an embedder has these for what it cannot embed
    embedded_ND = np.concatenate([vectors_ND[:3], vectors_ND])  # three public texts come first
    monkeypatch.setattr(
        dp_kps_run, "embedder", lambda session: lambda texts: embedded_ND[: len(texts)]
    )
    run = config(**{f"method__{key}": value for key, value in changes.items()})
    report = methods.run(run)
    gaussian = changes.get("noise") == "gaussian"
    assert 9.99 < report["epsilon"] <= 10.0
    assert report["noise_source"] == INTEGER_NOISE_SOURCE
    kind = "gaussian" if gaussian else "discrete_laplace"
    assert [m["name"] for m in report["mechanisms"]].count(kind) == (1 if gaussian else 2)
    density = Path(run.output.path, "private", "parts", "density.json")
    steps = np.array(json.loads(density.read_text())["sums"]["a"]) * GRID
    assert (steps == np.rint(steps)).all() and np.abs(steps).max() > 0
    assert len(lines(run)) == 40


def test_texts_are_asked_for_once_and_empty_ones_again(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    model = Echo()
    run = config(engine__kind="openai", engine__model="m", method__document_type="note")
    report = methods.run(run, build=lambda section: model)
    records = lines(run)
    assert len(records) == 40 and all(
        r["text"] == ", ".join(dict.fromkeys(r["terms"])) for r in records
    )
    assert all(prompt.startswith("Write a note that contains") for prompt in model.prompts)
    assert report["calls"]["calls"] == len(model.prompts) - 2 > 40  # two tried the model
    assert not any("Marlowe" in prompt for prompt in model.prompts)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name not in ("records.jsonl", "kps.jsonl"):
            assert b"Marlowe" not in path.read_bytes(), path.name


def test_an_interrupted_run_draws_no_noise_twice(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []
    count, sums = dp_kps_run.total_counts, dp_kps_run.total_sums

    def counted(shards: Any) -> Any:
        passes.append("vocabulary")
        return count(shards)

    def summed(shards: Any) -> Any:
        passes.append("density")
        if passes.count("density") == 1:
            raise KeyboardInterrupt
        return sums(shards)

    monkeypatch.setattr(dp_kps_run, "total_counts", counted)
    monkeypatch.setattr(dp_kps_run, "total_sums", summed)
    run = config()
    with pytest.raises(Resumable):
        methods.run(run)
    report = methods.run(run)
    assert passes == ["vocabulary", "density", "density"]
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        account = ledger.account("notes")
        assert account is not None and account.spent.epsilon == pytest.approx(report["epsilon"])


def test_a_public_vocabulary_that_shrank_meanwhile_does_not_end_a_run(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file is refused where its digest is known. Where it is not, as on a machine without
    the file, the terms of the densities are still those that were published: records with a term
    beyond it would stop the run."""

    def stop(progress: Progress) -> None:
        if progress.activity == "densities":
            raise RuntimeError

    with pytest.raises(Resumable):
        methods.run(config(), stop)
    (tmp_path / "words.txt").write_text("fever\n")
    with pytest.raises(InputError, match=r"other files of method\.vocabulary"):
        methods.run(config())
    monkeypatch.setattr("dpray.runs.runner.changed_files", lambda before, now: [])
    assert methods.run(config())["records"] == 40
    assert len({term for record in lines(config()) for term in record["terms"]}) > 1


def test_a_bad_row_is_found_before_a_pass_begins_and_can_be_mended(
    config: Callable[..., Config],
) -> None:
    run = config()
    data = Path(run.data.path)
    good = data.read_text()
    data.write_text(good + json.dumps({"text": "Marlowe", "label": "c"}) + "\n")
    with pytest.raises(InputError, match=r"row 401: the label is not one of"):
        methods.run(run)
    data.write_text(good)
    assert methods.run(run)["records"] == 40


def test_an_embedder_that_is_not_there_is_found_before_a_pass_begins(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rff = {"method__estimator": "rff", "method__features": 20}
    with pytest.raises(InputError, match=r"embedder\.model.*nothing was charged"):
        methods.run(config(**rff, embedder={"model": str(tmp_path / "none")}))
    monkeypatch.setattr(
        dp_kps_run, "embedder", lambda session: lambda terms: np.eye(8)[: len(terms)]
    )
    assert methods.run(config(**rff))["records"] == 40


class Down(Echo):
    """An endpoint that is gone once it was tried."""

    def generate(self, prompts: Any, *more: Any) -> list[Completion]:
        if len(prompts) > 1:
            raise EngineError("no connection")
        return super().generate(prompts, *more)


class Empty(Echo):
    """A model that thinks, and is cut off by its longest answer, once it was tried."""

    def generate(self, prompts: Any, sampling: Any, on_completion: Any) -> list[Completion]:
        if len(prompts) == 1:
            return super().generate(prompts, sampling, on_completion)
        thought = Completion("<think>So many words", 5, 3, "length")
        for number, _ in enumerate(prompts):
            on_completion(number, thought)
        return [thought] * len(prompts)


TEXTS_OF = {"engine__kind": "openai", "engine__model": "m", "method__document_type": "note"}


def test_what_shapes_only_the_calls_may_change_once_all_is_measured(
    config: Callable[..., Config],
) -> None:
    with pytest.raises(Resumable, match=r"no connection; the run is charged"):
        methods.run(config(**TEXTS_OF), build=lambda section: Down())
    for fixed in ({"method__temperature": 0.5}, {"method__records": 9}):
        with pytest.raises(InputError, match=r"another configuration \(other now: method\.\w+\)"):
            methods.run(config(**TEXTS_OF, **fixed))
    others = {
        "engine__base_url": "http://localhost:8001/v1", "engine__max_in_flight": 2,
        "engine__model": "n", "method__generation_temperature": 0.5,
        "method__document_type": "letter",
    }  # fmt: skip
    model, run = Echo(), config(**TEXTS_OF | others)
    report = methods.run(run, build=lambda section: model)
    assert report["records"] == 40 and model.prompts[0].startswith("Write a letter")
    changed = "engine.model, method.document_type, method.generation_temperature"
    assert report["sampling"]["changed_during_the_run"].startswith(f"{changed}: ")
    assert report["public_inputs"]["model"] == "n"
    released = json.loads((Path(run.output.path) / "run.json").read_text())["config"]
    assert released["engine"]["model"] == "n" and "base_url" not in released["engine"]
    assert released["method"]["generation_temperature"] == 0.5
    with pytest.raises(InputError, match="another configuration"):
        methods.run(config(**TEXTS_OF))  # a run that is finished is what it was
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        assert len(ledger.account("notes").charges) == 1  # type: ignore[union-attr]


def test_before_all_is_measured_the_engine_may_not_change(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(shards: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dp_kps_run, "total_sums", stop)
        with pytest.raises(Resumable):
            methods.run(config(**TEXTS_OF), build=lambda section: Echo())
    with pytest.raises(InputError, match=r"other now: engine\.model"):
        methods.run(config(**TEXTS_OF | {"engine__model": "n"}))


def test_a_model_that_writes_nothing_stops_the_run_and_another_one_goes_on(
    config: Callable[..., Config],
) -> None:
    """The budget would be spent on no record. What was empty is asked for again."""
    run = config(**TEXTS_OF, method__records=3)
    why = r"9 empty answers in a row \(finish_reason length\).*the run is charged"
    with pytest.raises(Resumable, match=why):
        methods.run(run, build=lambda section: Empty())
    assert not (Path(run.output.path) / "synthetic.jsonl").exists()
    assert methods.run(run, build=lambda section: Echo())["records"] == 3


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (Completion("<think>", 5, 3), Resumable, r"^engine\.model: 3 empty answers in a row: "),
        (EngineError("m: HTTP status 401"), InputError, r"^engine: m: HTTP status 401"),
    ],
)
def test_an_endpoint_is_tried_before_the_charge(
    config: Callable[..., Config], answer: Any, error: type[Exception], words: str
) -> None:
    class Tried(Echo):
        def generate(self, prompts: Any, sampling: Any, on_completion: Any) -> list[Completion]:
            assert len(prompts) == 1 and sampling[0].temperature == 0.25
            if isinstance(answer, Exception):
                raise answer
            return [answer]

    run = config(**TEXTS_OF, method__generation_temperature=0.25)
    with pytest.raises(error, match=rf"{words}.*nothing was charged"):
        methods.run(run, build=lambda section: Tried())
    assert not Path(run.privacy.ledger.removeprefix("sqlite:///")).exists()


def test_the_progress_says_nothing_of_how_many_records_there_are(
    config: Callable[..., Config],
) -> None:
    data = Path(config().data.path)
    row = data.read_text().splitlines()[0]
    shown = []
    for name, number in (("few", ROWS_AT_ONCE), ("more", ROWS_AT_ONCE + 1)):
        data.write_text(f"{row}\n" * number)
        steps: list[Any] = []
        ledger = f"sqlite:///{data.parent}/{name}.db"
        methods.run(
            config(output__path=str(data.parent / name), privacy__ledger=ledger), steps.append
        )
        shown.append(steps)
    assert shown[0] == shown[1]
    read = [step for step in shown[0] if step.activity in ("vocabulary", "densities")]
    assert [(step.activity, step.total) for step in read] == [
        ("vocabulary", None), ("densities", None),
    ]  # fmt: skip


def test_texts_have_the_form_of_the_schema(
    config: Callable[..., Config], model_folder: str
) -> None:
    method = config().method.model_dump(exclude_unset=True) | {
        "records": 4, "max_tokens": 160, "schema": VISIT,
    }  # fmt: skip
    release = dpray.run(
        config(engine={"kind": "transformers", "model": model_folder}, method=method)
    )
    assert len(release.records) == 4
    for record in release.records:
        jsonschema.validate(json.loads(record["text"]), VISIT)


def test_an_endpoint_cannot_be_held_to_a_schema(config: Callable[..., Config]) -> None:
    method = config().method.model_dump(exclude_unset=True) | {"schema": VISIT}
    engine = {"kind": "openai", "model": "m", "base_url": "http://localhost:1/v1"}
    with pytest.raises(InputError, match=r"^method\.schema: is for engine.kind vllm"):
        methods.make_plan(config(engine=engine, method=method))

"""Small real runs of every method: each sentence of the page is true of the run, and no released
file names a place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import mlcroissant
import pytest

from dpray.config.config import Config, EngineConfig
from dpray.engines.transformers import TransformersEngine
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.report.card import CROISSANT, released_files, write_card
from dpray.report.page import write_report
from dpray.runs.released import model_name
from dpray.types import Progress
from dpray.workers import shards
from tests.engines.kept import Kept
from tests.methods.aug_pe.test_release import BagOfWords
from tests.report.test_page import Visible

Make = Callable[..., Config]

PLAIN = {"name": "private_prediction", "batch_size": 5, "max_tokens": 4, "clip_bound": 1.0}
DISJOINT_BATCHES = PLAIN | {"batches": "disjoint", "max_records": 8}
METHODS: dict[str, list[dict[str, Any]]] = {
    "poisson": [PLAIN | {"batches": "poisson", "texts": 4}],
    "gate": [DISJOINT_BATCHES | {"public_gate": {"probability": 0.5}}],
    "sparse_vector": [DISJOINT_BATCHES | {"sparse_vector": {"threshold": 0.5, "noise": 0.5}}],
    "rank": [{"name": "aug_pe"}],
    "probability": [{"name": "aug_pe", "selection": "probability"}],
    "exact": [{"name": "dp_kps"}],
    "gaussian": [{"name": "dp_kps", "estimator": "rff", "features": 20, "noise": "gaussian"}],
    "lora": [{"name": "dp_sgd"}],
    "topics": [{"name": "topics"}, {"name": "aug_pe"}],
    "words": [{"name": "dp_kps"}, PLAIN | {"batches": "poisson", "texts": 4}],
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "aug_pe": {"records": 4, "iterations": 1, "variations": 2, "max_tokens": 4, "word_var": None},
    "dp_kps": {
        "vocabulary_size": 6, "phrases_per_record": 3, "sequence_length": 2, "records": 4,
        "max_tokens": 4,
        "stop_words": "keep",
    },
    "dp_sgd": {
        "records": 2, "epochs": 0.2, "batch_size": 10, "micro_batch_size": 8, "max_length": 72,
        "lora_rank": 2, "checkpoint_steps": 2,
    },
    "topics": {"topics": 2, "words": 2, "records": 4},
}  # fmt: skip

NO_RECORD_IN_COMMON = "split over batches that have no record in common"
ONE_BATCH_A_LABEL = "of each label, all records of one privacy unit are in the same batch"
SECRET_SAMPLE = "Every batch is a secret random sample"
SEVERAL = "One unit may be in several batches, or in none"
GATE = "if the public logits are sure of a token by themselves"
SPARSE = "noisy comparison (sparse vector)"
NEAREST = "of one privacy unit, vote for the nearest text of a population"
MOST_VOTED = "the texts with the most of them are kept"
DRAWN = "texts are drawn in proportion to them and kept"
NO_COST = "they cost nothing"
PARALLEL = "on classes that are disjoint: parallel composition"
UNITS_CLASSES = "a unit's records may be in several"
DRAWS = "every text has a key of its own"
INTEGERS = "exact discrete Laplace and discrete Gaussian samplers"
FLOATS = "ChaCha20 keyed with 256 bits"
LABELS = "; the label proportions: exact discrete Laplace"
TUNED = "ordinary sampling from the tuned model"
STEPS = "every unit joins a step's batch with probability"
NOT_PRIVATE = "This run is NOT private."
GUARANTEE = "There is a limit to what the released records can give away"
TOPICS = "adds one to the count of its label"

ALL = {
    value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str)
}

PREDICTION = {GUARANTEE, DRAWS, FLOATS}
DISJOINT = PREDICTION | {NO_RECORD_IN_COMMON, ONE_BATCH_A_LABEL}
POISSON = PREDICTION | {SECRET_SAMPLE, SEVERAL}
VOTES = {GUARANTEE, INTEGERS, NEAREST, MOST_VOTED, NO_COST}
WORDS = {GUARANTEE, INTEGERS, PARALLEL}
TRAINING = {GUARANTEE, FLOATS, STEPS, TUNED}

UNIT = {"data__unit": "person", "data__max_records_per_unit": 2}
MEASURED = {"data__label_proportions": "measured"}
NO_NOISE = {"privacy__epsilon": float("inf")}

CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("poisson", {}, POISSON),
    ("gate", MEASURED, DISJOINT | {GATE, LABELS, INTEGERS}),
    ("sparse_vector", UNIT, DISJOINT | {SPARSE}),
    ("rank", NO_NOISE, {NOT_PRIVATE}),
    ("probability", {}, VOTES - {MOST_VOTED} | {DRAWN}),
    ("exact", UNIT, WORDS - {PARALLEL} | {UNITS_CLASSES}),
    ("gaussian", {}, WORDS),
    ("lora", {}, TRAINING),
    ("lora", NO_NOISE, {NOT_PRIVATE, STEPS, TUNED}),
    ("topics", {}, VOTES | {TOPICS}),
    ("words", {}, POISSON | {INTEGERS, PARALLEL}),
]

ACTIVITY = re.compile(
    r"(\d-[a-z_]+: )?"  # a chain's
    r"(planning|warning|(load|try)ing the model|measuring the speed|hashing files"
    r"|charging the budget|checking records"
    r"|counting labels|sorting records into batches|batches|vocabulary|densities|topics|texts"
    r"|embedding records|encoding records|training steps|writing the release"
    r"|iteration \d+ of \d+: (random texts|variations|lookahead|embeddings|votes))"
    r"(: LLM calls)?"
)
"""Activities that a run shows; they become the names of a trace's spans (jobs/traced_run.py)."""


@pytest.fixture
def config(settings: Make, tmp_path: Path) -> Make:
    """Every file and the model are named by an absolute path, and the engine has a secret key."""
    words, public, data = (tmp_path / name for name in ("words.txt", "public.jsonl", "data.jsonl"))
    terms = ["fever", "cough", "rash", "itch", "sleep", "pain"]
    words.write_text("\n".join([*terms, *(f"unseen{i}" for i in range(9))]) + "\n")
    shown = [{"text": f"{a} {b} {b}", "label": "a"} for a in terms for b in terms]
    public.write_text("".join(json.dumps(row) + "\n" for row in shown))
    rows = [
        {"text": f"Marlowe has a {terms[n % 6]}, {n}", "label": "ab"[n % 2], "person": f"p{n // 2}"}
        for n in range(60)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(kind: str, **changes: Any) -> Config:
        methods = [DEFAULTS.get(each["name"], {}) | each for each in METHODS[kind]]
        for method in methods:
            method |= {"vocabulary": str(words)} if method["name"] == "dp_kps" else {}
            method |= {"public": str(public)} if method["name"] == "topics" else {}
        tree = settings(data__path=str(data), **changes)
        tree["engine"] |= {"api_key": "sk-hunter3"}
        del tree["method"]
        several = len(methods) > 1
        return parse_config(tree | ({"methods": methods} if several else {"method": methods[0]}))

    return make


def released(run: Config) -> dict[str, str]:
    """Return the text of every released file but weights, by its path in the folder."""
    folder = Path(run.output.path)
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for path in folder.rglob("*")
        if path.is_file() and "private" not in path.relative_to(folder).parts
    }


def loads(folder: Path) -> int:
    """Check the card by the libraries that read it; return the number of records they find."""
    metadata = mlcroissant.Dataset(str(folder / CROISSANT))
    assert not metadata.metadata.issues.errors
    of_croissant = len(list(metadata.records("records")))
    cache = folder / "private" / "cache"
    rows = datasets.load_dataset(str(folder), "records", split="train", cache_dir=cache)
    assert len(rows) == of_croissant
    return of_croissant


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kind", "changes", "stated"), CASES, ids=["-".join([c[0], *c[1]]) for c in CASES]
)
def test_what_is_stated_is_true_and_no_place_is_named(
    config: Make,
    engine: Any,
    kind: str,
    changes: dict[str, Any],
    stated: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    monkeypatch.setattr("dpray.methods.dp_kps.plan.SentenceTransformerEmbedder", BagOfWords)
    run = config(kind, **changes)

    def build(section: EngineConfig, **options: Any) -> Any:
        tuned = section.model != run.engine.model
        return TransformersEngine(section) if tuned else Kept(engine)

    shown: list[Progress] = []
    report = registry.run(run, shown.append, build)
    assert "Marlowe" not in repr(shown)
    assert [each for each in shown if not ACTIVITY.fullmatch(each.activity)] == []
    folder = Path(run.output.path)
    page = write_report(folder, public=True)[0]
    if NOT_PRIVATE not in stated:
        write_card(folder, None, "unknown")
    text = Visible(page.read_text()).text
    assert {sentence for sentence in ALL if sentence in text} == stated
    files = released(run)
    assert {"run.json", "privacy_report.json", "privacy_report.html", "synthetic.jsonl"} <= {*files}
    # What may be released is uploaded: all but the run's own book-keeping.
    assert NOT_PRIVATE in stated or {*files} - {"run.json"} == {*released_files(folder)}
    assert NOT_PRIVATE in stated or loads(folder) == report["records"]
    model = Path(run.engine.model)
    places = (str(tmp_path), str(model.parent), str(Path.home()), "hunter", "sqlite:")
    found = [(name, place) for name, held in files.items() for place in places if place in held]
    assert found == []
    if run.engine.kind != "none" and report["public_inputs"].get("model"):
        assert report["public_inputs"]["model"] == model_name(run.engine.model)
    assert registry.run(run, build=build) == report

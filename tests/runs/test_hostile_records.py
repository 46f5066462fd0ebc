"""Runs with and without hostile records, by an embedder that has no vector for some of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpray.config.config import Config
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.methods.dp_kps.algorithm import DpKps
from dpray.methods.dp_kps.release import DensityShard, VocabularyShard
from dpray.workers.shards import Voters
from tests.engines.kept import Kept
from tests.engines.tiny_embedders import BEYOND, INFINITE, WORD_BEYOND, make_hostile
from tests.workers.outcomes import lines

pytestmark = pytest.mark.usefixtures("one_thread")

HOSTILE = {
    "lone surrogate": "\ud800\udfff",
    "NUL": "\x00 word1",
    "special token beyond the embedding": f"{BEYOND} {BEYOND}",
    "token beyond the embedding": WORD_BEYOND,
    "special tokens": "<s></s><pad>" * 30,
    "not finite": f"the {INFINITE} patient",
    "zero width": "x\u200b\ufeff",
    "one word": "x" * 150_000,
    "marks": "e" + "\u0300\u0316" * 50_000,
    "double marks": "\u0f73" * 50_000,
    "many words": "word1 word2 " * 10_000,
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_hostile(tmp_path_factory.mktemp("embedders") / "hostile"))


METHODS: dict[str, dict[str, Any]] = {
    "aug_pe": {
        "name": "aug_pe", "records": 4, "iterations": 2, "variations": 2, "max_tokens": 6,
        "word_var": None,
    },
    "topics": {
        "methods": [
            {"name": "topics", "topics": 3, "words": 2, "records": 6},
            {"name": "aug_pe", "records": 4, "iterations": 1, "variations": 2, "max_tokens": 6},
        ]
    },
    "dp_kps": {
        "name": "dp_kps", "vocabulary_size": 7, "sequence_length": 3, "records": 8,
        "estimator": "rff", "features": 20, "sampling": "iterative",
    },
}  # fmt: skip


@pytest.fixture
def world(
    settings: Callable[..., dict[str, Any]], tmp_path: Path, embedder: str
) -> Callable[..., Config]:
    """The configuration of a method on the records of `settings` and more."""
    records = Path(settings()["data"]["path"]).read_text()
    (tmp_path / "words.txt").write_text("".join(f"word{i}\t{i}\n" for i in range(20)))
    public = ['{"text": "the old bridge", "label": "a"}', '{"text": "market fell", "label": "b"}']
    public += [
        '{"text": "cough and fever", "label": "a"}',
        '{"text": "[PAD] \\u0007", "label": "a"}',
    ]
    (tmp_path / "public.jsonl").write_text("\n".join(public))

    def make(name: str, more: list[str]) -> Config:
        folder = tmp_path / f"with-{len(more)}"
        folder.mkdir()
        rows = [json.dumps({"text": text, "label": "a"}) for text in more]
        (folder / "data.jsonl").write_text("\n".join([*rows, records]))
        method = json.loads(json.dumps(METHODS[name]))
        for part in method.get("methods", [method]):
            files = {"dp_kps": ("vocabulary", "words.txt"), "topics": ("public", "public.jsonl")}
            if part["name"] in files:
                key, file = files[part["name"]]
                part[key] = str(tmp_path / file)
        tree = settings(privacy__ledger=f"sqlite:///{folder}/ledger.db")
        tree["data"] |= {"path": str(folder / "data.jsonl")}
        tree["output"] = {"path": str(folder / "out")}
        tree["embedder"] = {"model": embedder}
        del tree["method"]
        tree |= method if "methods" in method else {"method": method}
        if name == "dp_kps":
            tree["engine"] = {"kind": "none"}
        return parse_config(tree)

    return make


def outcome(config: Config, engine: Any) -> dict[str, Any]:
    """Run it; return what it shows apart from its draws."""
    report = methods.run(config, build=lambda *_, **__: Kept(engine))
    ledger = Ledger.open(config.privacy.ledger)
    key = report["ledger"]["reservation"]
    counts = ledger.counts(key)
    units = sorted(unit for unit, _ in ledger.published(key))
    ledger.close()
    shown = {
        name: report[name] for name in ("epsilon", "mechanisms", "llm_calls") if name in report
    }
    labels = sorted(record["label"] for record in lines(config))
    return shown | {"counts": counts, "units": units, "labels": labels}


@pytest.mark.parametrize("name", METHODS)
def test_hostile_records_change_nothing_but_the_law_of_texts(
    name: str, world: Callable[..., Config], engine: Any
) -> None:
    without = outcome(world(name, []), engine)
    assert outcome(world(name, list(HOSTILE.values())), engine) == without


def test_a_hostile_record_leaves_the_sums_of_others_as_they_are(
    world: Callable[..., Config],
) -> None:
    """The exact sums, before any noise: votes, counts of terms, densities."""
    config = world("dp_kps", [])
    rows = [{"text": f"the patient came word{i} word{i % 3}", "label": "a"} for i in range(9)]
    terms = [f"word{i}" for i in range(20)]
    method = DpKps(config.method, ("a", "b"), len(terms), 4, 1.0, 1.0)  # type: ignore[arg-type]
    vectors_ND = np.random.default_rng(0).standard_normal((len(terms), 4)).astype(np.float32)
    vectors_ND[7] = np.nan

    def sums(rows: list[dict[str, str]]) -> list[np.ndarray]:
        vocabulary = VocabularyShard(config, method, terms)
        density = DensityShard(config, method, terms, vectors_ND)
        voters = Voters(config)
        candidates = voters.embed(["the patient came", "market shares", INFINITE])
        for shard in (vocabulary, density, voters):
            shard.load(rows)
        votes = voters.count({"a": candidates, "b": candidates})
        return [vocabulary.counts(), *density.sums().values(), *votes.values()]

    others = sums(rows)
    for kind, text in HOSTILE.items():
        hostile = {"text": text, "label": "a"}
        together = sums([*rows[:4], hostile, *rows[4:]])
        for with_it, alone, without in zip(together, sums([hostile]), others, strict=True):
            assert (with_it - without == alone).all(), kind

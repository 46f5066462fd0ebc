"""Chains of methods run in this process with a small real model and an embedder without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.config.config import Config, EngineConfig
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.types import Progress
from dpray.workers import shards
from tests.engines.kept import Kept
from tests.methods.aug_pe.test_release import BagOfWords

WORDS = ["fever", "cough", "rash", "itch", "sleep", "pain"]
TEXTS = {"a": "a fever and a cough, pain too", "b": "the rash and the itch, no sleep"}
PUBLIC = {"a": "fever cough, pain", "b": "rash itch, sleep", "unseen": "mango banana, kiwi"}
OF_LABEL = {"a": {"fever", "cough", "pain"}, "b": {"rash", "itch", "sleep"}}


class Watched(Kept):
    """Keeps the prompts that reach the real engine, and how far the run said it was; raises at the
    first progress that begins with `stop_at`, and before the training step `stop_at_step`."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.generated: list[str] = []
        self.encoded: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.said: list[Progress] = []
        self.stop_at: str | None = None
        self.stop_at_step: int | None = None

    def build(self, section: EngineConfig, **options: Any) -> Any:
        self.options.append(options)
        return self

    def encode(self, prompt: Any) -> Any:
        self.encoded.append(prompt.user)
        return self.engine.encode(prompt)

    def generate(self, prompts: Any, sampling: Any, on_completion: Any = None) -> Any:
        self.generated += [prompt.user for prompt in prompts]
        return self.engine.generate(prompts, sampling, on_completion)

    def on_progress(self, progress: Progress) -> None:
        self.said.append(progress)
        if self.stop_at is not None and progress.activity.startswith(self.stop_at):
            self.stop_at = None
            raise RuntimeError("interrupted")
        if "training steps" in progress.activity and progress.completed == self.stop_at_step:
            self.stop_at_step = None
            raise KeyboardInterrupt

    def run(self, config: Config) -> dict[str, Any]:
        return registry.run(config, self.on_progress, self.build)


@pytest.fixture
def watched(engine: Any, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    return Watched(engine)


def write_public(path: Path, topics: dict[str, str]) -> None:
    """Write nine public texts of label a, three of each topic: its words, one of them twice."""
    texts = [f"{words} {word}" for words in topics.values() for word in words.split()]
    path.write_text("".join(json.dumps({"text": text, "label": "a"}) + "\n" for text in texts))


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Config]:
    """A chain of the named methods over 200 records, Marlowe in every text;
    `NAME__key=value` changes a method and `section__key=value` a section."""
    vocabulary, data = tmp_path / "words.txt", tmp_path / "chained.jsonl"
    vocabulary.write_text("\n".join([*WORDS, *(f"unseen{i}" for i in range(9))]) + "\n")
    rows = [{"text": f"Marlowe has {TEXTS[c]}", "label": c} for c in "ab" for _ in range(100)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    public = tmp_path / "public.jsonl"
    write_public(public, PUBLIC)
    known: dict[str, dict[str, Any]] = {
        "dp_kps": {
            "vocabulary": str(vocabulary), "vocabulary_size": 6, "phrases_per_record": 3,
            "sequence_length": 2, "records": 12, "stop_words": "keep",
        },
        "topics": {"public": str(public), "topics": 3, "words": 3, "records": 12},
        "private_prediction": {
            "batches": "poisson", "batch_size": 4, "max_tokens": 4, "texts": 6, "clip_bound": 1.0,
        },
        "aug_pe": {
            "records": 4, "iterations": 2, "variations": 2, "max_tokens": 4, "word_var": None,
        },
        "dp_sgd": {
            "records": 4, "epochs": 0.2, "batch_size": 10, "micro_batch_size": 8, "max_length": 72,
            "lora_rank": 2, "checkpoint_steps": 2,
        },
    }  # fmt: skip

    def make(*names: str, **changes: Any) -> Config:
        methods = {name: {"name": name} | known[name] for name in names}
        for name in list(changes):
            method, _, key = name.partition("__")
            if method in methods:
                methods[method][key] = changes.pop(name)
        sizes = {"data__path": str(data), "data__public_size": 200, "privacy__epsilon": 30.0}
        tree = settings(**sizes | changes)
        del tree["method"]
        return parse_config(tree | {"methods": list(methods.values())})

    return make

"""Two worlds differ in one hostile record. Only the noise of a release may tell which one it is.

Each method runs from data to release in both worlds. What the run shows apart from what it draws
has to be equal: that it ends, its batches and steps, what was repeated or failed, its charge, and
what its ledger holds. Each mechanism's tests compare the draws.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from dpray.config.config import Config
from dpray.config.sections import EngineConfig
from dpray.engines.transformers import TransformersEngine
from dpray.ledger.ledger import Ledger
from dpray.methods import registry
from dpray.methods.config import parse_config
from tests.engines.kept import Kept
from tests.engines.tiny_embedders import bert, make_embedder, random_weights
from tests.engines.tiny_model import make_model, make_tokenizer, sentence

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

VOCABULARY = 395
"""The tokens that the tokenizer has without `UNSEEN`."""

UNSEEN = "<|unseen|>"
"""A special token of the tokenizer, for which the model has no embedding."""

NOT_A_NUMBER, OVERFLOW = "~", "^"
"""What the model computes of a text with one of these signs is NaN, or has a logit of +inf."""

HOSTILE = {
    "not a number": f"the patient {NOT_A_NUMBER} came",
    "ends not a number": f"the patient came {NOT_A_NUMBER}",
    "overflow": f"the patient {OVERFLOW} came",
    "no embedding": f"the {UNSEEN} patient {UNSEEN}",
    "special tokens": "</s><s><pad></s>" * 3,
    "a surrogate": "the patient \ud800 came",
    "control characters": "the\0patient\x1b[2J\x85 came",
    "long": "the patient came " * 60_000,
    "one word": "x" * 1_000_000,
    "one sign": ".",
}

METHODS: dict[str, dict[str, Any]] = {
    "private_prediction": {
        "batches": "disjoint", "batch_size": 5, "private_tokens": 12, "max_tokens": 4,
        "max_prompt_tokens": 40, "clip_bound": 1.0,
    },
    "aug_pe": {
        "records": 4, "iterations": 2, "variations": 2, "max_tokens": 6, "word_var": None,
    },
    "dp_kps": {
        "vocabulary_size": 4, "phrases_per_record": 4, "sequence_length": 2, "records": 4,
        "stop_words": "keep",
    },
    "dp_sgd": {
        "epochs": 1, "batch_size": 5, "micro_batch_size": 8, "max_length": 24, "lora_rank": 2,
        "learning_rate": 0.01, "records": 4, "noise_multiplier": 0.8, "checkpoint_steps": 2,
    },
}  # fmt: skip

SECRET = {"poisson": {"batches": "poisson", "texts": 6, "private_tokens": None}}
"""Private prediction with secret batches."""


@pytest.fixture(scope="session")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose weights are all finite. Two of its dimensions are 0 unless one of the two signs
    was read: one makes the first layer's output infinite, the other one token's logit."""
    folder = make_model(tmp_path_factory.mktemp("models") / "hostile", vocabulary=VOCABULARY)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (LlamaForCausalLM, AutoTokenizer))
    nan, infinite = 62, 63
    with torch.no_grad():
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings[:, nan:], head[:, nan:] = 0.0, 0.0
        for sign, dimension in ((NOT_A_NUMBER, nan), (OVERFLOW, infinite)):
            embeddings[tokenizer.convert_tokens_to_ids(sign), dimension] = 1.0
        for layer in model.model.layers:
            attention = layer.self_attn
            for weight in (attention.v_proj.weight, attention.o_proj.weight):
                weight[nan:] = 0.0
            layer.mlp.down_proj.weight[nan:] = 0.0
            for dimension in (nan, infinite):
                attention.v_proj.weight[dimension, dimension] = 1e3
            attention.o_proj.weight[infinite, infinite] = 1.0
        model.model.layers[0].self_attn.o_proj.weight[nan, nan] = 3e38
        model.model.norm.weight[infinite] = 1e10
        head[7, infinite] = 3e38
    model.save_pretrained(folder)
    return with_unseen_token(folder, model, tokenizer)


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose gradient is NaN for a text with a certain sign, and for no other."""
    folder = make_model(tmp_path_factory.mktemp("models") / "trained", vocabulary=VOCABULARY)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (LlamaForCausalLM, AutoTokenizer))
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[tokenizer.convert_tokens_to_ids(NOT_A_NUMBER), -1] = 3e38
    return with_unseen_token(folder, model, tokenizer)


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = random_weights(partial(bert, len(make_tokenizer(512))))
    return str(make_embedder(tmp_path_factory.mktemp("models") / "embedder", model))


def with_unseen_token(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [UNSEEN]})
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) > model.config.vocab_size
    return str(folder)


@pytest.fixture(scope="session")
def transformers_engine(hostile_model: str) -> Iterator[Any]:
    engine = TransformersEngine(EngineConfig(model=hostile_model), device="cpu", max_rows=5)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vllm_engine(vllm_installed: None, at_the_end: ExitStack, hostile_model: str) -> Any:
    from dpray.engines.vllm.engine import VllmEngine

    config = EngineConfig(model=hostile_model, max_num_seqs=24, kv_cache_gib=0.05)
    engine = VllmEngine(config, private_rows=True)
    at_the_end.callback(engine.close)
    return engine


class World:
    """A run of each method on twenty records, and perhaps one more."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest, engine: str) -> None:
        self.folder, self.request, self.engine = folder, request, f"{engine}_engine"
        folder.mkdir()
        words = folder / "words.txt"
        words.write_text("\n".join(["the", "patient", "cough", "came", "fever", "x"]) + "\n")

    def shown(self, method: dict[str, Any], extra: str | None) -> dict[str, Any]:
        """Return what a run shows apart from its draws."""
        config = self._config(method, extra)
        report = registry.run(config, build=self._build)
        with closing(Ledger.open(config.privacy.ledger)) as ledger:
            key = report["ledger"]["reservation"]
            held = {
                "started": ledger.counts(key)["started"],
                "published": sorted(unit for unit, _ in ledger.published(key)),
                "failed": list(ledger.failed(key)),
            }
            assert ledger.verify() == []
        steps = {name: report.get(name) for name in ("epsilon", "delta", "batches", "steps")}
        return held | steps | {"mechanisms": report["mechanisms"]}

    def _build(self, *_: Any, **__: Any) -> Kept:
        return Kept(self.request.getfixturevalue(self.engine))

    def _config(self, method: dict[str, Any], extra: str | None) -> Config:
        rng = random.Random(1)
        rows = [{"text": sentence(rng, 8), "label": "ab"[n % 2]} for n in range(20)]
        if extra is not None:
            rows.insert(7, {"text": extra, "label": "a"})
        records = self.folder / "records.jsonl"
        records.write_text("".join(json.dumps(row) + "\n" for row in rows))
        engine: dict[str, Any] = {"kind": "transformers", "max_model_len": 256}
        if method["name"] == "dp_kps":
            method = method | {"vocabulary": str(self.folder / "words.txt")}
            engine = {"kind": "none"}
        else:
            name = "trained" if method["name"] == "dp_sgd" else "hostile"
            engine["model"] = self.request.getfixturevalue(f"{name}_model")
        return parse_config(
            {
                "data": {
                    "path": str(records),
                    "label": "label",
                    "labels": ["a", "b"],
                    "public_size": 20,
                },
                "privacy": {
                    "epsilon": 50.0,
                    "delta": 1e-5,
                    "dataset": "notes",
                    "ledger": f"sqlite:///{self.folder}/ledger.db",
                },
                "method": method,
                "engine": engine,
                "embedder": {"model": self.request.getfixturevalue("embedder")},
                "runtime": {"ray_address": "none"},
                "output": {"path": str(self.folder / "out")},
            }
        )


OF_A_MODEL = ("not a number", "ends not a number", "overflow")
"""Only a language model computes anything of these signs."""

CASES = [
    *(("private_prediction", "transformers", kind) for kind in HOSTILE),
    *(("dp_sgd", "transformers", kind) for kind in HOSTILE),
    *((name, "transformers", kind) for name in ("aug_pe", "dp_kps")
      for kind in HOSTILE if kind not in OF_A_MODEL),
    # Every batch, in both engines, gets its prompts from a text by one rule.
    *(("poisson", "transformers", kind) for kind in ("not a number", "long", "one sign")),
    *((name, "vllm", kind) for name in ("private_prediction", "poisson") for kind in OF_A_MODEL),
]  # fmt: skip


@pytest.fixture(scope="session")
def base(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str, str], dict[str, Any]]:
    """What is shown in the world without the hostile record, once for each method and engine."""
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def shown(name: str, engine: str) -> dict[str, Any]:
        if (name, engine) not in found:
            folder = tmp_path_factory.mktemp("worlds") / "base"
            found[name, engine] = World(folder, request, engine).shown(method_of(name), None)
        return found[name, engine]

    return shown


def method_of(name: str) -> dict[str, Any]:
    if name in SECRET:
        tree = METHODS["private_prediction"] | SECRET[name]
        return {"name": "private_prediction"} | {k: v for k, v in tree.items() if v is not None}
    return {"name": name} | METHODS[name]


@pytest.mark.parametrize(("name", "engine", "kind"), CASES)
def test_a_run_shows_nothing_of_a_hostile_record(
    base: Callable[[str, str], dict[str, Any]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    engine: str,
    kind: str,
) -> None:
    world = World(tmp_path / "with", request, engine)
    shown = world.shown(method_of(name), HOSTILE[kind])
    assert shown == base(name, engine)
    assert shown["failed"] == []

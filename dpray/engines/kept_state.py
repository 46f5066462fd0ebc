"""Models that change themselves by what they read are refused for private texts.

A record may move what is computed for itself, and nothing else. A model may keep something of a
text, though: BigBird turns to full attention at the first short text and stays with it, and RoPE of
type `dynamic`, as transformers computes it, keeps the angles of the longest text so far. What such
a model computes for later texts, private or public, depends on the records before.

Known kinds are refused by name (`kept_by`). An embedder is also tried, on public texts
(`stateless_pair`). Private texts are embedded one at a time, so that no claim rests on how texts of
one batch move each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from dpray.extras import Late
from dpray.types import InputError, ReadOnlyJson

if TYPE_CHECKING:
    import transformers
else:
    transformers = Late("transformers")

SWITCHING = {"big_bird", "bigbird_pegasus"}
"""Architectures that switch their attention by the length of a text, for good."""

PUBLIC_WORDS = "etaoinshrdlu"
"""The words of the public texts: most tokenizers have a token for each of these letters."""

SHORT, MIDDLE = 3, 100
"""The words of two public texts; two others are about as long as the model allows."""

BATCH_ROUNDING = 1e-3
"""A public vector of norm 1 moves by less than this with the other texts of its batch."""


class Copy(Protocol):
    """One copy of an embedder."""

    longest: int
    """The most tokens that are read of a text."""
    kept: str
    """The part of its configuration that makes the model change by what it reads, "" if none."""

    def embed(self, texts: list[str], batch_size: int = ...) -> np.ndarray: ...


C = TypeVar("C", bound=Copy)


def kept_by(config: ReadOnlyJson, ropes: tuple[str, ...] = ("dynamic", "longrope")) -> str:
    """Return what makes a model of this configuration change by what it reads, "" if nothing is
    known: its architecture, one of these types of RoPE, or the scaling of nomic-embed-text."""
    found = [str(config["model_type"])] if config.get("model_type") in SWITCHING else []
    if config.get("rotary_scaling_factor"):
        found.append("rotary_scaling_factor")
    return ", ".join(dict.fromkeys([*found, *(f"RoPE {t}" for t in _ropes(config) if t in ropes)]))


def _ropes(value: object, inside: bool = False) -> Iterator[str]:
    """Yield the types of RoPE in a configuration, also those of its parts and layers."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if inside and key in ("rope_type", "type") and isinstance(part, str):
                yield part
            yield from _ropes(part, inside or str(key).startswith("rope_"))
    elif isinstance(value, list):
        for part in value:
            yield from _ropes(part, inside)


def refuse_kept_state(model: str) -> None:
    """Raise InputError for the folder, or the hub's name, of a language model that transformers
    computes with a state. (With RoPE `longrope` the angles follow from one pass: what a pass does
    to its rows is measured, or ruled out by its shape.)"""
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False).to_dict()
    if found := kept_by(config, ropes=("dynamic",)):
        raise InputError(
            f"engine.model: {model} changes itself by what it reads ({found}), so that a record "
            "would move the rows of others; take another model, or one without this scaling"
        )


def stateless_pair(load: Callable[[str], C], model: str) -> tuple[C, C]:
    """Load an embedder twice, one copy for private texts and one for public ones, and try both.

    A public text has to have the same bits when nothing was read before it, after a short text,
    after one as long as the model allows, after one that holds no word, and in the other copy. That
    a batch moves it by no more than rounding keeps public vectors comparable with private ones; the
    guarantee does not rest on it. Raises InputError for a model that keeps a state.
    Proof: docs/privacy.md, section 3.1.
    """
    one, other = load(model), load(model)
    take = "take another one, such as sentence-transformers/all-MiniLM-L6-v2"
    if one.kept:
        raise InputError(
            f"embedder.model: {model} changes itself by what it reads ({one.kept}), so that a "
            f"record would move the embeddings of others; {take}"
        )
    short, middle, nearly, full = (
        _public_text(max(1, words))
        for words in (SHORT, min(MIDDLE, one.longest // 2), one.longest - 8, 2 * one.longest)
    )
    seen: dict[str, bytes] = {}
    orders = ((one, (middle, short, middle, nearly, "", full, middle)),
              (other, (full, nearly, middle, short)))  # fmt: skip
    for copy, order in orders:
        for text in order:
            vector = copy.embed([text], batch_size=1)
            if text and not np.linalg.norm(vector) > 0:
                raise InputError(
                    f"embedder.model: {model} gives no vector for a public text of up to "
                    f"{one.longest} tokens; {take}"
                )
            if seen.setdefault(text, vector.tobytes()) != vector.tobytes():
                raise InputError(
                    f"embedder.model: {model} gives a public text another vector after other "
                    f"texts, so that a record could move the embeddings of others; {take}"
                )
    together = other.embed([short, middle, nearly])
    alone = np.concatenate([other.embed([text], batch_size=1) for text in (short, middle, nearly)])
    if not np.abs(together - alone).max() <= BATCH_ROUNDING:
        raise InputError(
            f"embedder.model: {model} gives a public text another vector next to other texts of a "
            f"batch, by more than rounding; {take}"
        )
    return one, other


def _public_text(words: int) -> str:
    return " ".join(PUBLIC_WORDS[(i * i + i // 3) % len(PUBLIC_WORDS)] for i in range(words))

"""`bits_per_byte` measures how well a language model predicts a public text."""

from __future__ import annotations

import math

from dpray.engines.base import (
    Engine,
    GroupLogits,
    HostSync,
    LockstepGroup,
    PlainPrompt,
    Selected,
    Selection,
    SelectorSpec,
)
from dpray.extras import torch
from dpray.types import Json

MOST_TOKENS = 64
"""So many tokens of a text are read, one after the other."""


def bits_per_byte(engine: Engine, text: str) -> float | None:
    """Return the cross-entropy of the beginning of a public text in bits for each of its bytes in
    UTF-8; None for an empty text, or if the model's logits are no numbers."""
    most = min(MOST_TOKENS, engine.context_length // 2)
    begun = engine.truncate(text, most)
    start, *tokens = engine.encode(PlainPrompt(begun))
    if not begun or not tokens:
        return None
    spec = SelectorSpec("dpray.engines.bits:Reader", {"tokens": tokens})
    group = LockstepGroup("bits", (), (start,), spec, len(tokens))
    [result] = engine.decode_lockstep([group])
    nats: float = result.state["nats"]
    return nats / math.log(2) / len(begun.encode()) if math.isfinite(nats) else None


class Reader:
    """Continues the public prompt with given tokens, and adds up how unlikely the model finds
    them."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._read, self._nats = tokens, 0, 0.0

    def add(self, logits: GroupLogits) -> None:
        """There are no private rows."""

    def select(self, logits: GroupLogits) -> Selection:
        likely = logits.public.float().log_softmax(-1)[self._tokens[self._read]]
        return HostSync(likely, torch.stack, self._take)

    def _take(self, likely: torch.Tensor) -> Selected:
        self._nats -= float(likely)
        self._read += 1
        return Selected(self._tokens[self._read - 1])

    def state(self) -> Json:
        return {"nats": self._nats}

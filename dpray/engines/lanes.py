"""Lanes hold texts that are decoded side by side, in passes of fixed shape (`FixedPass`).

A lane has room for the rows of a batch of usual size. The number of lanes, their rows and the
tokens of a row are public: nothing private decides the shape of a pass or its memory. The private
rows of all lanes share a pass. The public rows share another one if the device computes each of
them in the same bits whatever its lane and the rows in the others; otherwise each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpray.engines.base import LockstepGroup, TokenSelector
from dpray.engines.finite_rows import FiniteRows
from dpray.engines.fixed_pass import Capture, FixedPass
from dpray.engines.kept_state import kept_by
from dpray.engines.one_token import ONE_TOKEN
from dpray.engines.passes import PublicPass, TokenIds, advance, prefill

APART = 0.2
"""A pass of fixed shape may be off a growing one by this much of the logits' spread: far more than
rounding does in bfloat16, and far less than a mask or a position that a model does not heed."""

PROMPTS = ((1, 2, 3, 4, 5, 6, 7), (8, 9, 10))
"""Two prompts of different lengths that are computed in both ways when lanes are made."""

TRIED = (5, 6, 7)
"""Tokens that are added to made-up prompts, one after the other."""


@dataclass(eq=False)
class Text:
    """A text under way: the private prompts that are `kept` in the engine, and the `parts` of the
    others, which are computed again for every token."""

    group: LockstepGroup
    selector: TokenSelector
    kept: TokenIds
    parts: Sequence[TokenIds]
    device: torch.device
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    is_exhausted: bool = False

    def __post_init__(self) -> None:
        self.finite = FiniteRows(len(self.kept), self.device)
        self.finite_parts = FiniteRows(sum(map(len, self.parts)), self.device)


class Lanes:
    """`count` lanes of `rows` private rows and a public one, of `columns` tokens each."""

    def __init__(self, model: Any, count: int, rows: int, columns: int, capture: Capture) -> None:
        self._model, self._device = model, model.device
        self.count, self.rows, self.columns = count, rows, columns
        self._prompts: dict[int, TokenIds] = {}
        like = prefill(model, PROMPTS[:1], self._device)
        places = count * rows
        self.private = FixedPass(model, like, places, places, columns, capture)
        self.public = FixedPass(model, like, count, count, columns, capture)
        if count > 1 and not computes_apart(model, self.public):
            del self.public  # before the memory is taken again
            self.public = FixedPass(model, like, count, 1, columns, capture)
        self._public_pass = PublicPass(model, self._device)
        self._beside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def holds(self, group: LockstepGroup) -> bool:
        """Return whether the group's public row is not too long. No private row decides which pass
        computes the public one: its bits differ from pass to pass."""
        return len(group.public_prompt) + group.max_tokens <= self.columns

    def split(self, group: LockstepGroup) -> tuple[TokenIds, TokenIds]:
        """Return the private prompts that a lane has room for, and the others: those of rows that
        are too long, or too many."""
        room = self.columns - group.max_tokens
        long = tuple(prompt for prompt in group.private_prompts if len(prompt) > room)
        rest = tuple(prompt for prompt in group.private_prompts if len(prompt) <= room)
        return rest[: self.rows], rest[self.rows :] + long

    def rows_of(self, lane: int, kept: TokenIds) -> slice:
        return slice(lane * self.rows, lane * self.rows + len(kept))

    def start(self, lane: int, kept: TokenIds, public: tuple[int, ...], most: int) -> None:
        """Compute the prompts of a lane's text, at most `most` private ones in a pass, and none of
        these if its last text had the same."""
        first = lane * self.rows
        if self._prompts.pop(lane, None) == kept:
            lengths = torch.tensor([*map(len, kept)], dtype=torch.long, device=self._device)
            self.private.forget(first, lengths)
        else:
            for row in range(0, len(kept), most):
                rows = prefill(self._model, kept[row : row + most], self._device)
                self.private.put(first + row, rows)
        self.public.put(lane, self._public_pass.start(public))
        self._prompts[lane] = kept

    def step(self, texts: dict[int, Text]) -> None:
        """Compute the logits that follow each lane's text."""
        for lane, text in texts.items():
            rows, last = self.rows_of(lane, text.kept), text.tokens[-1:]
            # A prompt's last token is computed once more: all first logits come from here, too.
            self.private.tokens[rows] = last or [prompt[-1] for prompt in text.kept]
            self.private.positions[rows] = [len(prompt) - 1 for prompt in text.kept]
            self.private.positions[rows] += len(text.tokens)
            public = text.group.public_prompt
            self.public.tokens[lane] = (*public, *last)[-1]
            self.public.positions[lane] = len(public) - 1 + len(text.tokens)
        if self._beside is None:
            self.private.step([0])
            self.public.step(list(texts))
            return
        # At the same time: a pass of few rows leaves most of a GPU idle.
        present = torch.cuda.current_stream(self._device)
        self._beside.wait_stream(present)
        self.private.step([0])
        try:
            with torch.cuda.stream(self._beside):
                self.public.step(list(texts))
        finally:  # also if it failed half-way: what comes next may use the same memory
            present.wait_stream(self._beside)


def lanes_for(model: Any, count: int, rows: int, columns: int, capture: Capture) -> Lanes | None:
    """Make lanes if a row of the model looks at all of its earlier tokens, by the mask and the
    positions that it is given, and at nothing else of a pass; otherwise return None."""
    config = model.config
    attention = {each._attn_implementation for each in (config, config.get_text_config())}
    if attention != {"sdpa"} or kept_by(config.to_dict()):
        return None
    if not prefill(model, PROMPTS[:1], model.device).can_rewind:
        return None
    expected = growing(model, PROMPTS[:rows])
    try:
        attend_by(model, ONE_TOKEN)
        lanes = Lanes(model, count, rows, columns, capture)
        if computes_alike(model, lanes, expected):
            return lanes
    except Exception:  # of a model that takes no such masks, for one: other passes go on without
        pass
    attend_by(model, "sdpa")
    return None


def attend_by(model: Any, name: str) -> None:
    """Have the model's text attend so. Other parts, as of images, keep what they can do."""
    config = model.config
    text = (key for key in config.sub_configs if getattr(config, key) is config.get_text_config())
    model.set_attn_implementation(dict.fromkeys(("", *text), name))


@torch.inference_mode()
def growing(model: Any, prompts: TokenIds) -> list[torch.Tensor]:
    """Return the logits after the prompts and each of two tokens, by passes that grow."""
    rows = prefill(model, prompts, model.device)
    return [rows.logits, advance(model, rows, TRIED[:1]), advance(model, rows, TRIED[:2])]


@torch.inference_mode()
def computes_alike(model: Any, lanes: Lanes, expected: Sequence[torch.Tensor]) -> bool:
    """Return whether rows of made-up prompts have the logits of passes that grow."""
    prompts = PROMPTS[: lanes.rows]
    private, public = lanes.private, lanes.public
    private.put(0, prefill(model, prompts, model.device))
    public.put(0, prefill(model, prompts[:1], model.device))
    for number, logits in enumerate(expected):
        for each, size in ((private, len(prompts)), (public, 1)):
            each.tokens[:size] = [(prompt + TRIED[:number])[-1] for prompt in prompts[:size]]
            each.positions[:size] = [len(prompt) - 1 + number for prompt in prompts[:size]]
            each.step([0])
            off = (each.logits[:size] - logits[:size]).std() / logits.std()
            if not off <= APART:  # nor is it not a number
                return False
    return True


@torch.inference_mode()
def computes_apart(model: Any, public: FixedPass) -> bool:
    """Return whether a row's logits have the same bits in each place of a pass, whatever the other
    rows are. Rows that are short and rows that fill their places stand next to both kinds.

    What has no graph may have shapes that follow from its numbers, as of the rows that an expert
    gets. A grouped product of stacked matrices, one for each expert, has such shapes in a graph.
    """
    if not public.is_captured or any(weight.ndim > 2 for weight in model.parameters()):
        return False
    columns = public.cache.columns  # rounded up: there may be more than positions of the model
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or columns
    places, longest = range(len(public.logits)), min(columns, positions) - len(TRIED)
    short, long = (tuple(1 + i % 9 for i in range(size)) for size in (7, longest))
    for own, other in product((short, long), repeat=2):
        row, beside = (prefill(model, [each], model.device) for each in (own, other[::-1]))
        for place in places:
            public.put(place, beside)
        found = []
        for place in places:
            public.put(place, row)
            lengths = np.full(len(places), len(other))
            lengths[place] = len(own)
            found.append(_tried(public, lengths)[:, place])
            public.put(place, beside)
        if any(not torch.equal(found[0], each) for each in found):
            return False
    return True


def _tried(public: FixedPass, lengths: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return the logits of all places after each token that is tried, (tokens, places, V)."""
    logits = []
    for number, token in enumerate(TRIED):
        public.tokens[:] = token
        public.positions[:] = lengths + number
        public.step(range(len(lengths)))
        logits.append(public.logits.clone())
    return torch.stack(logits)

"""Forward passes whose shape and memory never change, so that a GPU can replay one as a CUDA graph.

A pass computes one new token in each of its rows. A row's keys and values lie in a place of a cache
that is made once, with a column for each token. What is beyond a row's own tokens is masked, and
cleared when its prompt is put there: attention multiplies what it leaves out by 0, and 0 times NaN
is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache

from dpray.engines.passes import PrefilledRows, cache_argument, readable

Compute = Callable[[], None]

Capture = Callable[[Compute], Compute]
"""Takes a computation on tensors that stay where they are, and returns what repeats it."""


def as_graph(compute: Compute) -> Compute:
    """Capture a computation in a CUDA graph, as torch's notes on CUDA graphs say. One that waits
    for the device has no graph, and is returned as it is."""
    stream, mode = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):  # what is set up lazily must not be part of the graph
                compute()
    except RuntimeError:
        return compute
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # On its own stream: passes that are computed at the same time must not share what the
    # libraries keep for a stream.
    with torch.cuda.graph(graph, stream=stream):
        compute()
    return graph.replay


class FixedCache(Cache):
    """Keys and values of `places` rows of `columns` tokens at most, with the heads of the layers of
    `like`. A pass reads and writes in the places and columns that its `inputs` name."""

    def __init__(self, like: Any, places: int, columns: int, inputs: torch.Tensor) -> None:
        super().__init__(layers=[])

        def made(given: torch.Tensor) -> torch.Tensor:
            _, heads, _, size = given.shape
            return given.new_zeros(places, heads, columns, size)

        self.kept = [(made(layer.keys), made(layer.values)) for layer in like.layers]
        self.columns, self.inputs = columns, inputs
        self.is_whole = places == inputs.shape[1]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, positions, places = self.inputs
        keys, values = self.kept[layer_idx]
        keys[places, :, positions] = key_states[:, :, 0]
        values[places, :, positions] = value_states[:, :, 0]
        if self.is_whole:
            return keys, values
        return keys.index_select(0, places), values.index_select(0, places)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns, 0


class FixedPass:
    """Computes the next logits of rows in `places`, `width` of them in a pass: all, or one by one.

    `tokens` and `positions` have each place's newest token and its column. Any may be stale for
    places that nobody reads.
    """

    def __init__(
        self,
        model: Any,
        like: PrefilledRows,
        places: int,
        width: int,
        columns: int,
        capture: Capture,
    ) -> None:
        device = like.mask.device
        self._model, self._width = model, width
        self.tokens = np.zeros(places, dtype=np.int64)
        self.positions = np.zeros(places, dtype=np.int64)
        self._places = np.arange(places)
        self._columns = torch.arange(columns, device=device)
        self.inputs = torch.zeros(3, width, dtype=torch.long, device=device)
        self.inputs[2] = torch.arange(width, device=device)
        self.cache = FixedCache(like.cache, places, columns, self.inputs)
        self._cache = {cache_argument(model.__class__): self.cache}
        self.logits = torch.zeros(places, readable(model), device=device)
        self._run = capture(self.compute)
        self.is_captured = self._run != self.compute

    def compute(self) -> None:
        """Write the logits after the `inputs`. Nothing here waits, or depends on a number; to
        repeat it changes nothing."""
        tokens, positions, places = self.inputs
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=(self._columns <= positions[:, None])[:, None, None],
            position_ids=positions[:, None],
            **self._cache,
        )
        logits = output.logits[:, -1, : self.logits.shape[1]]
        if self.cache.is_whole:
            self.logits.copy_(logits)
        else:
            self.logits.index_copy_(0, places, logits.float())

    def step(self, places: Sequence[int]) -> None:
        """Compute the `logits` of at least these places, without waiting for the device."""
        numbers = np.stack([self.tokens, self.positions, self._places])
        given = torch.from_numpy(numbers)
        if self.inputs.is_cuda:
            # Its memory is used again when the copy is done.
            given = given.pin_memory()
        given = given.to(self.inputs.device, non_blocking=True)
        for number in sorted({place // self._width for place in places}):
            first = number * self._width
            self.inputs.copy_(given[:, first : first + self._width])
            self._run()

    def put(self, first: int, rows: PrefilledRows) -> None:
        """Keep the prompts of `rows` in the places from `first` on."""
        longest = rows.mask.shape[1]
        lengths = rows.mask.sum(1)
        # Prompts are padded on the left. Here each begins in the first column.
        moved = self._columns[:longest] + (longest - lengths)[:, None]
        moved = moved.clamp(max=longest - 1)[:, None, :, None]
        for own, layer in zip(self.cache.kept, rows.cache.layers, strict=True):
            for mine, given in zip(own, (layer.keys, layer.values), strict=True):
                into = mine[first : first + len(lengths), :, :longest]
                into.copy_(given.gather(2, moved.expand_as(given)))
        self.forget(first, lengths)

    def forget(self, first: int, lengths: torch.Tensor) -> None:
        """Clear what follows the prompts of these lengths in the places from `first` on."""
        beyond = (self._columns >= lengths[:, None])[:, None, :, None]
        for own in self.cache.kept:
            for mine in own:
                mine[first : first + len(lengths)].masked_fill_(beyond, 0)

"""Work that grows with the data is done in chunks, so that chunks may go to other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# The size is the same wherever a chunk is measured, because the last bits of an embedding may
# depend on the texts of its chunk.
CHUNK_SIZE = 1024

ChunkMap = Callable[[Callable[[Any], np.ndarray], Sequence[Any]], Iterable[np.ndarray]]
"""A `ChunkMap` applies a function to each chunk and returns the results in order, as `map` does."""


def chunks(items: Any) -> list[Any]:
    """Cut a list or an array into chunks of `CHUNK_SIZE` or fewer; no items make no chunk."""
    return [items[start : start + CHUNK_SIZE] for start in range(0, len(items), CHUNK_SIZE)]

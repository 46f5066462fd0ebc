"""What grows with the data is measured slice by slice, so that slices may go to other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

SLICE = 1024
"""Records of one slice. The same wherever it is measured: the last bits of an embedding may depend
on the texts beside it."""

Spread = Callable[[Callable[[Any], np.ndarray], Sequence[Any]], Iterable[np.ndarray]]
"""What a function answers to each of several slices, in their order: `map`, or one over actors."""


def slices(items: Any) -> list[Any]:
    """A list or an array cut into slices of `SLICE` or fewer; none of nothing."""
    return [items[start : start + SLICE] for start in range(0, len(items), SLICE)]

"""Results that come bit by bit are handed on in larger lots."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")


def together(
    lots: Iterable[list[T]],
    most: int,
    seconds: float = math.inf,
    clock: Callable[[], float] = monotonic,
) -> Generator[list[T]]:
    """Yield the members of many lots at once, as soon as there are `most`, or any that came
    `seconds` after the last ones; a lot may be empty, and is then asked for the time alone.

    Where the lots end with an error, or a person interrupts them, what came before is yielded, and
    then the error raised.
    """
    waiting: list[T] = []
    last = clock()
    try:
        for lot in lots:
            waiting += lot
            if waiting and (len(waiting) >= most or clock() - last >= seconds):
                finished, waiting, last = waiting, [], clock()
                yield finished
    except (Exception, KeyboardInterrupt):
        if waiting:
            yield waiting
        raise
    if waiting:
        yield waiting

"""A batch of texts is divided over ranks, into micro-batches of fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainingText:
    """Holds a record's token ids; the loss is over `ids[given:]`, its own tokens."""

    ids: tuple[int, ...] = field(repr=False)
    given: int


def share(
    batch: Sequence[TrainingText], size: int, rank: int, ranks: int
) -> list[tuple[Sequence[TrainingText], int]]:
    """Return a rank's micro-batches of at most `size` texts, each with the number of positions that
    it is padded to. Every rank has as many, and at least one, so that all meet in the same
    collective calls; some are empty.

    Texts go through the model together if they are padded to the same number of positions, which
    depends on a text alone (`padded_length`). With dummies in the remaining rows, every text is
    computed in a shape of its own, whoever else is in the batch.
    """
    groups: dict[int, list[TrainingText]] = {}
    for text in batch:
        groups.setdefault(padded_length(len(text.ids)), []).append(text)
    parts: list[tuple[Sequence[TrainingText], int]] = [
        (texts[start : start + size], positions)
        for positions, texts in sorted(groups.items())
        for start in range(0, len(texts), size)
    ]
    count = max(1, -(-len(parts) // ranks))
    parts += [((), padded_length(1))] * (count * ranks - len(parts))
    return parts[rank::ranks]


def padded_length(tokens: int) -> int:
    """Return one more than the least of 4, 6, 8, 12, 16, 24, 32, ... that is not below `tokens`.

    There is always some padding: without any, attention would take another kernel for all texts of
    a micro-batch, depending on its other texts.
    """
    power = 4
    while power < tokens:
        power *= 2
    return (power * 3 // 4 if tokens <= power * 3 // 4 and power > 4 else power) + 1

"""`Batches` names a run's batches, label by label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Batches:
    """Names batches by their label's position in the public label set, and by their number among
    the label's, from 0. All of it is public."""

    batches_per_label: Mapping[str, int]

    @property
    def num_batches(self) -> int:
        return sum(self.batches_per_label.values())

    def batch_id(self, label: str, number: int) -> str:
        return f"{list(self.batches_per_label).index(label)}/{number}"

    def label_of(self, batch_id: str) -> str:
        return list(self.batches_per_label)[int(batch_id.split("/")[0])]

    def batch_ids(self) -> Iterator[str]:
        """Yield every batch, the labels mixed in their shares: the first batches have the mix of
        all."""
        places = (
            ((number + 0.5) / count, i, number)
            for i, count in enumerate(self.batches_per_label.values())
            for number in range(count)
        )
        yield from (f"{i}/{number}" for _, i, number in sorted(places))

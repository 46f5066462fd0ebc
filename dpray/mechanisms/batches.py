"""Units are put into batches: disjoint ones by a hash (Amin et al. 2024, Assumption 1), or secret
ones by independent coins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dpray.accounting.composed_events import Parallel, SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import ExponentialMechanism, PoissonSubsampledDraws
from dpray.mechanisms.labels import common_shares, largest_remainder
from dpray.mechanisms.randomness import generator, named_key


def content_id(text: str, label: str | None) -> str:
    """Return the id of a record that is its own privacy unit, a hash of its content: it depends on
    that record only."""
    digest = hashlib.blake2b(digest_size=16)
    for part in ("" if label is None else label, text):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


def content_rank(text: str, label: str | None) -> int:
    """Return 63 bits of the content's hash, which fit Arrow's int64."""
    return int(content_id(text, label)[:16], 16) >> 1


def is_batch(unit: str) -> bool:
    """Return whether a unit of a run has the name of a batch: no other mechanism's has a slash."""
    return "/" in unit


@dataclass(frozen=True)
class Batches:
    """The batches of each label. A batch id is `i/n`: the label's position in the public label set,
    and the batch's number within the label, both from 0."""

    batches_per_label: Mapping[str, int]

    @property
    def num_batches(self) -> int:
        return sum(self.batches_per_label.values())

    def batch_id(self, label: str, number: int) -> str:
        return f"{list(self.batches_per_label).index(label)}/{number}"

    def label_of(self, batch_id: str) -> str:
        return list(self.batches_per_label)[int(batch_id.split("/")[0])]

    def batch_ids(self) -> Iterator[str]:
        """Yield all batch ids. Labels take turns: a first part has them in the shares of the
        whole."""
        places = (
            ((number + 0.5) / count, i, number)
            for i, count in enumerate(self.batches_per_label.values())
            for number in range(count)
        )
        yield from (f"{i}/{number}" for _, i, number in sorted(places))


@dataclass(frozen=True)
class HashPartition(Batches):
    """Assigns units to batches, label by label, from public numbers and the unit's own id.

    Claim: the batch of a unit depends on its id, the public `salt` and the public counts; adding or
    removing a unit changes the rows of its own batches only. So the batches compose in parallel,
    and a run costs what one batch costs.
    Proof: docs/privacy.md, section 1.4.

    >>> partition = HashPartition.expected(1000, {"a": 0.75, "b": 0.25}, batch_size=100, salt="5a")
    >>> dict(partition.batches_per_label)
    {'a': 8, 'b': 2}
    >>> batch_id = next(partition.joined("b", "unit 7"))
    >>> batch_id in ("1/0", "1/1"), partition.label_of(batch_id)
    (True, 'b')
    """

    salt: str

    @staticmethod
    def expected(
        public_size: int, proportions: Mapping[str, float], batch_size: int, salt: str
    ) -> HashPartition:
        """Make `round(public_size * proportion / batch_size)` batches for each label, at least one,
        and none for a label without a share."""
        counts = {
            label: max(1, round(public_size * proportion / batch_size)) if proportion > 0 else 0
            for label, proportion in proportions.items()
        }
        return HashPartition(counts, salt)

    def joined(self, label: str, unit_id: str) -> Iterator[str]:
        """Yield the one batch of a unit: BLAKE2b of its id, keyed with the salt.

        64 bits modulo a count of at most millions are skewed by less than 1e-12; no claim depends
        on that.
        """
        if not (count := self.batches_per_label[label]):
            return
        encoded = unit_id.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(encoded, key=bytes.fromhex(self.salt), digest_size=8).digest()
        number = int.from_bytes(digest, "big") % count
        yield self.batch_id(label, number)


@dataclass(frozen=True)
class PoissonBatches(Batches):
    """Lets each unit join each batch of its label with the label's public probability.

    Claim: a unit joins each batch with exactly this probability, independently of the other units
    and of the other batches. The coins come from a keyed pseudorandom function of the unit's place
    in the data, never of its content: copies of a text have coins of their own. The members of a
    batch are secret, and so is the key.
    Proof: docs/privacy.md, section 2.8.

    >>> batches = PoissonBatches.expected(1000, {"a": 0.5, "b": 0.5}, batch_size=50, batches=20)
    >>> dict(batches.sampling_probabilities)
    {'a': 0.1, 'b': 0.1}
    >>> joined = list(batches.joined("ab" * 32, "a", "row 7"))  # secret
    >>> batches.dp_event(ExponentialMechanism(0.1), draws=64, records_per_unit=1).name
    'self_composed'
    """

    sampling_probabilities: Mapping[str, float]

    @staticmethod
    def expected(
        public_size: int, proportions: Mapping[str, float], batch_size: int, batches: int
    ) -> PoissonBatches:
        """Divide `batches` among the labels by their proportions, at least one for each label with
        a share. A batch is expected to have `batch_size` records, or all of its label if there are
        fewer. The probability of a rare label is capped at the largest of the common labels
        (`common_shares`): otherwise it would determine the cost of the whole run.
        """
        common = common_shares(proportions)

        def probability(share: float) -> float:
            return batch_size / max(batch_size, public_size * share)

        counts = largest_remainder(batches, {k: p for k, p in proportions.items() if p > 0})
        largest = max(map(probability, common.values()))
        return PoissonBatches(
            {label: max(1, counts[label]) if label in counts else 0 for label in proportions},
            {
                label: min(probability(share), largest) if share > 0 else 0.0
                for label, share in proportions.items()
            },
        )

    def dp_event(self, draw: ExponentialMechanism, draws: int, records_per_unit: int) -> Event:
        """Return the event of all batches, with `draws` tokens each. `draw` is the event of one
        token for a unit that has all its k = `records_per_unit` rows in the batch.

        A unit of one row joins batches of one label only: the labels compose in parallel. A unit of
        k rows may join batches of m labels, with at most k - m + 1 rows in each label. Every label
        then counts with the largest probability and the largest number of batches of any label.
        """
        probabilities = self.sampling_probabilities
        counts = {label: count for label, count in self.batches_per_label.items() if count}
        if records_per_unit == 1 or len(counts) == 1:
            most_of: dict[float, int] = {}
            for label, count in counts.items():
                q = probabilities[label]
                most_of[q] = max(count, most_of.get(q, 0))
            return Parallel.of(
                SelfComposed(PoissonSubsampledDraws(q, draw.range, draws), count)
                for q, count in most_of.items()
            )
        q, most = max(probabilities.values()), max(counts.values())
        return Parallel.of(
            SelfComposed(
                PoissonSubsampledDraws(
                    q, draw.range * (records_per_unit - labels + 1) / records_per_unit, draws
                ),
                labels * most,
            )
            for labels in range(1, min(records_per_unit, len(counts)) + 1)
        )

    def joined(self, secret_key: str, label: str, place: str) -> Iterator[str]:
        """Yield the batches that the unit at `place` joins; the same ones for the same key.

        The gaps between them are geometric, by inversion in float64 with uniforms of 53 bits.
        """
        q, count = self.sampling_probabilities[label], self.batches_per_label[label]
        if not count:
            return
        if q == 1.0:
            yield from (self.batch_id(label, number) for number in range(count))
            return
        rng = generator(named_key(secret_key, "batches", label, place))
        last = -1
        while last < count:
            gaps = 1.0 + np.floor(np.log1p(-rng.random(64)) / np.log1p(-q))
            # Floats, because a gap may exceed every integer type.
            for number in last + np.cumsum(gaps):
                last = int(min(number, count))
                if last < count:
                    yield self.batch_id(label, last)
                else:
                    return

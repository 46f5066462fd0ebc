"""`HashPartition` puts each record into one of disjoint batches (Amin et al. 2024, Assumption
1)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dpray.mechanisms.batches import Batches


def new_salt() -> str:
    """Return a public salt, fixed for a run: 128 bits as hexadecimal digits."""
    return secrets.token_hex(16)


def content_id(text: str, label: str | None) -> str:
    """Return the id of a record that is its own privacy unit: a hash of its content, so that it
    depends on that record alone and not on where in which file it stands."""
    digest = hashlib.blake2b(digest_size=16)
    for part in ("" if label is None else label, text):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


def content_rank(text: str, label: str | None) -> int:
    """Return 63 bits of the content's hash, which fit Arrow's int64: which records of a unit stay
    is decided by the unit's own records."""
    return int(content_id(text, label)[:16], 16) >> 1


@dataclass(frozen=True)
class HashPartition(Batches):
    """Assigns units to batches, label by label, from public numbers and the unit's own id.

    Claim: the batch of a unit depends on its id, the public `salt` and the public counts; adding or
    removing a unit changes the rows of its own batches only. So the batches compose in parallel,
    and a run costs what one batch costs.
    Proof: docs/privacy.md, section 1.4.
    """

    salt: str

    @staticmethod
    def expected(
        public_size: int, proportions: Mapping[str, float], batch_size: int, salt: str
    ) -> HashPartition:
        """Expect `round(public_size * proportion / s)` batches for each label, at least one, and
        none for a label without a share."""
        counts = {
            label: max(1, round(public_size * proportion / batch_size)) if proportion > 0 else 0
            for label, proportion in proportions.items()
        }
        return HashPartition(counts, salt)

    def joined(self, label: str, unit_id: str) -> Iterator[str]:
        """Yield the one batch of a unit: BLAKE2b of its id, keyed with the salt.

        64 bits modulo a count of at most millions: a skew below 1e-12 that no claim rests on.
        """
        if not (count := self.batches_per_label[label]):
            return
        encoded = unit_id.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(encoded, key=bytes.fromhex(self.salt), digest_size=8).digest()
        number = int.from_bytes(digest, "big") % count
        yield self.batch_id(label, number)

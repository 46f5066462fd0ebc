"""Records sorted on disk."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

from dpray.methods.private_prediction.release import external_sort


def test_records_come_in_their_order_and_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "sorted.db"
    path.write_text("left by a run that was killed")
    records = [(place, {"text": f"\ud83d café {place}"}) for place in range(100)]
    mixed = random.Random(0).sample(records, len(records))
    assert list(external_sort(path, mixed)) == [record for _, record in records]
    assert not path.exists()
    first = external_sort(path, mixed)
    assert next(first) == records[0][1] and path.exists()
    first.close()
    assert not path.exists(), "also where nobody wants the rest"


def test_the_records_are_not_held(tmp_path: Path) -> None:
    """They are 6 MB."""
    records = ((7919 * place % 3_001, {"text": "x" * 2_000}) for place in range(3_001))
    tracemalloc.start()
    try:
        count = sum(1 for _ in external_sort(tmp_path / "sorted.db", records))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert count == 3_001

"""Texts come back from the files as they were written, by units, and only what is used is read."""

from __future__ import annotations

import random
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import torch

from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch
from dpray.methods.dp_sgd.training.step import TrainingText
from dpray.methods.dp_sgd.training.token_files import MappedUnits, shard_of, write_shard

Texts = list[tuple[str, int, TrainingText]]


def made_up(units: int, most: int) -> Texts:
    """Texts of up to `most` records a unit, mixed up; a text's first id says whose it is, the
    second its rank."""
    fixed = random.Random(0)
    texts = []
    for unit in range(units):
        for rank in fixed.sample(range(100), fixed.randint(1, most)):
            ids = (unit, rank, *(fixed.randrange(10**6) for _ in range(fixed.randrange(30))))
            texts.append((f"unit {unit}", rank, TrainingText(ids, fixed.randrange(3))))
    fixed.shuffle(texts)
    return texts


def written(folder: Path, texts: Texts, shards: int, most: int = 1) -> MappedUnits:
    for shard in range(shards):
        mine = [text for text in texts if shard_of(text[0], shards) == shard]
        write_shard(folder, shard, mine, most)
    return MappedUnits(folder, shards)


@pytest.mark.parametrize("shards", [1, 3, 50])  # fifty for forty units: some shards are empty
@pytest.mark.parametrize("most", [1, 2, 5])
def test_every_units_texts_of_lowest_rank_come_back(tmp_path: Path, shards: int, most: int) -> None:
    texts = made_up(40, 4)
    units = written(tmp_path, texts, shards, most)
    found = sorted(
        [(tuple(map(int, text.ids)), text.given) for text in units[number]]
        for number in range(len(units))
    )
    by_unit: defaultdict[str, list[tuple[int, TrainingText]]] = defaultdict(list)
    for unit, rank, text in texts:
        by_unit[unit].append((rank, text))
    expected = sorted(
        [(text.ids, text.given) for _, text in sorted(ranked, key=itemgetter(0))[:most]]
        for ranked in by_unit.values()
    )
    assert found == expected and len(found) == 40
    with pytest.raises(IndexError):
        units[40]


def test_shards_share_the_units_out_and_name_none(tmp_path: Path) -> None:
    texts = made_up(300, 1)
    written(tmp_path, texts, 3)
    sizes = [len(np.load(path)) for path in sorted(tmp_path.glob("units-*.npy"))]
    assert sum(sizes) == 300 and min(sizes) > 70
    assert all(b"unit" not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_mapped_text_makes_the_same_micro_batch(tmp_path: Path) -> None:
    [(_, _, text)] = texts = made_up(1, 1)
    [mapped] = written(tmp_path, texts, 1)[0]
    ours, theirs = MicroBatch.of([mapped], 2, 40), MicroBatch.of([text], 2, 40)
    assert (ours.ids == theirs.ids).all() and ours.ids.dtype == torch.long
    assert (ours.labels == theirs.labels).all() and (ours.mask == theirs.mask).all()


def test_only_what_is_used_is_read(tmp_path: Path) -> None:
    """A text's length is known without its ids: they are changed in the file after it was asked
    for."""
    [text] = written(tmp_path, [("u", 0, TrainingText((1, 2, 3), 1))], 1)[0]
    assert (len(text.ids), text.given) == (3, 1)
    with open(tmp_path / "ids-0.bin", "r+b") as file:
        file.write(np.array([7, 8, 9], dtype=np.int32).tobytes())
    assert list(text.ids) == [7, 8, 9]

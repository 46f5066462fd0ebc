"""Texts come back from the files as they were written, by units, and only what is used is read."""

from __future__ import annotations

import random
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch
from dpray.methods.dp_sgd.training.step import TrainingText
from dpray.methods.dp_sgd.training.token_files import (
    IDS,
    NOT_SHARED,
    TEXTS,
    MappedUnits,
    check_shards,
    shard_names,
    write_names,
    write_shard,
)
from dpray.types import InputError

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
    parts: list[Texts] = [[] for _ in range(shards)]
    for text in texts:
        parts[crc32(text[0].encode()) % shards].append(text)
    write_names(folder, [write_shard(folder, part, most) for part in parts])
    return MappedUnits(folder, shard_names(folder))


# Fifty shards for forty units: some are empty.
@pytest.mark.parametrize(("shards", "most"), [(1, 5), (3, 2), (50, 1)])
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


def test_files_name_no_unit_and_are_the_owners(tmp_path: Path) -> None:
    written(tmp_path, made_up(300, 1), 3)
    files = [path for path in tmp_path.glob("*/*") if path.is_file()]
    assert len(files) == 9
    assert all(b"unit" not in path.read_bytes() for path in files)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_a_task_that_is_repeated_makes_the_same_shard(tmp_path: Path) -> None:
    texts = made_up(40, 2)
    first = write_shard(tmp_path, texts, 2)
    (tmp_path / "0.part").mkdir()  # of a task that was killed
    assert write_shard(tmp_path, texts, 2) == first
    assert write_shard(tmp_path, texts[1:], 2) != first
    assert len([*tmp_path.iterdir()]) == 3


def test_equal_texts_of_other_units_are_other_units(tmp_path: Path) -> None:
    """Each of three files has one record with the same text: their shards are equal, and three."""
    ids = TrainingText((1, 2, 3), 1)
    names = [write_shard(tmp_path, [(f"file {number}, row 1", 7, ids)], 1) for number in range(3)]
    write_names(tmp_path, names)
    assert len({*names}) == 1
    assert len(MappedUnits(tmp_path, shard_names(tmp_path))) == 3


def test_no_shard_has_no_unit(tmp_path: Path) -> None:
    """As where data.empty leaves out every record."""
    write_names(tmp_path, [])
    assert len(MappedUnits(tmp_path, shard_names(tmp_path))) == 0
    (tmp_path / "shards.json").write_text("[")
    with pytest.raises(InputError, match="is damaged; remove the folder"):
        shard_names(tmp_path)


@pytest.mark.parametrize("file", [IDS, TEXTS])
def test_what_was_altered_or_lost_is_not_trained_on(tmp_path: Path, file: str) -> None:
    written(tmp_path, made_up(40, 2), 3)
    names = shard_names(tmp_path)
    check_shards(tmp_path, names)
    path = tmp_path / names[1] / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="does not hold the token ids that were written there"):
        check_shards(tmp_path, names[1:])
    check_shards(tmp_path, names[:1])
    path.unlink()
    with pytest.raises(InputError, match="remove the folder"):
        check_shards(tmp_path, names)


def test_a_machine_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    for use in (shard_names, lambda folder: write_shard(folder, [], 1)):
        with pytest.raises(InputError) as error:
            use(tmp_path / "elsewhere")
        assert str(error.value) == NOT_SHARED


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
    with open(tmp_path / shard_names(tmp_path)[0] / IDS, "r+b") as file:
        file.write(np.array([7, 8, 9], dtype=np.int32).tobytes())
    assert list(text.ids) == [7, 8, 9]

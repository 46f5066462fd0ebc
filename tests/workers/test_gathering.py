"""Blocks of batches worked through by actors: every batch whole and once, though actors die."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import OwnerDiedError, RayActorError

from dpray.config.config import Config
from dpray.io.file_list import file_digest
from dpray.io.formats import FilePart
from dpray.mechanisms.batches import HashPartition, PoissonBatches
from dpray.methods.config import parse_config
from dpray.types import InputError
from dpray.workers.failures import Kind, kind_of, own_errors
from dpray.workers.gathering import (
    MOST_BLOCKS,
    MOST_PARTS,
    BatchGathering,
    block_count,
    cut_blocks,
    outcome_lists,
    outcomes_on_ray,
    part_of,
    tasks,
)
from dpray.workers.rows import check_cut_files, parts_on_ray
from dpray.workers.shards import Shards
from tests.integration.processes import wait_for

BATCHES = 12


def is_lost(block: Any) -> bool:
    """Return whether a process that does not own the block, like an actor of the pool, fails to
    read it."""

    def rows(blocks: list[Any]) -> int:
        return int(ray.get(blocks[0]).num_rows)

    try:
        ray.get(ray.remote(num_cpus=0)(rows).remote([block]))
    except OwnerDiedError:
        return True
    return False


@given(st.lists(st.integers(0, 40), max_size=120), st.integers(1, 12), st.integers(1, 5))
def test_a_block_is_cut_in_parts_and_these_in_tasks_of_whole_batches(
    rows: list[int], task_size: int, count: int
) -> None:
    block = pa.table(
        {"n": range(len(rows)), "batch": pa.array([f"0/{row}" for row in rows], pa.string())}
    )
    parts = [part_of(block, number, count) for number in range(count)]
    sizes = [len(each.column("batch").unique()) for each in parts]
    assert sum(sizes) == len(set(rows)), "a batch is in one part alone"
    assert max(sizes) - min(sizes) <= 1
    found = [task.to_pylist() for each in parts for task in tasks(each, task_size)]
    assert sorted(row["n"] for task in found for row in task) == list(range(len(rows)))
    batches = [{row["batch"] for row in task} for task in found]
    assert sum(map(len, batches)) == len(set(rows)), "a batch is in one task alone"
    assert all(0 < len(task) < 1.5 * task_size + 1 for task in batches)
    only = {f"0/{row}" for row in rows[::2]}
    left = [part_of(block, number, count, only) for number in range(count)]
    assert {name for each in left for name in each.column("batch").to_pylist()} == only


@pytest.mark.parametrize(
    ("batches", "unit"),
    [
        (PoissonBatches({"a": 3}, {"a": 1.0}), None),
        (HashPartition({"a": 1}, salt="5a"), "somebody"),
    ],
)
def test_a_row_in_a_batch_has_what_the_batch_needs_and_nothing_else(
    batches: PoissonBatches | HashPartition, unit: str | None
) -> None:
    row = {"text": "a text", "label": "a", "unit": "somebody", "rank": 7}
    wanted = list(batches.batch_ids())
    found = BatchGathering(batches, "ab" * 32, 5)._tables([row], frozenset(wanted))
    rows = [{"text": "a text", "unit": unit, "batch": batch} for batch in wanted]
    assert pa.concat_tables(found).to_pylist() == rows


def test_blocks_are_cut_one_after_the_other_and_their_references_let_go() -> None:
    blocks = ["a", "b"]
    parts = cut_blocks(blocks, 2)
    assert next(parts).arguments == ("a", 0, 2) and blocks == ["b"]
    assert [each.arguments[:2] for each in parts] == [("a", 1), ("b", 0), ("b", 1)]
    assert [len(list(cut_blocks(["a"], count))) for count in (0, 1, 99)] == [1, 1, MOST_PARTS]


@pytest.mark.parametrize(
    ("tasks", "actors", "rows", "expected"),
    [
        (3, 1, 24 * 127, 3),  # never more than tasks
        (985, 1, 10**6, 30),  # by rows
        (985, 8, 10**6, 64),  # by actors
        (98_426, 512, 10**8, MOST_BLOCKS),
        (10**6, 10_000, 10**9, MOST_BLOCKS),
        (0, 1, 0, 1),
    ],
)
def test_the_number_of_blocks_stays_small_however_many_batches_there_are(
    tasks: int, actors: int, rows: int, expected: int
) -> None:
    assert block_count(tasks, actors, rows) == expected


def steps_of(events: list[Any]) -> Generator[list[Any]]:
    """Yield the lists one after the other, and raise those that are exceptions."""
    for event in events:
        if isinstance(event, BaseException):
            raise event
        yield event


def test_outcomes_of_many_steps_are_handed_on_together_and_none_waits_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0, 1, 1.9, 2, 2, 3, 4, 4])
    steps = steps_of([["a"], ["b"], ["c"], [], ["d"], []])
    monkeypatch.setattr("dpray.workers.gathering.monotonic", lambda: next(times))
    found = list(outcome_lists(steps, 512, seconds=2))
    assert found == [["a", "b", "c"], ["d"]]


def test_outcomes_are_handed_on_before_they_are_too_many() -> None:
    steps = steps_of([[n, n] for n in range(5)])
    assert list(map(len, outcome_lists(steps, 4))) == [4, 4, 2]


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_what_was_finished_before_an_error_is_handed_on_and_the_error_raised(
    error: BaseException,
) -> None:
    finished = outcome_lists(steps_of([[1], [2], [3], error]), 2)
    assert [next(finished), next(finished)] == [[1, 2], [3]]
    with pytest.raises(type(error)):
        next(finished)


def test_what_could_not_be_taken_is_not_handed_on_again() -> None:
    finished = outcome_lists(steps_of([[1], [2], [3]]), 1)
    assert next(finished) == [1]
    finished.close()
    assert list(finished) == []


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Config:
    return parse_config(settings(runtime__ray_address=None, runtime__actors=2))


def workers(folder: Path, fault: str = "") -> Callable[[Any], Any]:
    """Makes workers with room for two batches, which say where a batch was. They note what they
    begin and how often their engine was started. A fault strikes in batch 5, once the outcome of
    batch 17 has come, which has the block of batch 5; the first worker dies of it."""

    def make(engine: Any) -> Any:
        import os
        import time
        import uuid
        from itertools import chain, islice

        class Worker:
            def __init__(self) -> None:
                self.worker_id = uuid.uuid4().hex
                (folder / f"made-{self.worker_id}").touch()
                self.starts = 0

            def work(self, tasks: Any) -> Any:
                self.starts += 1
                coming = chain.from_iterable(self.begun(task) for task in tasks)
                under_way: list[Any] = []
                while True:
                    under_way += islice(coming, 2 - len(under_way))
                    if not under_way:
                        return
                    batch = under_way.pop(0)["batch"]
                    if batch == "5" and fault:
                        self.strike()
                    yield {"batch": batch, "worker": self.worker_id, "starts": self.starts}

            def begun(self, task: Any) -> Any:
                with open(folder / "begun", "a") as file:
                    file.writelines(f"{row['batch']}\n" for row in task)
                return task

            def strike(self) -> None:
                while not (folder / "came-17").exists():
                    time.sleep(0.01)
                is_first = not (folder / "struck").exists()
                with open(folder / "struck", "a") as file:
                    print(self.worker_id, file=file)
                if is_first:
                    os._exit(1)

        return Worker()

    return make


def counters() -> Any:
    """The class of shards' workers that count their records; it travels to actors as a value."""

    class Counter:
        def __init__(self, config: Config) -> None:
            self.number = 0

        def load(self, rows: Any) -> None:
            self.number += len(rows)

        def count(self) -> int:
            return self.number

    return Counter


def no_engine() -> Any:
    return None


def work(
    config: Config,
    folder: Path,
    fault: str = "",
    blocks: list[Any] | None = None,
    parts: int = 1,
) -> tuple[list[str], Exception | None]:
    """Return the batches whose outcomes came, and the error at the end. Block n has the batches n
    and n + 12."""
    if blocks is None:
        blocks = [
            ray.put(pa.table({"batch": [str(number), str(number + BATCHES)]}))
            for number in range(BATCHES)
        ]
    made, found = cut_blocks(blocks, parts), list[str]()
    try:
        outcomes = outcomes_on_ray(config, made, no_engine, workers(folder, fault), 1)
        with closing(outcomes) as results:
            for came in results:
                for outcome in came:
                    found.append(outcome["batch"])
                    (folder / f"came-{outcome['batch']}").touch()
                    # The engine runs on from part to part, until there are none.
                    assert outcome["starts"] <= 2
    except Exception as error:
        return found, error
    return found, None


def begun(folder: Path) -> Counter[str]:
    return Counter((folder / "begun").read_text().split())


EACH_ONCE = {str(number): 1 for number in range(2 * BATCHES)}


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
class TestOnRay:
    def test_what_a_lost_actor_leaves_is_done_by_another_one_and_nothing_else_twice(
        self, config: Config, tmp_path: Path
    ) -> None:
        """Batch 17 comes before batch 5: names are sorted. It has come, so that it is not begun
        anew."""
        found, error = work(config, tmp_path, "dies once")
        assert error is None and Counter(found) == EACH_ONCE
        repeated = begun(tmp_path) - Counter(EACH_ONCE)
        assert "17" not in repeated and max(repeated.values()) == 1
        assert 1 <= len(repeated) <= 3, "two under way, and one whose outcome did not come"
        assert 2 <= len(list(tmp_path.glob("made-*"))) <= 3

    def test_a_lost_block_costs_no_actor_and_its_batches_alone(
        self, config: Config, tmp_path: Path
    ) -> None:
        class Owner:
            def put(self) -> list[Any]:
                return [ray.put(pa.table({"batch": [str(number) for number in range(100, 110)]}))]

        owner: Any = ray.remote(num_cpus=0)(Owner).remote()
        [lost] = ray.get(owner.put.remote())
        ray.kill(owner)
        # Ray takes a second or two to notice, and hands the block out until then.
        wait_for(lambda: is_lost(lost))
        whole = [ray.put(pa.table({"batch": [f"{n}", f"{n + 1}"]})) for n in range(0, 8, 2)]
        one = config.model_copy(update={"runtime": config.runtime.model_copy(update={"actors": 1})})
        found, error = work(one, tmp_path, blocks=[*whole[:2], lost, *whole[2:]], parts=2)
        assert Counter(found) == {str(number): 1 for number in range(8)}
        assert error is not None and kind_of(error) is Kind.LOST
        assert not isinstance(error, RayActorError)
        assert len(list(tmp_path.glob("made-*"))) == 1

    @pytest.mark.parametrize("unit", [None, "who"])
    def test_files_without_a_record_have_their_batches_too(
        self, settings: Callable[..., dict[str, Any]], tmp_path: Path, unit: str | None
    ) -> None:
        """To fail would tell that there is no record."""
        folder = tmp_path / "files"
        folder.mkdir()
        for number in range(2):
            line = json.dumps({"text": " ", "label": "a", "who": number})
            (folder / f"{number}.jsonl").write_text(f"{line}\n")
        changes = {"path": str(folder), "empty": "skip"} | ({"unit": unit} if unit else {})
        tree = settings(runtime__ray_address=None, runtime__actors=2)
        config = parse_config(tree | {"data": tree["data"] | changes})
        gathering = BatchGathering(
            PoissonBatches({"a": 2, "b": 1}, {"a": 0.5, "b": 0.5}), "ab" * 32, 5
        )
        wanted = list(gathering.batches.batch_ids())
        parts = gathering.on_ray(config, wanted, 1)
        steps = outcomes_on_ray(config, parts, no_engine, workers(tmp_path), 1)
        outcomes = [outcome for outcomes in steps for outcome in outcomes]
        assert {outcome["batch"] for outcome in outcomes} == set(wanted)
        with closing(Shards(config, counter := counters())) as shards:
            assert sum(shards.each(counter.count)) == 0

    def test_lines_of_a_cut_file_are_counted_in_tasks(self, tmp_path: Path) -> None:
        files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.csv"]
        files[0].write_text('{"n": 1}\n\n{"n": 2}\n{"n": 3}\n')
        files[1].write_text('{"n": 4}\n')
        files[2].write_text("n\n" + "5\n" * 20)
        parts = parts_on_ray([FilePart(str(f), file_number=n) for n, f in enumerate(files)], 10)
        assert parts == [
            FilePart(str(files[0]), 0, 10, 0, 0),
            FilePart(str(files[0]), 10, 20, 2, 1),
            FilePart(str(files[0]), 20, 28, 4, 3),
            FilePart(str(files[1]), file_number=1),
            FilePart(str(files[2]), file_number=2),
        ]
        digests = [file_digest(str(file)) for file in files]
        hashed = [FilePart(str(f), file_number=n, sha256=digests[n]) for n, f in enumerate(files)]
        found = [part.sha256 for part in parts_on_ray(hashed, 10)]
        assert found == [None, None, None, *digests[1:]], "each file is hashed once"
        check_cut_files(hashed, 10)
        files[0].write_text('{"n": 1}\n\n{"n": 2}\n{"n": 4}\n')
        with pytest.raises(InputError, match=r"a\.jsonl has changed since"), own_errors():
            check_cut_files(hashed, 10)

    def test_a_file_that_changed_since_it_was_hashed_is_refused(
        self, config: Config, records_file: Path
    ) -> None:
        data = config.data.hashed([file_digest(str(records_file))])
        config = config.model_copy(update={"data": data})
        with closing(Shards(config, counter := counters())) as shards:
            assert sum(shards.each(counter.count)) == 60
        records_file.write_text(records_file.read_text().replace("Marlowe 7", "Marlowe seven"))
        with pytest.raises(InputError, match=r"^data\.path: records\.jsonl has changed"):
            Shards(config, counters())

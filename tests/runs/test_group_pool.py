"""Blocks of groups worked through by actors: every group whole and once, though actors die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import OutOfMemoryError, RayActorError

from dpray.config.config import Config, parse_config
from dpray.engines.base import EngineError
from dpray.io.records import Piece
from dpray.runs.cluster import ended_for_memory, was_lost
from dpray.runs.group_pool import GroupPool, tasks
from dpray.runs.groups import MOST_BLOCKS, block_count
from dpray.runs.rows import pieces_on_ray

GROUPS = 12


@given(st.lists(st.integers(0, 40), max_size=120), st.integers(1, 12))
def test_a_task_has_whole_groups_and_about_as_many_as_it_should(
    rows: list[int], task_size: int
) -> None:
    block = pa.table({"n": range(len(rows)), "batch": [f"0/{row}" for row in rows]})
    found = list(tasks(block, "batch", task_size))
    assert sorted(row["n"] for task in found for row in task) == list(range(len(rows)))
    groups = [{row["batch"] for row in task} for task in found]
    assert sum(map(len, groups)) == len(set(rows)), "a group is in one task alone"
    assert all(len(task) < 1.5 * task_size + 1 for task in groups)
    assert len(groups) == 1 or all(len(task) > task_size / 2 - 1 for task in groups)


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


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Config:
    return parse_config(settings(runtime__ray_address=None, runtime__actors=2))


def workers(folder: Path, fault: str = "") -> Callable[[], Any]:
    """Makes workers that say where a group was; a fault strikes at group 5, "dies" once."""

    def make() -> Any:
        import os
        import uuid
        from itertools import chain

        from dpray.engines.base import EngineError

        class Worker:
            def __init__(self) -> None:
                self.name = uuid.uuid4().hex
                (folder / f"made-{self.name}").touch()
                if fault == "never made":
                    raise EngineError("there is no GPU")
                if fault == "dies when made":
                    os._exit(1)

            def work(self, tasks: Any) -> Any:
                for row in chain.from_iterable(tasks):
                    if row["batch"] == "5" and fault == "low on memory":
                        raise OutOfMemoryError("the node was running low on memory")
                    if row["batch"] == "5" and fault == "dies":
                        os._exit(1)
                    if row["batch"] == "5" and fault == "an engine fails":
                        raise EngineError("the GPU is gone")
                    yield {"batch": row["batch"], "worker": self.name}

        return Worker()

    return make


def work(config: Config, folder: Path, fault: str = "") -> tuple[list[str], Exception | None]:
    """Return the groups whose outcomes came, and the error at the end."""
    blocks = [
        ray.put(pa.table({"batch": [str(number), str(number + GROUPS)]}))
        for number in range(GROUPS)
    ]
    pool = GroupPool(config, workers(folder, fault), "batch", task_size=1)
    found: list[str] = []
    try:
        with closing(pool.work(blocks)) as outcomes:
            for task in outcomes:
                assert len(task) <= 1
                found += [outcome["batch"] for outcome in task]
    except Exception as error:
        return found, error
    return found, None


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
class TestOnRay:
    def test_every_group_comes_once(self, config: Config, tmp_path: Path) -> None:
        found, error = work(config, tmp_path)
        assert Counter(found) == {str(number): 1 for number in range(2 * GROUPS)}
        assert error is None and 1 <= len(list(tmp_path.glob("made-*"))) <= 2

    def test_a_lost_actor_is_replaced_and_costs_its_block_alone(
        self, config: Config, tmp_path: Path
    ) -> None:
        """Group 17 comes before group 5: names are sorted. The error comes at the end."""
        found, error = work(config, tmp_path, "dies")
        assert Counter(found) == {str(n): 1 for n in range(2 * GROUPS) if n != 5}
        assert isinstance(error, RayActorError) and was_lost(error)
        assert 2 <= len(list(tmp_path.glob("made-*"))) <= 3

    def test_an_engine_that_fails_is_replaced_while_the_others_go_on(
        self, config: Config, tmp_path: Path
    ) -> None:
        found, error = work(config, tmp_path, "an engine fails")
        assert Counter(found) == {str(n): 1 for n in range(2 * GROUPS) if n != 5}
        assert isinstance(error, EngineError) and str(error) == "the GPU is gone"
        assert 2 <= len(list(tmp_path.glob("made-*"))) <= 3

    def test_want_of_memory_ends_the_execution_at_once(
        self, config: Config, tmp_path: Path
    ) -> None:
        one = config.model_copy(update={"runtime": config.runtime.model_copy(update={"actors": 1})})
        found, error = work(one, tmp_path, "low on memory")
        assert error is not None and ended_for_memory(error) and not was_lost(error)
        assert "5" not in found and "6" not in found and len(list(tmp_path.glob("made-*"))) == 1

    def test_a_worker_that_cannot_be_made_is_said_as_it_is(
        self, config: Config, tmp_path: Path
    ) -> None:
        found, error = work(config, tmp_path, "never made")
        assert found == [] and isinstance(error, EngineError) and str(error) == "there is no GPU"

    def test_actors_that_only_die_are_given_up(self, config: Config, tmp_path: Path) -> None:
        found, error = work(config, tmp_path, "dies when made")
        assert found == [] and isinstance(error, RayActorError)
        assert len(list(tmp_path.glob("made-*"))) <= 2 * config.runtime.max_attempts

    def test_lines_of_a_cut_file_are_counted_in_tasks(self, tmp_path: Path) -> None:
        files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.csv"]
        files[0].write_text('{"n": 1}\n\n{"n": 2}\n{"n": 3}\n')
        files[1].write_text('{"n": 4}\n')
        files[2].write_text("n\n" + "5\n" * 20)
        pieces = pieces_on_ray(list(map(str, files)), 10)
        assert pieces == [
            Piece(str(files[0]), 0, 10, 0, 0),
            Piece(str(files[0]), 10, 20, 2, 1),
            Piece(str(files[0]), 20, 28, 4, 3),
            Piece(str(files[1]), file_number=1),
            Piece(str(files[2]), file_number=2),
        ]

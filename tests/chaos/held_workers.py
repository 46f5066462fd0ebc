"""Workers of Ray that count the states that they come to, and stand still at one of them.

`python held_workers.py FOLDER STATE NUMBER CONFIG` runs a configuration on the cluster of
RAY_ADDRESS, with the engine of `tests.faults.driver` and an embedder without a model, unless it
trains a model. The time of that NUMBER that any worker comes to STATE, it makes the file
FOLDER/held, and waits until FOLDER/go is there; if that says `memory`, it fills the memory until
Ray's memory monitor ends it. With the NUMBER 0 none waits.

The public coins of all runs are the same, and exact sums get no noise: a run in which something was
lost releases what a run without a loss does. FOLDER/groups has the digest of each batch's rows.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

LEDGER = {
    "after reserve": "charged",
    "after begin": "before the draw",
    "before publish": "after the draw",
    "uncommitted publish": "publishing",
    "after publish": "published",
}
"""The states in which the accountant is, by the points of its ledger."""

STATES = ("read", "part", *LEDGER.values())

PLACES = {
    # the functions with whose answers a worker is in a state
    "dpray.workers.rows:record_rows": "read",
    "dpray.workers.shards:ShardActor.load": "part",
    "dpray.workers.shards:ShardActor.call": "part",
    "dpray.workers.engine_pool:EngineWorker._write": "part",
    "dpray.methods.dp_sgd.algorithm:share": "part",
    "tests.faults.driver:decoded": "part",
}


SECONDS_OF_A_TEXT = 0.5
"""The batches of private prediction are published in several parts then."""


def come_to(folder: Path, state: str, held: str, number: int) -> None:
    passed = next(n for n in count(1) if first(folder / "passed" / f"{state} {n}"))
    if (state, passed) != (held, number):
        return
    (folder / "held.new").write_text(str(os.getpid()))
    (folder / "held.new").rename(folder / "held")
    while not (folder / "go").exists():
        time.sleep(0.02)
    if (folder / "go").read_text() == "memory":
        from tests.chaos.faulty_workers import fill_the_memory

        fill_the_memory("memory")


def first(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def install() -> None:
    """Change the functions of all states, in a process that has just started."""
    folder, held, number = json.loads(os.environ["DPRAY_TEST_FAULT"])
    from dpray.workers import shards
    from tests.chaos.points import watch_ledger
    from tests.engines.bag_of_words import BagOfWords

    shards.SentenceTransformerEmbedder = BagOfWords  # type: ignore

    def reach(state: str) -> None:
        come_to(Path(folder), state, held, number)

    def at_point(point: str) -> None:
        for start, state in LEDGER.items():
            if point.startswith(start):
                reach(state)

    watch_ledger(at_point)
    for place, state in PLACES.items():
        module, _, name = place.partition(":")
        owner: Any = importlib.import_module(module)
        *classes, name = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        setattr(owner, name, coming(getattr(owner, name), state, reach, Path(folder)))


def coming(
    function: Callable[..., Any], state: str, reach: Callable[[str], None], folder: Path
) -> Callable[..., Any]:
    @wraps(function)
    def comes(*arguments: Any, **options: Any) -> Any:
        if function.__name__ == "_write":  # after it the run may have all that it needs
            reach(state)
            return function(*arguments, **options)
        found = function(*arguments, **options)
        if function.__name__ == "record_rows":
            return rows(found)
        if function.__name__ == "decoded":
            [group] = arguments
            if "/" not in group.group_id:  # the engine's own tests have none
                return found
            time.sleep(SECONDS_OF_A_TEXT)
            digest = hashlib.sha256(repr(list(map(tuple, group.prompts))).encode()).hexdigest()
            with open(folder / "groups", "a") as file:
                file.write(f"{group.group_id} {digest}\n")
        reach(state)
        return found

    def rows(found: Iterable[Any]) -> Iterator[Any]:
        for number, row in enumerate(found):
            if number == 1:
                reach(state)
            yield row

    return comes


def main(folder: str, held: str, number: str, config: str) -> int:
    from dpray.mechanisms import discrete_noise
    from dpray.runs import runner
    from tests.chaos.faulty_workers import run_with_hook

    Path(folder, "passed").mkdir(exist_ok=True)
    runner.new_salt = lambda: "5a" * 16  # type: ignore[attr-defined]
    discrete_noise._noisy = lambda measurement, counts_N: counts_N.astype("int64")
    hook = "tests.chaos.held_workers.install"
    return run_with_hook(hook, [folder, held, int(number)], f"{folder}/marker", config)


if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).parents[2]))
    sys.exit(main(*sys.argv[1:5]))

"""A driver whose engine is the real one with a fault in it.

`python fault_driver.py FAULT MARKER CONFIG` runs a configuration like `dpray run CONFIG --json`.
The file MARKER is seen by all processes of the cluster. FAULT is

- `fails_once`: `decode_lockstep` raises when two texts of a task are finished, and makes MARKER,
  after which it does not;
- `waits`: an engine waits in its second task, when two texts are finished, until MARKER is there;
- `cannot_load`: no engine can be loaded;
- `loads_once`: only the first engine that is loaded, anywhere, can be, and makes MARKER.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from dpray import registry as methods
from dpray.config.config import EngineConfig, load_config
from dpray.engines.base import Engine, EngineError, LockstepGroup, LockstepResult
from dpray.runs.engine import build_engine
from dpray.types import DprayError


def first_time(marker: str) -> bool:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Faulty:
    """An engine that does something else when it has finished two texts of a task."""

    def __init__(self, engine: Engine, fault: Callable[[], None]) -> None:
        self.engine, self.fault = engine, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def decode_lockstep(
        self,
        groups: Iterable[LockstepGroup],
        then: Callable[[LockstepResult], LockstepGroup | None],
    ) -> None:
        finished = 0

        def failing(result: LockstepResult) -> LockstepGroup | None:
            nonlocal finished
            finished += 1
            following = then(result)
            if finished == 2:
                self.fault()
            return following

        self.engine.decode_lockstep(groups, failing)


def fail_once(marker: str) -> None:
    if first_time(marker):
        raise EngineError("a rank is dead")


class Wait:
    """Counts the tasks of an engine."""

    def __init__(self, marker: str) -> None:
        self.marker, self.tasks = Path(marker), 0

    def __call__(self) -> None:
        self.tasks += 1
        while self.tasks == 2 and not self.marker.exists():
            time.sleep(0.05)


def build(fault: str, marker: str, section: EngineConfig, **options: Any) -> Any:
    if fault == "cannot_load" or (fault == "loads_once" and not first_time(marker)):
        raise EngineError("there is no GPU here")
    engine = build_engine(section, **options)
    if fault == "fails_once":
        return Faulty(engine, partial(fail_once, marker))
    return Faulty(engine, Wait(marker)) if fault == "waits" else engine


def main(fault: str, marker: str, path: str) -> int:
    try:
        report = methods.run(load_config(path), build=partial(build, fault, marker))
    except DprayError as error:
        print(f"dpray: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))

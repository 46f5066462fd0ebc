"""A driver whose engine is the real one with a fault in it.

`python fault_driver.py FAULT MARKER CONFIG` runs a configuration like `dpray run CONFIG --json`.
The file MARKER is there from the fault's first time on, for all processes of the cluster. FAULT is

- `fails_once`: `decode_lockstep` raises once, when two texts are finished;
- `cannot_load`: no engine can be loaded;
- `loads_once`: only the first engine that is loaded, anywhere, can be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from dpray import registry as methods
from dpray.config.config import EngineConfig, load_config
from dpray.engines.base import Engine, EngineError, LockstepGroup, LockstepResult, NextGroup
from dpray.runs.engine import build_engine
from dpray.types import DprayError


def first_time(marker: str) -> bool:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FailsOnce:
    def __init__(self, engine: Engine, marker: str) -> None:
        self.engine, self.marker = engine, marker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def decode_lockstep(self, groups: Iterable[LockstepGroup], next_group: NextGroup) -> None:
        finished = 0

        def failing(result: LockstepResult) -> LockstepGroup | None:
            nonlocal finished
            finished += 1
            following = next_group(result)
            if finished == 2 and first_time(self.marker):
                raise EngineError("a rank is dead")
            return following

        self.engine.decode_lockstep(groups, failing)


def build(fault: str, marker: str, section: EngineConfig, **options: Any) -> Any:
    if fault == "cannot_load" or (fault == "loads_once" and not first_time(marker)):
        raise EngineError("there is no GPU here")
    engine = build_engine(section, **options)
    return FailsOnce(engine, marker) if fault == "fails_once" else engine


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

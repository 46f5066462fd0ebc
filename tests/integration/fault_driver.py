"""A driver whose engine is the real one with a fault in it.

`python fault_driver.py FAULT MARKER CONFIG` runs a configuration like `dpray run CONFIG --json`.
The file MARKER is seen by all processes of the cluster. FAULT is

- `fails_once`: `decode_lockstep` raises when two texts of a call are finished, and makes MARKER,
  after which it does not;
- `waits`: when two texts of its second block of groups are finished, or two prompts are answered,
  an engine makes a file MARKER.PID and waits until MARKER is there;
- `loads_once`: only the first engine that is loaded, anywhere, can be, and makes MARKER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dpray import registry as methods
from dpray.config.config import EngineConfig, load_config
from dpray.engines.base import (
    Completion,
    Engine,
    EngineError,
    Lockstep,
    LockstepGroup,
    LockstepResult,
    OnCompletion,
    Prompt,
)
from dpray.runs.engine import build_engine
from dpray.types import DprayError

OnText = Callable[[int, LockstepResult, LockstepGroup | None], None]
"""Gets the number of texts so far, a finished text, and the next one of the same rows, if any."""


def watched(texts: Lockstep, on_text: OnText) -> Lockstep:
    """The same texts; `on_text` is called when a text was taken and what follows it is known."""
    following: LockstepGroup | None = None
    finished = 0
    while True:
        try:
            text = texts.send(following)
        except StopIteration:
            return
        following = yield text
        finished += 1
        on_text(finished, text, following)


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

    def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
        def failing(finished: int, result: LockstepResult, following: LockstepGroup | None) -> None:
            if finished == 2 and first_time(self.marker):
                raise EngineError("a rank is dead")

        return watched(self.engine.decode_lockstep(groups), failing)


class Waits:
    def __init__(self, engine: Engine, marker: str) -> None:
        self.engine, self.marker, self.tasks = engine, Path(marker), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def wait(self) -> None:
        self.marker.with_suffix(f".{os.getpid()}").touch()
        while not self.marker.exists():
            time.sleep(0.05)

    def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
        def waiting(finished: int, result: LockstepResult, following: LockstepGroup | None) -> None:
            # The probe of the engine's rounding comes before, one text at a time.
            self.tasks += finished == 2
            if finished == 2 and self.tasks == 2:
                self.wait()

        return watched(self.engine.decode_lockstep(groups), waiting)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Any, on_completion: OnCompletion
    ) -> list[Completion]:
        answered = 0

        def waiting(i: int, completion: Completion) -> None:
            nonlocal answered
            answered += 1
            on_completion(i, completion)
            if answered == 2:
                self.wait()

        return self.engine.generate(prompts, sampling, waiting)


def build(fault: str, marker: str, section: EngineConfig, **options: Any) -> Any:
    if fault == "loads_once" and not first_time(marker):
        raise EngineError("there is no GPU here")
    engine = build_engine(section, **options)
    if fault == "fails_once":
        return FailsOnce(engine, marker)
    return Waits(engine, marker) if fault == "waits" else engine


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

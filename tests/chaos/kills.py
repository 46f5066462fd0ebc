"""Kills a run of a method at each of its points by name, and runs it to its end after that.

    python -m tests.chaos.kills METHOD FOLDER [--postgresql SOCKET]
        [--only REGEX] [--first N] [--round N ...]

A rehearsal writes down the names of all points. Then each of them (or those that REGEX matches, but
for the first N points) is a case of its own: a run is killed there, recounted, run again to its
end, and recounted. With `--round` a case is a story of several kills at points that its number
chooses. Each case is a line of JSON on stdout: `kills` is how many of them came to pass, and
`result` is "held", or says what did not. A case's processes are forks of this one, which has loaded
the libraries. With libfaketime, the clock jumps at every point.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpray.types import DprayError
from tests.chaos.points import Jumping, Passed, arm
from tests.chaos.rehearsed import METHODS, Rehearsed, make_budget
from tests.databases import new_schema

MARKER = b"Marlowe"
SECONDS = 300
"""A run that takes longer is taken to hang."""
MOST_KILLS = 5
RECOUNT = Path(__file__).with_name("recount.py")


class Case:
    """One run in a folder of its own, which is killed and started again."""

    def __init__(self, rehearsed: Rehearsed, folder: Path, socket: str | None) -> None:
        self.rehearsed, self.folder = rehearsed, folder
        self.kills = 0
        folder.mkdir()
        self.output, self.report = folder / "out", folder.with_suffix(".report")
        self.url = new_schema(socket) if socket else f"sqlite:///{folder}/ledger.db"
        # Otherwise the run makes its ledger: those are points of it too.
        if socket or rehearsed.method == "dp_sgd":
            self.forked(lambda: make_budget(self.url))

    def run(self, deadly: str = "", points: Path | None = None) -> int:
        """Return the exit code of one start of the run, negative for the signal that ended it."""

        def start() -> None:
            passed = Passed(deadly, points)
            jumps = os.environ.get("FAKETIME_TIMESTAMP_FILE")
            arm(Jumping(passed, Path(jumps)) if jumps else passed, self.folder)
            report = self.rehearsed.run(self.rehearsed.tree(self.output, self.url))
            self.report.write_text(json.dumps(report))
            if points is not None:
                points.with_suffix(".modules").write_text("\n".join(sys.modules))

        return self.forked(start)

    @property
    def printed(self) -> Path:
        return self.folder / "printed"

    def forked(self, work: Callable[[], None]) -> int:
        if (child := os.fork()) == 0:
            signal.alarm(SECONDS)
            file = os.open(self.printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os._exit(exit_code(work))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def faults(self) -> list[str]:
        """Return what a recount finds, and the files that hold a private text."""
        ledger = Path(self.url.removeprefix("sqlite:///"))
        faults = []
        if not self.url.startswith("sqlite") or ledger.exists():
            since = self.folder.with_suffix(".since")
            run, options = str(self.output), ["--since", str(since)]
            command = [sys.executable, str(RECOUNT), self.url, run, *options]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.stderr:
                faults.append(ended.stderr)
            faults += ended.stdout.strip().splitlines()
        for path in self.folder.rglob("*"):
            if path.is_file() and MARKER in path.read_bytes():
                faults.append(f"{path.name} holds a private text")
        return faults

    def published(self) -> list[str]:
        """Return the texts in the batches that are published and not yet released."""
        lines = [
            json.loads(line)
            for part in (self.output / "private" / "parts").glob("*.jsonl")
            for line in part.read_text().splitlines()
        ]
        return [text.strip() for line in lines for text, *_ in line["examples"] if text.strip()]

    def tell(self, kills: list[str], records: int) -> str:
        """Run the case; return "held", or what did not."""
        texts: list[str] = []
        for deadly in kills:
            code = self.run(deadly)
            if faults := self.faults():
                return f"after {deadly}: {'; '.join(faults)}"
            if code not in (0, -signal.SIGKILL):
                return f"exit code {code} before {deadly}: {self.printed.read_text()[-500:]}"
            texts += self.published()
            if code == 0 and deadly == kills[0]:
                return f"a whole run never came to {deadly}"
            if code == 0:
                break  # the rest of the run has no such point
            self.kills += 1
        if (code := self.run()) != 0:
            return f"exit code {code} in the end: {self.printed.read_text()[-500:]}"
        faults = self.faults() + left_behind(self.output)
        lines = (self.output / "synthetic.jsonl").read_bytes().splitlines()
        released = {json.loads(line)["text"] for line in lines}
        if len(lines) != records:
            faults.append(f"{len(lines)} records, not {records}")
        faults += (f"'{text}' was published and is lost" for text in set(texts) - released)
        return "; ".join(faults) or "held"


def left_behind(output: Path) -> list[str]:
    """Return what a finished run should not have in its folder any more."""
    private = output / "private"
    patterns = ("**/*.tmp", "private/staging/*", "private/parts/*.jsonl", "private/*.key")
    found = [path for pattern in patterns for path in output.glob(pattern)]
    found += [
        private / name
        for name in ("tokens", "embeddings", "checkpoints", "released_model", "model")
    ]
    return [f"{path.name} was left behind" for path in found if path.exists()]


def exit_code(work: Callable[[], None]) -> int:
    try:
        work()
    except DprayError as error:
        print(f"dpray: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def rehearse(case: Case) -> tuple[list[str], int]:
    """Return the names of a run's points in their order, and the number of its records. What the
    run imported is imported here too: later runs, which are forks, do not load it anew."""
    names = case.folder.with_suffix(".points")
    code = case.run(points=names)
    assert code == 0, case.printed.read_text()
    assert not (faults := case.faults() + left_behind(case.output)), faults
    records: int = json.loads(case.report.read_text())["records"]
    for module in names.with_suffix(".modules").read_text().splitlines():
        with suppress(ImportError):  # some are made by a library, and have no file
            importlib.import_module(module)
    return names.read_text().splitlines(), records


def stories(points: list[str], asked: argparse.Namespace) -> Iterator[tuple[int, list[str]]]:
    """Yield each case's number, and the points at which it is killed one after the other."""
    if not asked.round:
        for number, point in enumerate(points):
            if number >= asked.first and re.search(asked.only, point):
                yield number, [point]
    for number in asked.round:
        rng = random.Random(f"{asked.method}, kills, round {number}")
        yield number, rng.choices(points, k=rng.randint(2, MOST_KILLS))


def tell_all(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shared = asked.folder / "shared"
    shared.mkdir(parents=True)
    rehearsed = Rehearsed(asked.method, shared)
    points, records = rehearse(Case(rehearsed, asked.folder / "rehearsal", asked.postgresql))
    about = {
        "method": asked.method,
        "database": "postgresql" if asked.postgresql else "sqlite",
        "points": len(points),
    }
    for number, kills in stories(points, asked):
        case = Case(rehearsed, asked.folder / f"case-{number}", asked.postgresql)
        result = case.tell(kills, records)
        yield about | {"round": number, "story": kills, "kills": case.kills, "result": result}
        if result == "held":
            shutil.rmtree(case.folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--postgresql", help="the folder of a server's socket")
    parser.add_argument("--only", default="", help="the names of the points that are tried")
    parser.add_argument(
        "--first", type=int, default=0, help="the points before this one are not tried"
    )
    parser.add_argument("--round", type=int, action="append", default=[])
    held = True
    for line in tell_all(parser.parse_args()):
        print(json.dumps(line), flush=True)
        held = held and line["result"] == "held"
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

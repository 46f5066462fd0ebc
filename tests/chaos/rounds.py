"""Ends one process of a run at a state of it, round after round, on a cluster of three nodes.

    python -m tests.chaos.rounds [--method NAME ...] [--first 0] [--rounds 20] [--seed 1]
        [--by kill|memory] [--minutes 9] [--out out/rounds.jsonl]

An undisturbed run of each method counts how often its workers come to each state: records read,
charged, in the middle of a part, before and after the draw, while and after it is published. In a
round the run stands still at one of these times, and one process ends: the worker that is there,
another actor or task of the run, the accountant, or all processes of a node. With `memory` the
worker that is there fills the memory until Ray's memory monitor ends it.

The round held if the run was released, charged once, and repeated no more than what was lost; if
Aug-PE and DP-KPS, whose sums get no noise here, released what the undisturbed run did, and every
start of a batch of private prediction had the same rows. A round is a line of JSON in the file of
`--out`; rounds that are there are not made again. In the end the table of all is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from dpray.ledger.ledger import Ledger
from dpray.methods.dp_sgd.training.journal import lost_blocks
from tests.chaos.held_workers import STATES
from tests.chaos.kills import left_behind
from tests.chaos.recount import read, recount
from tests.chaos.rehearsed import METHODS, Rehearsed, make_budget
from tests.chaos.test_storm import Nodes
from tests.faults import trainings
from tests.integration.processes import Ended, Runs, ray_cluster, short, wait_for

PROGRAM = str(Path(__file__).with_name("held_workers.py"))
NODE = "node"
OF_RAY = ("", "gone", "IDLE", "DashboardAgent", "RuntimeEnvAgent")
"""Workers without work, and agents of a node, which ends with them."""

ROOM = 6 * 2**30
"""With `memory`: the bytes that all processes may take until the memory monitor ends one."""

MOST_STARTS = 3

MOST_SECONDS = 240
"""A command that takes longer hangs, and is killed."""


class Rounds:
    """Rounds of one method. The files that all its runs read are in `folder`."""

    def __init__(self, method: str, nodes: Nodes, folder: Path, by: str) -> None:
        self.method, self.nodes, self.folder, self.by = method, nodes, folder, by
        folder.mkdir()
        self.rehearsed = Rehearsed(method, folder)
        whole, held = self.run("undisturbed"), folder / "undisturbed" / "held"
        report = whole.run().report
        if faults := self.faults(whole, report, most=0):
            raise AssertionError(f"an undisturbed run: {faults}")
        names = (file.name.rpartition(" ") for file in (held / "passed").iterdir())
        self.passes = Counter(state for state, _, _ in names)
        self.released, self.groups = whole.synthetic(), self.groups_of(whole)

    def run(self, name: str, state: str = "", number: int = 0) -> Runs:
        """Return a run that stands still at the `number`th time that it comes to the state."""
        folder = self.folder / name
        (folder / "held").mkdir(parents=True)
        url = f"sqlite:///{folder}/ledger.db"
        make_budget(url)
        tree = self.rehearsed.tree(folder / "out", url)
        tree["runtime"] = {"actors": 3, "cpus_per_actor": 2}
        if self.method == "dp_sgd":
            tree["method"] = trainings.METHOD
            tree["runtime"]["actors"] = 2
        elif self.method == "private_prediction":
            tree["method"] |= {"batches": "disjoint", "max_records": 24}
            tree["runtime"]["batches_per_task"] = 2
        run = Runs(tree, self.nodes.cluster, folder)
        run.program = [PROGRAM, str(folder / "held"), state, str(number)]
        return run

    def tell(self, name: str, rng: random.Random) -> dict[str, Any]:
        """Make a round; return what was ended when, and whether all held."""
        state = rng.choice([state for state in (*STATES, "part", "read") if self.passes[state]])
        number = rng.randint(1, self.passes[state])
        run, began = self.run(name, state, number), time.monotonic()
        told = {"state": state, "time": f"{number} of {self.passes[state]}", "victim": None}
        driver = run.start()
        watchdog = threading.Timer(MOST_SECONDS, driver.kill)
        watchdog.start()
        try:
            if self.wait_until_held(run, driver):
                told["victim"] = victim = self.end_one(run, rng)
                (run.folder / "held" / "go").write_text(self.by)
                if victim == NODE:
                    self.nodes.add()
            told |= self.ended(run, run.finish(driver), told["victim"])
        except Exception as error:
            told["result"] = f"{type(error).__name__}: {error}"[:1000]
        finally:
            watchdog.cancel()
            for accountant in self.nodes.workers("Accountant"):
                accountant.kill()  # the next round's ledger has another one
        return told | {"seconds": round(time.monotonic() - began)}

    def wait_until_held(self, run: Runs, driver: subprocess.Popen[str]) -> bool:
        held = run.folder / "held" / "held"
        wait_for(lambda: held.exists() or driver.poll() is not None, pause=0.02)
        return held.exists()

    def end_one(self, run: Runs, rng: random.Random) -> str:
        """End the worker that stands still, another process of the run or a node; return which."""
        at_state = psutil.Process(int((run.folder / "held" / "held").read_text()))
        if self.by == "memory":
            return name_of(at_state)
        living = defaultdict(list)
        for worker in self.nodes.workers("ray::"):
            if (name := name_of(worker)) not in OF_RAY:
                living[name].append(worker)
        victim = rng.choice([NODE, *sorted(living)])
        if victim == NODE:
            self.nodes.end_one(rng)
            return victim
        chosen = at_state if at_state in living[victim] else rng.choice(living[victim])
        chosen.kill()
        return victim

    def ended(self, run: Runs, ended: Ended, victim: str | None) -> dict[str, Any]:
        codes = [ended.code]
        while ended.code == 4 and len(codes) < MOST_STARTS:
            ended = run.run()
            codes.append(ended.code)
        told: dict[str, Any] = {"codes": codes}
        if self.by == "memory" and ended.code == 1 and "is never repeated" in ended.err:
            faults = recount(run.url, [run.output])
            return told | {"result": "; ".join(faults) or "failed for good, charged once"}
        if ended.code:
            return told | {"result": f"exit code {ended.code}: {ended.err[-500:]}"}
        faults = self.faults(run, ended.report, self.most_lost(victim))
        if victim is None:
            faults.append("the run never came to the state")
        return told | {"repeated": self.repeated(run), "result": "; ".join(faults) or "held"}

    def most_lost(self, victim: str | None) -> int:
        """Return how much may be repeated: of private prediction two tasks of two batches for each
        actor, of DP-SGD two blocks of steps, of a shard nothing. The memory monitor ends several
        workers at once, whichever has filled the memory."""
        if victim is None or (victim == "Accountant" and self.by == "kill"):
            return 0
        if self.method == "private_prediction":
            return 8 if victim == NODE else 4
        if self.method == "dp_sgd":
            return 2 * trainings.METHOD["checkpoint_steps"]
        return int(victim == NODE)

    def repeated(self, run: Runs) -> int:
        """Return the steps that were lost, or the units that were begun more than once."""
        with closing(Ledger.open(run.url)) as ledger:
            if self.method == "dp_sgd":
                return sum(lost_blocks(ledger, run.id))
            return len(list(ledger.repeated(run.id)))

    def faults(self, run: Runs, report: dict[str, Any], most: int) -> list[str]:
        """Return all that does not hold of a finished run."""
        faults = recount(run.url, [run.output]) + left_behind(run.output)
        repeated = self.repeated(run)
        if repeated > most:
            faults.append(f"{repeated} were repeated, not {most} at most")
        if self.method == "dp_sgd":
            trainings.assert_charged(run, report, faults=1, least=0)
        charges = [entry.key for entry in read(run.url)[0] if entry.kind == "reserve"]
        if charges.count(run.id) != 1 or (self.method != "dp_sgd" and len(charges) != 1):
            faults.append(f"it was charged {len(charges)} times")
        if run.folder.name == "undisturbed":
            return faults
        if self.method in ("aug_pe", "dp_kps") and run.synthetic() != self.released:
            faults.append("the release is not that of the undisturbed run")
        if len(run.synthetic()) != len(self.released):
            faults.append(f"{len(run.synthetic())} records, not {len(self.released)}")
        if self.groups_of(run) != self.groups:
            faults.append("the batches do not have the rows of the undisturbed run")
        return faults

    def groups_of(self, run: Runs) -> set[str]:
        """Return each batch that was decoded with the digest of its rows."""
        file = run.folder / "held" / "groups"
        return set(file.read_text().splitlines()) if file.exists() else set()


def name_of(worker: psutil.Process) -> str:
    """Return the actor's or the task's name in the title of a worker."""
    with suppress(psutil.Error):
        title = " ".join(worker.cmdline()).removeprefix("ray::")
        return title.partition(".")[0].partition("(")[0].strip()
    return "gone"


@contextmanager
def three_nodes(by: str) -> Iterator[Nodes]:
    variables = {}
    if by == "memory":
        memory = psutil.virtual_memory()
        share = (memory.total - memory.available + ROOM) / memory.total
        variables = {"RAY_memory_usage_threshold": f"{share:.3f}"}
    settings: dict[str, Any] = {"cpus": 3, "RAY_health_check_period_ms": "500"}
    with short() as folder, ray_cluster(folder, **settings, **variables) as cluster:
        nodes = Nodes(cluster, folder, **variables)
        try:
            yield nodes
        finally:
            nodes.close()


def table(lines: list[dict[str, Any]]) -> str:
    """Return the rounds that held of all, by method and state, and what else there was."""
    rows = [["method", *STATES, "all", "repeated", "seconds"]]
    for method in METHODS:
        mine = [line for line in lines if line["method"] == method]
        cells = []
        for some in [[line for line in mine if line["state"] == state] for state in STATES] + [
            mine
        ]:
            held = sum(line["result"].startswith(("held", "failed for good")) for line in some)
            cells.append(f"{held}/{len(some)}")
        seconds = sorted(line["seconds"] for line in mine)
        repeated = sum(line.get("repeated", 0) for line in mine)
        rows.append([method, *cells, str(repeated), str(seconds[len(seconds) // 2] if mine else 0)])
    rows.append(["ended:", str(dict(Counter(line["victim"] for line in lines)))])
    rows.append(["results:", str(dict(Counter(line["result"] for line in lines)))])
    return "\n".join("  ".join(f"{cell:>15}" for cell in row) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--rounds", type=int, default=20, help="the number after the last one's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--by", choices=("kill", "memory"), default="kill")
    parser.add_argument("--minutes", type=float, default=1e9, help="no round begins after them")
    parser.add_argument("--out", type=Path, default=Path("out/rounds.jsonl"))
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.touch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # with its clusters
    began, key = time.monotonic(), ("by", "seed", "method", "round")
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()]
    made = {tuple(line[name] for name in key) for line in lines}
    with three_nodes(asked.by) as nodes, short() as folder:
        for method in asked.method or METHODS:
            numbers = range(asked.first, asked.rounds)
            names = [(asked.by, asked.seed, method, number) for number in numbers]
            if not (left := [name for name in names if name not in made]):
                continue
            rounds = Rounds(method, nodes, folder / method, asked.by)
            for name in left:
                if time.monotonic() - began > 60 * asked.minutes:
                    break
                told = rounds.tell(f"round-{name[3]}", random.Random(str(name)))
                lines.append(dict(zip(key, name, strict=True)) | told)
                with open(asked.out, "a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                print(json.dumps(lines[-1]), flush=True)
                if told["result"] == "held":
                    shutil.rmtree(rounds.folder / f"round-{name[3]}")
    print(table([line for line in lines if line["by"] == asked.by]))
    return 0 if all(line["result"].startswith(("held", "failed")) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())

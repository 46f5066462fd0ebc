"""Several processes on one ledger: races for the last of a budget, and killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dpray
from dpray.accounting.events import DiscreteLaplace
from dpray.ledger.ledger import Ledger
from dpray.types import Budget
from tests.ledger.charges import STATED_FOR

ROUNDS = 8

# Every line of input is a command, every line of output says what became of it.
CHILD = """
import sqlite3
import sys
from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.types import AlreadyPublished
from dpray.ledger.ledger import Ledger
from dpray.types import Budget, BudgetRefused, InputError

ledger = Ledger.create_or_open(sys.argv[1])
stated_for = ("record", NEIGHBORING_RELATION)
print("ready", flush=True)
for line in sys.stdin:
    command, dataset, key, *rest = line.split()
    try:
        if command == "create":
            ledger.create_dataset(dataset, Budget(1.0, 1e-6), *stated_for)
        if command == "reserve":
            charge = {key: (DiscreteLaplace(2.0, 1), Budget(0.5, 1e-7))}
            ledger.reserve(dataset, charge, *stated_for)
        if command == "publish":
            ledger.publish(key, rest[1], [(rest[0], "a" * 64)])
        if command == "hold":  # SQLite copies its log into the file when nobody has it open
            held = sqlite3.connect(sys.argv[1].removeprefix("sqlite:///"))
            held.execute("SELECT name FROM sqlite_master").fetchall()
        if command == "stream":
            for n in range(10_000):
                charge = {f"{key}-{n}": (DiscreteLaplace(2e5, 1), Budget(5e-6, 0.0))}
                ledger.reserve(dataset, charge, *stated_for)
                print(f"{key}-{n}", flush=True)
        print("won", flush=True)
    except (BudgetRefused, AlreadyPublished):
        print("refused", flush=True)
    except InputError as error:
        print(error, flush=True)
"""

pytestmark = pytest.mark.slow


class Child:
    """A process of its own that holds the ledger open."""

    def __init__(self, url: str, *before: str) -> None:
        root = str(Path(dpray.__file__).parents[1])
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", CHILD, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root},
        )
        self.say = self.process.stdin.write
        self.hear = self.process.stdout.readline

    def ask(self, command: str) -> None:
        self.say(command + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def children(url: str, number: int) -> Iterator[list[Child]]:
    started = [Child(url) for _ in range(number)]
    try:
        assert {child.hear() for child in started} == {"ready\n"}
        yield started
    finally:
        for child in started:
            child.kill()


def test_of_two_processes_that_race_exactly_one_wins(url: str):
    """Both make the ledger and the data set, both ask for its last half, both publish a batch."""
    with children(url, 2) as pair:
        ledger = Ledger.open(url)

        def race(command: str) -> list[str]:
            for who, child in enumerate(pair):
                child.ask(command.format(who=who))
            return sorted(child.hear().strip() for child in pair)

        for turn in range(ROUNDS):
            assert race(f"create d{turn} -") == ["won", "won"]
            first = {f"first-{turn}": (DiscreteLaplace(2.0, 1), Budget(0.5, 0))}
            ledger.reserve(f"d{turn}", first, *STATED_FOR)
            assert race(f"reserve d{turn} last-{turn}-{{who}}") == ["refused", "won"]
            assert race(f"publish - first-{turn} a/0 attempt-{{who}}") == ["refused", "won"]
            assert race(f"reserve d{turn} first-{turn}-{{who}}") == ["refused", "refused"]
    for dataset in ledger.show()["datasets"]:
        assert dataset["spent"]["epsilon"] == 1.0
        assert dataset["left"]["epsilon"] == 0.0
    assert ledger.verify() == []


def test_whatever_was_answered_before_a_kill_is_there_after_it(url: str):
    with children(url, 3) as crowd:
        for turn, child in enumerate(crowd):
            child.ask(f"create d{turn} -")
            assert child.hear() == "won\n"
            child.ask(f"stream d{turn} run-{turn}")
            child.hear()
            time.sleep(0.02 + 0.117 * turn)
            child.kill()
            heard = 1 + child.process.stdout.read().count("\n")
            ledger = Ledger.open(url)
            account = ledger.account(f"d{turn}")
            # One reservation may be there whose answer was never given.
            assert len(account.charges) - heard in (0, 1)
    assert ledger.verify() == []

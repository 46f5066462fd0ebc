"""Durable reservations and published rows a second through the accountant actor, and the waits of
its callers, on SQLite and on PostgreSQL.

    python -m benchmarks.bench_ledger [--clients 64] [--seconds 10] [--rows 20] [--datasets 1]

Every client is a thread of its own; the threads are in `--processes` processes of Ray. Each client
first makes one call after the other, as fast as it is answered. Then all together make what the
target asks for, 500 reservations or 5,000 rows a second, each call at its time, and a call that
could not begin in time has waited since then. Each reservation is a run of its own, and a
publication has `rows` batches of the client's run. PostgreSQL runs here, and both databases wait
for the disk.
"""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import ray
import typer

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.ledger.ledger import Ledger
from dpray.types import Budget
from dpray.workers.accountant import AccountantClient
from tests.databases import new_schema, postgresql_server

STATED_FOR = ("record", NEIGHBORING_RELATION)
CHARGE = (DiscreteLaplace(1e6, 1), Budget(1e-6, 0.0))
TARGETS = {"reserve": 500.0, "publish": 5000.0}
"""Reservations, and rows, a second."""


class Clients:
    """Some of the clients, in a process of their own."""

    def __init__(self, url: str, number: int) -> None:
        self.ledger = AccountantClient(url)
        self.pool = ThreadPoolExecutor(number)
        self.number = number

    def work(self, what: str, until: float, rows: int, datasets: int, pause: float) -> list[float]:
        """Return the seconds that each call took, `pause` seconds after the one before it began."""
        each = self.pool.map(
            lambda n: self.calls(n, what, until, rows, datasets, pause), range(self.number)
        )
        return [seconds for client in each for seconds in client]

    def calls(
        self, client: int, what: str, until: float, rows: int, datasets: int, pause: float
    ) -> list[float]:
        taken, dataset, run = [], f"notes-{client % datasets}", uuid.uuid4().hex
        if what == "publish":
            self.ledger.reserve(dataset, {run: CHARGE}, *STATED_FOR)
        due = time.time() + pause * random.random()
        while due < until:
            time.sleep(max(0.0, due - time.time()))
            if what == "reserve":
                self.ledger.reserve(dataset, {uuid.uuid4().hex: CHARGE}, *STATED_FOR)
            else:
                turn = uuid.uuid4().hex
                releases = [(f"{turn}/{row}", "a" * 64) for row in range(rows)]
                self.ledger.publish(run, "attempt-1", releases)
            ended = time.time()
            taken.append(ended - due)
            due = due + pause if pause else ended
        return taken


def main(
    clients: int = 64, seconds: float = 10.0, rows: int = 20, datasets: int = 1, processes: int = 2
) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    print(f"{clients} clients, {datasets} data sets, {rows} rows a publication\n")
    print("| database | what | asked for | per second | median, ms | p99, ms |")
    print("|---|---|---|---:|---:|---:|")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(postgresql_server())
        for url in (f"sqlite:///{folder}/ledger.db", new_schema(server)):
            ledger = Ledger.create_or_open(url)
            for number in range(datasets):
                ledger.create_dataset(f"notes-{number}", Budget(1e3, 1e-6), *STATED_FOR)
            per_process = clients // processes
            callers = [
                ray.remote(num_cpus=0)(Clients).options(max_concurrency=2).remote(url, per_process)
                for _ in range(processes)
            ]
            # The accountant loads what it prices charges with, once.
            warm = ("reserve", time.time() + 1, 1, datasets, 0.0)
            ray.get([each.work.remote(*warm) for each in callers])
            for what, units in (("reserve", 1), ("publish", rows)):
                for pause in (0.0, clients * units / TARGETS[what]):
                    began = time.time()
                    given = (what, began + seconds, rows, datasets, pause)
                    work = [each.work.remote(*given) for each in callers]
                    taken = np.concatenate([np.array(found) for found in ray.get(work)])
                    rate = units * len(taken) / (time.time() - began)
                    median, p99 = 1000 * np.quantile(taken, [0.5, 0.99])
                    name, unit = url.split(":")[0], "rows" if what == "publish" else "reservations"
                    asked = f"{TARGETS[what]:,.0f} a second" if pause else "all that it can"
                    cells = f"{asked} | {rate:,.0f} | {median:.0f} | {p99:.0f}"
                    print(f"| {name} | {unit} | {cells} |", flush=True)
            assert ledger.verify() == []
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)

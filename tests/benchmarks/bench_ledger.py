"""How many durable reservations and published rows a second go through the accountant actor, and
how long a caller waits, on SQLite and on PostgreSQL.

    python tests/benchmarks/bench_ledger.py [--clients 64] [--seconds 10] [--rows 20] [--datasets 1]

Every client is a thread of its own that makes one call after the other; the threads are in
`--processes` processes of Ray. Each reservation is a run of its own, and a publication has `rows`
batches of the client's run. PostgreSQL runs here, and both databases wait for the disk.
"""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import ray
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import Laplace
from dpray.accounting.ledger import Ledger
from dpray.runs.accountant import AccountantClient
from dpray.types import Budget
from tests.databases import new_schema, postgresql_server

STATED_FOR = ("record", NEIGHBORING_RELATION)
CHARGE = (Laplace(1e6), Budget(1e-6, 0.0))


class Clients:
    """Some of the clients, in a process of their own."""

    def __init__(self, url: str, number: int) -> None:
        self.ledger = AccountantClient(url)
        self.pool = ThreadPoolExecutor(number)
        self.number = number

    def work(self, what: str, until: float, rows: int, datasets: int) -> list[float]:
        """Return the seconds that each call took."""
        each = self.pool.map(
            lambda n: getattr(self, what)(n, until, rows, datasets), range(self.number)
        )
        return [seconds for client in each for seconds in client]

    def reserve(self, client: int, until: float, rows: int, datasets: int) -> list[float]:
        taken, dataset = [], f"notes-{client % datasets}"
        while (began := time.time()) < until:
            self.ledger.reserve(dataset, {uuid.uuid4().hex: CHARGE}, *STATED_FOR)
            taken.append(time.time() - began)
        return taken

    def publish(self, client: int, until: float, rows: int, datasets: int) -> list[float]:
        taken, run = [], uuid.uuid4().hex
        self.ledger.reserve(f"notes-{client % datasets}", {run: CHARGE}, *STATED_FOR)
        while (began := time.time()) < until:
            turn = uuid.uuid4().hex
            releases = [(f"{turn}/{row}", "a" * 64) for row in range(rows)]
            self.ledger.publish_many(run, "attempt-1", releases)
            taken.append(time.time() - began)
        return taken


def main(
    clients: int = 64, seconds: float = 10.0, rows: int = 20, datasets: int = 1, processes: int = 2
) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    print(f"{clients} clients, {datasets} data sets, {rows} rows a publication\n")
    print("| database | what | per second | median, ms | p99, ms |\n|---|---|---:|---:|---:|")
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
            ray.get([each.work.remote("reserve", time.time() + 1, 1, datasets) for each in callers])
            for what, units in (("reserve", 1), ("publish", rows)):
                began = time.time()
                until = began + seconds
                work = [each.work.remote(what, until, rows, datasets) for each in callers]
                taken = np.concatenate([np.array(found) for found in ray.get(work)])
                rate = units * len(taken) / (time.time() - began)
                median, p99 = 1000 * np.quantile(taken, [0.5, 0.99])
                name, unit = url.split(":")[0], "rows" if what == "publish" else "reservations"
                print(f"| {name} | {unit} | {rate:,.0f} | {median:.0f} | {p99:.0f} |", flush=True)
            assert ledger.verify() == []
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)

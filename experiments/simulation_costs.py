"""The simulation's costs are measured on this machine, through the code that a run goes through.

Each part is measured in a process of its own, most of them on a Ray cluster of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from simulation_runs import alone, nodes
from simulation_values import Costs

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.ledger.ledger import Ledger, NullLedger
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.methods.private_prediction.release import Totals, batches_of, publish, records
from dpray.methods.registry import run
from dpray.runs.folder import ReleaseFolder
from dpray.types import Budget, Progress
from dpray.workers.accountant import AccountantClient
from dpray.workers.cluster import never_repeated, start_ray
from dpray.workers.groups import GroupActor, SliceWorker, cut_blocks, group_pool, tasks
from dpray.workers.pool import ActorPool, RayActors, RepeatPrivate, Work
from dpray.workers.pool_actor import Answer
from tests.benchmarks.bench_shards import PRIVATE_TOKENS, build, config_of, plan_of, write_rows

CPUS = 2
"""Ray is told of so many in the clusters of most parts."""

TASK = 8
CLIENTS = 64


def measure() -> Costs:
    """Measure all costs, which takes some minutes."""
    found: dict[str, float] = {"hash_byte": alone(hash_byte)}
    found |= alone(ledger)
    found |= alone(parts)
    found |= alone(rows)
    found |= alone(pool)
    cold = {cpus: alone(gather, cpus) for cpus in (CPUS, 4 * CPUS)}
    found |= cold[CPUS]
    found["gather_worker"] = max(0.0, cold[4 * CPUS]["gather"] - found["gather"]) / 3
    # A part of the cores' time: the model divides it by their number.
    found["gather"] -= found["gather_worker"]
    found |= alone(ends, found["actor_wait"] + found["actor_cpu"])
    # The ledger's entries of all batches are read at the end.
    found["finish_batch"] += 2 * found.pop("page_batch")
    return Costs(**found)


def seconds_of(
    work: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median time of the work. CPU time for work that waits for nothing is hardly
    disturbed by other programs."""
    taken = []
    for _ in range(times):
        began = clock()
        work()
        taken.append(clock() - began)
    return float(np.median(taken))


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return a fixed cost and one for each unit, neither below 0, from two sizes."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    return max(0.0, seconds[0] - slope * sizes[0]), slope


def hash_byte() -> float:
    data = bytes(1 << 27)
    return seconds_of(lambda: hashlib.sha256(data).digest(), 3, time.process_time) / len(data)


def ledger() -> dict[str, float]:
    """Measure the accountant's transactions: of one caller, with tasks of two sizes, and of many
    callers, who share them."""
    with nodes(1, CPUS) as folder:
        start_ray(None)
        url = f"sqlite:///{folder}/ledger.db"
        local = Ledger.create_or_open(url)
        stated_for = ("record", NEIGHBORING_RELATION)
        local.create_dataset("notes", Budget(1e3, 1e-6), *stated_for)
        client = AccountantClient(url)
        charge = (DiscreteLaplace(1e6, 1), Budget(1e-6, 0.0))
        client.reserve("notes", {"run": charge}, *stated_for)
        names = count()

        def begin(batches: int) -> None:
            client.begin("run", "attempt", [f"0/{next(names)}" for _ in range(batches)])

        begin(TASK)
        ray_call = seconds_of(lambda: client.names(), 200)
        sizes = (TASK, 64 * TASK)
        taken = [seconds_of(partial(begin, size), 40) for size in sizes]
        alone_, batch = line(sizes, taken)
        calls = 2_000
        with ThreadPoolExecutor(CLIENTS) as clients:
            began = time.perf_counter()
            list(clients.map(begin, [TASK] * calls))
            shared = (time.perf_counter() - began) / calls
        began = time.perf_counter()
        begun = sum(1 for _ in client.started("run"))
        page = (time.perf_counter() - began) / begun
    # Some half of the clients share a transaction while the other half wait for the next one.
    together = CLIENTS / 2
    both = alone_ - ray_call  # commit + call
    call = max(0.0, (shared - TASK * batch) * together - both) / (together - 1)
    return {
        "ray_call": ray_call,
        "ledger_commit": max(0.0, both - call),
        "ledger_call": call,
        "ledger_batch": batch,
        "page_batch": page,
    }


def outcomes(names: Sequence[str]) -> list[dict[str, Any]]:
    text = "a synthetic note of a cough that came in the night and went by itself. " * 3
    examples = [[text, "length", PRIVATE_TOKENS // 2]] * 2
    return [
        {
            "batch": name,
            "examples": examples,
            "private_tokens": PRIVATE_TOKENS,
            "tokens": PRIVATE_TOKENS,
            "row_variation": 0.0,
        }
        for name in names
    ]


class Publishing(SimpleNamespace):
    """Publishes as a session does, without the ledger, which is measured by itself."""

    def publish(self, part: str, units: dict[str, Any]) -> None:
        self.folder.stage(part, units.values())
        self.folder.publish(part)


def parts() -> dict[str, float]:
    """Measure what the driver does with a part, and with all of them at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, 100_000)
        method = {"private_tokens": PRIVATE_TOKENS, "max_tokens": PRIVATE_TOKENS // 2}
        plan = plan_of(folder, 100_000, 10, **method)
        released = ReleaseFolder(str(folder / "out"))
        session: Any = Publishing(plan=plan, folder=released)
        batches, number, done = plan.batches.batch_ids(), count(), Totals()

        def part(size: int) -> None:
            found = outcomes([next(batches) for _ in range(size)])
            for outcome in publish(session, f"{next(number):08d}.jsonl", found):
                done.add(plan, outcome)

        sizes = (TASK, 64 * TASK)
        fixed, each = line(sizes, [seconds_of(partial(part, size), 15) for size in sizes])
        assembled = seconds_of(lambda: released.assemble(records(session)), 1, time.process_time)
        released.close()
    return {
        "part": fixed,
        "part_batch": each,
        "finish_batch": assembled / done.batches,
    }


def block_of(plan: Any, batches: int, rows_a_batch: int) -> pa.Table:
    """Return a block as it is gathered: the rows of each batch, and its place-holder."""
    names = list(plan.batches.batch_ids())[:batches]
    made = [
        {"label": "a", "text": text, "unit": f"{name} {row}", "rank": row, "batch": name}
        for name in names
        for row, text in enumerate([None] + ["note of a cough"] * rows_a_batch)
    ]
    return pa.Table.from_pylist(made)


def rows() -> dict[str, float]:
    """Measure an actor's own work on a row: its prompt is made, and its block sorted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, 10_000)
        plan = plan_of(folder, 10_000, 100)
        decoder = BatchDecoder(plan, NullLedger(), "run", "attempt", build)
        block = block_of(plan, 64, 100)
        work = partial(_decode, decoder, block)
        return {"row": seconds_of(work, 5, time.process_time) / len(block)}


def _decode(decoder: BatchDecoder, block: pa.Table) -> None:
    for _ in decoder.work(task.to_pylist() for task in tasks(block, TASK)):
        pass


def pool() -> dict[str, float]:
    """Measure how actors start and get slices, and what an answer takes the driver while it waits
    for few and for many actors."""
    with nodes(1, 2 * CPUS) as folder:
        start_ray(None)
        data = folder / "data"
        data.mkdir()
        write_rows(data, 1_000)
        config = config_of(data, 1_000, 10)
        plan = plan_of(data, 1_000, 10)
        make = partial(BatchDecoder, plan, NullLedger(), "run", "attempt", build)
        started = [_start(config, make, number) for number in (1, 2 * CPUS)]
        answers = [_answer(number) for number in (8, 1_024)]
        # So many processes share the cores, each of which has two.
        cpu = max(0.0, started[1] - started[0])
        answer, answer_place = line((8, 1_024), answers)
        block = _block(config, make, [ray.put(block_of(plan, TASK, 10)) for _ in range(200)])
    return {
        "actor_wait": max(0.0, started[0] - cpu),
        "actor_cpu": cpu,
        "answer": answer,
        "answer_place": answer_place,
        "block": max(0.0, block - 2 * answers[0]),
    }


def _start(config: Any, make: Callable[[], Any], number: int) -> float:
    """Return the seconds until so many actors that are started together have their workers."""
    began = time.perf_counter()
    shared = ray.put(partial(SliceWorker, make, TASK))
    actor = never_repeated(GroupActor, config, 0.0)
    actors = [actor.remote(shared, TASK) for _ in range(number)]
    for each in actors:
        ray.get(each.load.remote())
    seconds = time.perf_counter() - began
    for each in actors:
        ray.kill(each)
    return seconds


class Answering:
    """An actor in many places at once: the first one gets all answers, the others wait."""

    def __init__(self) -> None:
        self._places = 0
        self._names: list[str] = []

    async def load(self) -> Answer:
        self._places += 1
        if self._places > 1:
            await asyncio.sleep(3600)
        return Answer("", [], is_ready=True, is_idle=True)

    async def take(self, _: Any, number: int, *__: Any) -> list[str]:
        self._names = [f"{number}/{each}" for each in range(TASK)]
        return self._names

    async def more(self) -> Answer:
        found = [(each["batch"], each) for each in outcomes(self._names)]
        return Answer("", found, is_ready=True, is_idle=False)


class Shared(RayActors):
    """One actor in all places."""

    def start(self) -> Any:
        (actor,) = self._arguments
        return actor


def _answer(places: int, answers: int = 400) -> float:
    """Return the driver's own seconds for an answer, and for the slice that it hands out then,
    while it waits for so many actors."""
    options = {"num_cpus": 0, "max_concurrency": 2 * places}
    actor: Any = ray.remote(Answering).options(**options).remote()
    pool = ActorPool(Shared(None, actor), RepeatPrivate(1), places)
    block, slices = ray.put(None), places + 2 * answers
    steps = pool.run(Work((block, number, slices)) for number in range(slices))
    came = 0
    while came < answers:  # the other places have asked
        came += bool(next(steps))
    began = time.process_time()
    while came < 2 * answers:
        came += bool(next(steps))
    seconds = (time.process_time() - began) / answers
    ray.kill(actor)
    steps.close()
    return seconds


def _block(config: Any, make: Callable[[], Any], blocks: list[Any]) -> float:
    """Return the seconds that one actor takes for a block of one slice, nearly all of which is its
    way."""
    number, began = len(blocks), 0.0
    for answers in group_pool(config, make, TASK).run(cut_blocks(blocks, 1)):
        if answers and not began:
            began = time.perf_counter()
    return (time.perf_counter() - began) / (number - 1)


def gather(cpus: int) -> dict[str, float]:
    """Measure how rows are gathered: first of all the processes start, and then what more rows,
    more blocks and more pieces take."""
    with nodes(1, cpus) as folder:
        start_ray(None)
        cold = _gathered(folder / "cold", 1_000, 8, 16)[0]
        if cpus > CPUS:
            return {"gather": cold}
        few = _gathered(folder / "few", 4_000, 8, 16)
        many_rows = _gathered(folder / "rows", 100_000, 8, 16)
        many_blocks = _gathered(folder / "blocks", 4_000, 8, 512)
        many_pieces = _gathered(folder / "pieces", 4_000, 128, 512)
    pair = max(0.0, many_pieces[1] - many_blocks[1]) / (120 * 512)
    blocks = max(0.0, many_blocks[0] - few[0] - pair * 8 * (512 - 16)) / (512 - 16)
    return {
        "gather": cold,
        "gather_row": CPUS * max(0.0, many_rows[0] - few[0]) / 96_000,
        "gather_block": CPUS * blocks,
        "gather_pair": pair,
    }


def _gathered(folder: Path, number: int, files: int, blocks: int) -> tuple[float, float]:
    """Return the seconds in which rows are gathered, and the driver's own CPU seconds of these."""
    folder.mkdir()
    write_rows(folder, number, files)
    config = config_of(folder, number, 4)
    runtime = config.runtime.model_copy(update={"actors": -(-blocks // 8)})
    plan = plan_of(folder, number, 4)
    config = config.model_copy(update={"runtime": runtime})
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    groups = batches_of(plan, "").gathered(config, list(plan.batches.batch_ids()), 1)
    found = groups.to_arrow_refs()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    if len(found) != blocks:
        raise RuntimeError(f"{len(found)} blocks and not {blocks}")
    return seconds, sum(after[:2]) - sum(before[:2])


def ends(actor: float) -> dict[str, float]:
    """Measure a command until it gathers, without the actor that tries the model, and its end."""
    with nodes(1, CPUS) as folder:
        data = folder / "data"
        data.mkdir()
        write_rows(data, 100)
        method = {"private_tokens": PRIVATE_TOKENS, "max_tokens": PRIVATE_TOKENS // 2}
        seen: list[tuple[float, Progress]] = []
        began = time.perf_counter()
        run(
            config_of(data, 100, 10, **method),
            on_progress=lambda progress: seen.append((time.perf_counter() - began, progress)),
            build=build,
        )
        whole = time.perf_counter() - began
    shown = [when for when, progress in seen if progress.activity == "batches"]
    return {"start": max(0.0, shown[0] - actor), "finish": whole - shown[-1]}

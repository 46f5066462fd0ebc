"""A thousand actors, simulated: how much of their time private prediction on Ray would use.

    python experiments/simulation.py measure      # writes simulation_costs.json
    python experiments/simulation.py validate     # real runs on 1, 2 and 4 nodes of this machine
    python experiments/simulation.py scale        # 10^8 records

The model is in simulation_model.py. Its costs are measured on this machine; the GPUs' step time is
an assumption (`GPU`), which `scale` varies.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation_model import gathering, simulate
from simulation_values import Costs, Engine, Found, Load, Machines

from dpray.io.file_list import READERS
from dpray.workers.groups import MOST_BLOCKS

HERE = Path(__file__).parent
COSTS = HERE / "simulation_costs.json"

CORES = 2
"""This machine has so many."""

SLEEPING = Engine(
    load=0.0,
    step=0.08,
    step_row=0.0005,
    prompt_row=0.01,
    room=44,
    texts=2,
    tokens=12,
    most_tokens=24,
)
"""The engine of the real runs, which sleeps: four batches side by side."""

REAL = Load(batches=400, rows=10, pieces=8, bytes=4e5)
ACTORS_PER_NODE = 2

GPU = Engine(
    load=60.0,
    step=0.010,
    step_row=2e-5,
    prompt_row=1e-3,
    room=1024,
    texts=2,
    tokens=128,
    most_tokens=256,
)
"""An ASSUMPTION, not a measurement: a model of one or two billion parameters on one GPU. Whoever
has measured a model there puts its figures here."""

RECORDS = Load(batches=787_402, rows=127, pieces=800, bytes=1e11)
"""10^8 records of 1 KB in batches of 127."""

SEEDS = range(3)

app = typer.Typer()


def costs() -> Costs:
    return Costs(**json.loads(COSTS.read_text()))


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    heads = list(heads)
    print("|", " | ".join(heads), "|")
    print("|---" + "|---:" * (len(heads) - 1) + "|")
    for row in rows:
        print("|", " | ".join(row), "|", flush=True)
    print()


@app.command("measure")
def measure_() -> None:
    """Measure the costs, and write them."""
    from simulation_costs import measure

    found = {name: float(f"{seconds:.3g}") for name, seconds in asdict(measure()).items()}
    COSTS.write_text(json.dumps(found, indent=2) + "\n")
    table(("cost", "seconds"), ((f"`{name}`", f"{s:.2g}") for name, s in found.items()))


@app.command()
def validate(
    nodes: list[int] = typer.Argument(default=[1, 2, 4]),
    runs: int = 2,
    killed: float | None = typer.Option(None, help="an actor is, after so many seconds"),
) -> None:
    """Make real runs on so many nodes, and simulate them."""
    heads = ("nodes", "actors", "measured, seconds", "simulated, seconds", "difference")
    more = ("efficiency, measured", "simulated", "repeated, measured", "simulated")
    table((*heads, *more), (validated(number, runs, killed) for number in nodes))


def validated(nodes: int, runs: int, killed: float | None) -> Iterable[str]:
    from simulation_runs import alone, real_run

    actors = nodes * ACTORS_PER_NODE
    # A process that is killed is missed at once, and its CPU is free.
    cluster = Machines(actors, CORES, workers=actors, notice=0.0, replace=0.0, killed=killed)
    found = [simulate(costs(), SLEEPING, cluster, REAL, seed) for seed in SEEDS]
    simulated = statistics.mean(each.wall for each in found)
    real = [alone(real_run, nodes, actors, SLEEPING, REAL, killed) for _ in range(runs)]
    mean = statistics.mean(seconds for seconds, _ in real)
    yield f"{nodes}"
    yield f"{actors}"
    yield ", ".join(f"{seconds:.1f}" for seconds, _ in real)
    yield f"{simulated:.1f}"
    yield f"{simulated / mean - 1:+.0%}"
    yield f"{found[0].useful / actors / mean:.2f}"
    yield f"{found[0].useful / actors / simulated:.2f}"
    yield ", ".join(f"{repeated}" for _, repeated in real)
    yield ", ".join(f"{each.repeated}" for each in found)


def machines(actors: int, losses: float = 0.0, slow: float = 0.0) -> Machines:
    """Return machines with a core for each actor."""
    return Machines(actors, actors, workers=actors, losses=losses, slow=slow)


@cache
def found_of(engine: Engine, cluster: Machines, load: Load) -> Found:
    return simulate(costs(), engine, cluster, load, SEEDS[0])


def cells(found: Found) -> Iterable[str]:
    wall, decoding = found.wall, found.decoding_wall
    yield f"{wall / 60:.1f}"
    yield f"{found.efficiency:.2f}"
    yield f"{1 - decoding / wall:.1%}"
    yield f"{found.share('starting'):.1%}"
    yield f"{found.share('ledger', 'handing over', 'lost'):.1%}"
    yield f"{found.share('decoding') - found.efficiency:.1%}"
    yield f"{found.tail:.1%}"
    yield f"{found.calls / decoding:.0f}"
    yield f"{found.accountant / decoding:.0%}"
    yield f"{found.driver / decoding:.0%}"
    yield f"{found.lost_actors:,}"
    yield f"{found.repeated:,}"


HEADS = (
    "minutes",
    "efficiency",
    "set-up and end",
    "loading",
    "waiting",
    "slow or not full",
    "tail",
    "ledger calls a second",
    "ledger busy",
    "driver busy",
    "actors lost",
    "batches repeated",
)


@app.command()
def scale() -> None:
    """Simulate 10^8 records."""
    table(("1,000 actors, without failures", "seconds"), before_and_after(machines(1000)))
    kinds: dict[str, dict[str, float]] = {
        "no failures": {},
        "0.05 lost an hour": {"losses": 0.05},
        "0.5 lost an hour": {"losses": 0.5},
        "5 % half as fast": {"slow": 0.05},
    }
    table(
        ("1,000 actors, steps of 30 ms", *HEADS),
        (
            (kind, *cells(found_of(GPU, machines(1000, **options), RECORDS)))
            for kind, options in kinds.items()
        ),
    )
    table(
        ("1,000 actors, 0.05 lost an hour, a step of", *HEADS),
        (
            (
                step_of(times),
                *cells(found_of(slower(times), machines(1000, losses=0.05), RECORDS)),
            )
            for times in (1 / 3, 3, 10)
        ),
    )
    table(
        ("1,000 actors, steps of 305 ms, 0.05 lost an hour", *HEADS),
        (
            (
                f"{task} batches a task, {slow:.0%} half as fast",
                *cells(
                    found_of(
                        slower(10),
                        machines(1000, losses=0.05, slow=slow),
                        replace(RECORDS, task=task),
                    )
                ),
            )
            for task, slow in ((4, 0.0), (64, 0.0), (8, 0.05), (4, 0.05))
        ),
    )


def before_and_after(cluster: Machines) -> Iterable[tuple[str, str]]:
    """Yield what a run takes while no actor decodes."""
    found, load = costs(), RECORDS
    whole = gathering(found, cluster, load, MOST_BLOCKS)
    pairs = found.gather_pair * load.pieces * MOST_BLOCKS
    seconds = {
        "start": found.start,
        "the data's files are hashed": found.hash_byte * load.bytes / READERS,
        "the model is tried": found.actor_wait + found.actor_cpu + GPU.load,
        f"rows are gathered, the driver's part ({load.pieces} x {MOST_BLOCKS:,} pairs)": pairs,
        "rows are gathered, all else": whole - pairs,
        "the release is put in order and written": found.finish + found.finish_batch * load.batches,
    }
    yield from ((what, f"{taken:.0f}") for what, taken in seconds.items())


def step_of(times: float) -> str:
    return f"{1000 * times * (GPU.step + GPU.room * GPU.step_row):.0f} ms"


def slower(times: float) -> Engine:
    """Return an engine whose steps and prompts take so many times as long."""
    return replace(
        GPU,
        step=GPU.step * times,
        step_row=GPU.step_row * times,
        prompt_row=GPU.prompt_row * times,
    )


if __name__ == "__main__":
    app()

"""The simulation of a run on Ray loses no batch, and simple cases take what they have to."""

import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from simulation_model import simulate
from simulation_runs import SleepingEngine, build, configure
from simulation_values import SPENT, Costs, Engine, Load, Machines

from dpray.methods.registry import run

FREE = Costs(**{field.name: 0.0 for field in fields(Costs)})
STEP = 1.0
ENGINE = Engine(
    load=0.0, step=STEP, step_row=0.0, prompt_row=0.0, room=4, texts=2, tokens=1, most_tokens=1
)
"""Four batches of a row side by side, each of which takes two steps."""


def load(batches: int, **changes: int) -> Load:
    return Load(batches, rows=0, pieces=1, bytes=0.0, **changes)


def machines(actors: int, **changes: float) -> Machines:
    return Machines(actors, cores=actors, workers=actors, **changes)


def test_a_full_engine_wastes_nothing() -> None:
    found = simulate(FREE, ENGINE, machines(1), load(64, blocks=1))
    assert found.wall == pytest.approx(64 / 4 * 2 * STEP)
    assert found.efficiency == pytest.approx(1.0)
    assert found.tail == pytest.approx(0.0)
    assert found.calls >= 64 / 8


def test_all_costs_of_a_single_block_add_up() -> None:
    names = [field.name for field in fields(Costs)]
    found = simulate(
        Costs(**dict.fromkeys(names, 0.001)), replace(ENGINE, load=5.0), machines(2), load(40)
    )
    shares = found.share(*SPENT) + found.tail
    assert shares == pytest.approx(found.decoding_wall / found.wall)
    assert found.wall > found.decoding_wall > 5.0
    assert 0.0 < found.driver < found.wall
    assert 0.0 < found.accountant < found.wall


def test_what_is_lost_with_actors_is_decoded_all_the_same() -> None:
    found = simulate(FREE, ENGINE, machines(20, losses=60.0, notice=1.0, replace=5.0), load(4_000))
    assert found.lost_actors > 0
    assert found.repeated > 0
    assert found.useful == pytest.approx(4_000 / 4 * 2 * STEP)
    assert found.efficiency < simulate(FREE, ENGINE, machines(20), load(4_000)).efficiency


def test_a_run_with_the_sleeping_engine_takes_its_steps(tmp_path: Path) -> None:
    engine = Engine(
        load=0.0, step=0.01, step_row=0.0, prompt_row=0.001, room=44, texts=2, tokens=4,
        most_tokens=6,
    )  # fmt: skip
    config = configure(tmp_path, engine, Load(20, rows=10, pieces=2, bytes=0.0), actors=1)
    runtime = config.runtime.model_copy(update={"ray_address": "none"})
    engines: list[SleepingEngine] = []

    def made(*arguments: object, **named: object) -> SleepingEngine:
        engines.append(build(engine, *arguments, **named))
        return engines[-1]

    began = time.monotonic()
    report = run(config.model_copy(update={"runtime": runtime}), build=made)
    assert report["batches"]["published"] == 20
    assert report["records"] == 40
    assert report["llm_calls"] == 40 * 11
    # Two texts of a step or more each; four batches or five side by side; a prompt for each row.
    assert time.monotonic() - began > 20 / 5 * 2 * engine.step + 200 * engine.prompt_row

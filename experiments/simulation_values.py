"""The simulation's parameters, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Costs:
    """`Costs` are measured on one machine (`simulation_costs.py`), all in seconds.

    `start` is a command before it gathers, `hash_byte` the hashing of a byte of the data on one
    core. Gathering takes `gather`, and of the cores `gather_worker` for each process that gathers,
    `gather_row` for a row and `gather_block` for a block, and of the driver `gather_pair` for a
    block that is read and one that is gathered. An actor's process takes `actor_wait` and
    `actor_cpu` of a core to start. A transaction of the ledger takes `ledger_commit`, `ledger_call`
    for each call in it and `ledger_batch` for each batch; `ray_call` is the way to the accountant
    and back. The driver takes `answer` for an answer, and `answer_place` for each actor that it
    waits for meanwhile; for a part `part`, and `part_batch` for each batch. A slice of a block is
    there `block` after it was handed out, and takes the actor `row` for each of its rows. At the
    end the driver takes `finish`, and `finish_batch` for each batch.
    """

    start: float
    hash_byte: float
    gather: float
    gather_worker: float
    gather_row: float
    gather_block: float
    gather_pair: float
    actor_wait: float
    actor_cpu: float
    ledger_commit: float
    ledger_call: float
    ledger_batch: float
    ray_call: float
    answer: float
    answer_place: float
    part: float
    part_batch: float
    block: float
    row: float
    finish: float
    finish_batch: float


@dataclass(frozen=True)
class Engine:
    """An `Engine` loads in `load` seconds. With n rows a step takes `step` + n `step_row` seconds,
    and the prompts of a batch of n rows take n `prompt_row` seconds; it has room for `room` rows.
    A batch has `texts` texts, whose lengths are exponential with a mean of `tokens`, cut at
    `most_tokens`."""

    load: float
    step: float
    step_row: float
    prompt_row: float
    room: int
    texts: int
    tokens: float
    most_tokens: int

    def lengths(self, rng: np.random.Generator, texts: int) -> np.ndarray:
        """Draw the lengths of texts, in tokens."""
        drawn = 1 + rng.exponential(self.tokens, texts).astype(int)
        return np.minimum(drawn, self.most_tokens)


@dataclass(frozen=True)
class Machines:
    """`Machines` run `actors`. All processes of Ray share `cores`, and as many as `workers` gather,
    one for each CPU that Ray is told of. Actors are lost at `losses` per
    actor and hour; the driver notices it after `notice` seconds, and another machine is there after
    `replace` seconds. A share `slow` of the actors takes `slow_factor` times as long. With
    `killed`, one actor is lost as well, so many seconds after the first part was published."""

    actors: int
    cores: float
    workers: int
    losses: float = 0.0
    notice: float = 15.0
    replace: float = 120.0
    slow: float = 0.0
    slow_factor: float = 2.0
    killed: float | None = None


@dataclass(frozen=True)
class Load:
    """A `Load` is `batches` of about `rows` records, in files of so many `bytes` that are read in
    `pieces`. Blocks and tasks are as in dpray, unless `blocks` or `task` say otherwise."""

    batches: int
    rows: int
    pieces: int
    bytes: float
    blocks: int | None = None
    task: int | None = None


SPENT = ("decoding", "ledger", "handing over", "starting", "lost")
"""An actor spends its time with these; otherwise it has no slice, and none is left."""


@dataclass(frozen=True)
class Found:
    """`Found` is what a simulated run took: `wall` seconds, of which actors could decode for
    `decoding_wall`. `useful` is the time of the batches in ordinary engines that are always full;
    `spent` are the actors' seconds by what they did. Times of driver and accountant are those in
    which they were busy, the driver's also those in which it waits for the accountant."""

    wall: float
    decoding_wall: float
    actors: int
    useful: float
    spent: dict[str, float]
    driver: float
    accountant: float
    calls: int
    repeated: int
    lost_actors: int

    @property
    def efficiency(self) -> float:
        return self.useful / (self.actors * self.wall)

    @property
    def decoding_efficiency(self) -> float:
        return self.useful / (self.actors * self.decoding_wall)

    def share(self, *what: str) -> float:
        """Return the share of all actors' time that went into these."""
        return sum(self.spent[each] for each in what) / (self.actors * self.wall)

    @property
    def tail(self) -> float:
        """Return the share in which actors had no slice, and there was none left."""
        decoding = self.actors * self.decoding_wall - sum(self.spent.values())
        return decoding / (self.actors * self.wall)

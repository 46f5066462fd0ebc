"""Shards that are killed on a real Ray are replaced before the draw: the release is that of a run
without a kill, to the last byte, and the run begins, draws and is charged once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError

from dpray.config.config import Config
from dpray.engines.embedding_endpoint import PUBLIC_TEXTS
from dpray.ledger.ledger import Ledger
from dpray.mechanisms import discrete_noise
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.runs import runner
from dpray.types import Resumable
from dpray.workers import shards
from dpray.workers.cluster import actors_alive
from dpray.workers.shards import ShardActor, Shards, _answers, _Shard
from tests.chaos.rehearsed import METHODS
from tests.engines.api_server import running_server
from tests.engines.bag_of_words import BagOfWords
from tests.faults.test_kills import kill_workers
from tests.integration.processes import Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("driver")]


def dying(folder: Path, *faults: str) -> type:
    """Actors of shards, of which one each is killed at these faults, or ends as Ray's memory
    monitor ends it: with rows in its hands ("load"), or when it has the answer of the method with
    the name. It travels to them as a value."""

    def come_to(name: str) -> None:
        for number, fault in enumerate(faults):
            state, _, low_on_memory = fault.partition(", ")
            if state != name:
                continue
            try:
                (folder / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if low_on_memory:
                raise OutOfMemoryError("1 worker(s) were killed: the node is running low on memory")
            os.kill(os.getpid(), signal.SIGKILL)

    class Dying(ShardActor):
        def __init__(self, *arguments: Any) -> None:
            shards.SentenceTransformerEmbedder = BagOfWords  # type: ignore
            super().__init__(*arguments)

        def load(self, block: pa.Table) -> Exception | None:
            found = super().load(block)
            come_to("load")
            return found

        def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
            answer = super().call(method, *arguments)
            come_to("tried" if arguments == (PUBLIC_TEXTS,) else method.__name__)
            return answer

    return Dying


def killed(folder: Path) -> int:
    return len(list(folder.glob("killed-*")))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The exact sums, without the noise that is added to them. The public coins of all runs are
    the same, and a shard has several blocks of rows."""
    sums: list[list[int]] = []

    def without_noise(measurement: Any, counts_N: Any) -> Any:
        sums.append([int(count) for count in counts_N])
        return np.asarray(counts_N, dtype=np.int64)

    monkeypatch.setattr(discrete_noise, "_noisy", without_noise)
    monkeypatch.setattr(shards, "ROWS_AT_ONCE", 8)
    monkeypatch.setattr(runner, "new_salt", lambda: "5a" * 16)
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    return sums


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running_server() as server:
        yield server.url


Make = Callable[..., Config]


@pytest.fixture
def config(
    settings: Callable[..., Any],
    sequences: dict[str, Any],
    endpoint: str,
    records_file: Path,
    tmp_path: Path,
) -> Make:
    def make(method: str, ray_address: str | None, attempts: int = 3) -> Config:
        changes = sequences
        words = {word for line in records_file.open() for word in json.loads(line)["text"].split()}
        known = sorted(word for word in words - {"Marlowe"} if not word.isdigit())
        Path(sequences["method"]["vocabulary"]).write_text("\n".join(known))
        if method == "aug_pe":
            engine = {"kind": "openai", "model": "m", "base_url": endpoint}
            changes = {"method": METHODS["aug_pe"], "engine": engine}
        where = "ray" if ray_address is None else "here"
        runtime = {"ray_address": ray_address, "actors": 2, "max_attempts": attempts}
        return parse_config(
            settings(
                **changes,
                runtime=runtime,
                output__path=str(tmp_path / where),
                privacy__ledger=f"sqlite:///{tmp_path}/{where}.db",
            )
        )

    return make


def released(run: Config) -> bytes:
    return (Path(run.output.path) / "synthetic.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("method", "faults"),
    [
        ("aug_pe", ("tried", "load", "embed", "count", "count, low on memory")),
        ("dp_kps", ("load", "counts", "sums", "sums, low on memory")),
    ],
)
def test_shards_that_are_killed_change_nothing(
    config: Make,
    cluster: Cluster,
    drawn: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    faults: tuple[str, ...],
) -> None:
    """All of them are killed between two questions too."""
    here = config(method, "none")
    registry.run(here)
    expected, wanted = drawn[:], released(here)
    drawn.clear()

    each, asked = Shards.each, Counter[str]()

    def killing(voters: Any, *arguments: Any) -> list[Any]:
        asked["each"] += 1
        if asked["each"] == 2:
            kill_workers(cluster, "Dying")
        return each(voters, *arguments)

    monkeypatch.setattr(Shards, "each", killing)
    monkeypatch.setattr(shards, "ShardActor", dying(tmp_path, *faults))
    on_ray = config(method, None, attempts=len(faults) + 1)
    report = registry.run(on_ray)
    assert killed(tmp_path) == len(faults) and asked["each"] >= 2, "each kill was seen to fire"
    assert all(any(sums) for sums in expected)
    assert drawn == expected, "the same exact sums, each with noise once"
    assert released(on_ray) == wanted
    with closing(Ledger.open(on_ray.privacy.ledger)) as ledger:
        run_id = report["ledger"]["reservation"]
        begun = list(ledger.started(run_id))
        account = ledger.account("notes")
        assert ledger.verify() == [] and not [*ledger.failed(run_id)]
        assert len(begun) == len([*ledger.published(run_id)]) == 2
    assert len({attempt for _, attempt in begun}) == 1, "one attempt"
    assert account is not None and len(account.charges) == 1
    assert (account.spent.epsilon, account.spent.delta) == (report["epsilon"], report["delta"])


def test_a_shard_that_is_killed_too_often_ends_the_command_and_the_next_one_goes_on(
    config: Make, drawn: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mechanism that has begun: it is no failure of its own, and is begun once more."""
    run = config("dp_kps", None, attempts=1)
    monkeypatch.setattr(shards, "ShardActor", dying(tmp_path, *["counts"] * 3))
    with pytest.raises(Resumable, match=r"^actors were lost \(1 times\); the run is charged"):
        registry.run(run)
    assert 2 <= killed(tmp_path) <= 3, "two actors of a shard, and perhaps one of the other"
    assert drawn == []
    monkeypatch.setattr(shards, "ShardActor", dying(tmp_path))
    report = registry.run(run)
    assert report["records"] == 8
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        counts = ledger.counts(report["ledger"]["reservation"])
    assert (counts["starts"], counts["published"]) == (3, 2)


def shard_with(starts: list[Any], wait: float = 60.0) -> _Shard:
    """A shard whose actors are started by these, one after the other."""
    runtime = SimpleNamespace(max_attempts=3, wait=wait)
    config: Any = SimpleNamespace(runtime=runtime)
    return _Shard(lambda: starts.pop(0)(), [], config)


def answering() -> Any:
    """Actors whose class travels as a value: they would import all of this file otherwise."""

    class Answering:
        def call(self, method: Any) -> Any:
            return method()

    return ray.remote(num_cpus=0)(Answering)


def test_another_actor_without_room_is_not_waited_for_without_end() -> None:
    actor = answering()
    shard = shard_with([actor.remote, actor.options(num_cpus=1000).remote], wait=0.5)
    ray.kill(shard.actor)
    shard.ask(os.getpid)
    with pytest.raises(Resumable, match=r"a shard was lost, and another one waited for 0\.5 s"):
        _answers([shard])
    ray.kill(shard.actor)


def test_the_actors_of_a_run_that_are_alive_are_counted() -> None:
    before = actors_alive()
    assert before is not None
    actor: Any = ray.remote(num_cpus=0)(ShardActor)
    made = [actor.remote(None, lambda config: config) for _ in range(2)]
    ray.get([each.__ray_ready__.remote() for each in made])
    other = answering().remote()
    assert ray.get(other.call.remote(os.getpid)) and actors_alive() == before + 2
    ray.kill(made.pop())
    wait_for(lambda: actors_alive() == before + 1)
    ray.kill(made.pop())
    ray.kill(other)


def test_what_may_be_the_rows_own_is_not_replaced_nor_a_shard_without_its_rows() -> None:
    actor = answering()
    shard = shard_with([actor.remote])
    rows_lost: Any = ObjectLostError("0" * 56, None, "")  # type: ignore[arg-type]
    for error in (ValueError("x"), rows_lost):
        with pytest.raises(type(error)):
            shard.replace(error)
    ray.kill(shard.actor)

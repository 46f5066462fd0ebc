"""Texts written by actors: all of them, each once, though actors die, and errors as themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from dpray.config.config import Config
from dpray.engines.base import Completion, Engine, EngineError, Prompt, Sampling
from dpray.engines.rates import measure_rates
from dpray.methods.config import parse_config
from dpray.types import DprayError, InputError, Progress, Resumable
from dpray.workers.engine_pool import EnginePool, check_loads
from dpray.workers.placement import placed, run_placement
from tests.integration.processes import Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("driver")]


@pytest.fixture(scope="module")
def cluster(gpu_cluster: Cluster) -> Cluster:
    return gpu_cluster


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    return lambda **changes: parse_config(settings(**({"runtime__ray_address": None} | changes)))


def fake(folder: Path, together: int = 1, seen: int = 0) -> Callable[[Any], Any]:
    """Builds engines that write down what they are asked and answer with where they are, once
    `together` of them are asked. A prompt may tell one to die, the first time or always, or to
    raise; it dies when the files say that the first `seen` answers have arrived."""

    def build(settings: Any) -> Any:
        import os
        import time
        import uuid

        import ray

        from dpray.engines.base import Completion, EngineError

        class Engine:
            def __init__(self) -> None:
                self.name = uuid.uuid4().hex
                (folder / f"engine-{self.name}").touch()

            def generate(self, prompts: Any, sampling: Any, on_completion: Any) -> None:
                # Asked and not only there: an engine that is asked later would find nothing left.
                (folder / f"asked-{self.name}").touch()
                while len(list(folder.glob("asked-*"))) < together:
                    time.sleep(0.05)
                for i, (prompt, each) in enumerate(zip(prompts, sampling, strict=True)):
                    died = folder / f"died-{prompt.user}"
                    if "dies" in prompt.user and (each.max_tokens > 1 or not died.exists()):
                        with died.open("a") as file:
                            file.write("x")
                        while not all((folder / f"seen-{n}").exists() for n in range(seen)):
                            time.sleep(0.05)
                        os._exit(1)
                    if "raises" in prompt.user:
                        raise EngineError("too long a prompt")
                    if "bug" in prompt.user:
                        raise ValueError(prompt.user)
                    with (folder / f"asked-{self.name}").open("a") as file:
                        file.write(f"{prompt.user}\n")
                    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                    text = f"{prompt.user}|{len(ray.get_gpu_ids())}|{visible}"
                    on_completion(i, Completion(text, 1, each.max_tokens))

            def close(self) -> None: ...

        return Engine()

    return build


def written(folder: Path) -> list[str]:
    return [line for path in folder.glob("asked-*") for line in path.read_text().splitlines()]


def prompts(number: int, *others: str) -> list[Prompt]:
    return [*(Prompt(f"p{i}") for i in range(number)), *map(Prompt, others)]


@pytest.mark.parametrize("gpus", [0, 1])
def test_actors_share_the_prompts_and_see_their_own_gpus(
    config: Callable[..., Config], tmp_path: Path, gpus: int
) -> None:
    changes = {"runtime__actors": 2, "runtime__gpus_per_actor": gpus}
    pool = EnginePool(config(**changes), fake(tmp_path, together=2))
    seen: list[int] = []
    made = pool.generate(prompts(20), [Sampling(1)] * 20, lambda i, _: seen.append(i))
    first = made[0].text.split("|")
    assert [c.text.split("|")[0] for c in made] == [f"p{i}" for i in range(20)]
    assert sorted(seen) == list(range(20))
    assert sorted(written(tmp_path)) == sorted(f"p{i}" for i in range(20))
    assert len(list(tmp_path.glob("asked-*"))) == 2
    assert first[1] == str(gpus)
    assert {c.text.split("|")[2] for c in made} == ({"0", "1"} if gpus else {""})
    # The same actors write what is asked next.
    pool.generate(prompts(3), [Sampling(n) for n in (1, 2, 3)])
    assert len(list(tmp_path.glob("engine-*"))) == 2
    pool.close()


def noting(seen: list[int], folder: Path) -> Callable[[int, Completion], None]:
    """Notes which answers have arrived, for the test and for `fake`."""

    def arrived(i: int, _: Completion) -> None:
        seen.append(i)
        (folder / f"seen-{i}").touch()

    return arrived


def test_an_actor_that_dies_is_replaced_and_what_it_answered_not_asked_again(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    pool = EnginePool(config(runtime__actors=2), fake(tmp_path, seen=30))
    seen: list[int] = []
    asked = [*prompts(30, "dies once"), *prompts(30)]
    made = pool.generate(asked, [Sampling(1)] * len(asked), noting(seen, tmp_path))
    pool.close()
    assert [c.text.split("|")[0] for c in made] == [prompt.user for prompt in asked]
    assert sorted(seen) == list(range(61))
    assert (tmp_path / "died-dies once").read_text() == "x"
    assert sorted(written(tmp_path)) == sorted(prompt.user for prompt in asked)


def test_prompts_that_actors_are_lost_with_again_and_again_end_the_run(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    pool = EnginePool(config(runtime__max_attempts=2), fake(tmp_path))
    with pytest.raises(EngineError, match=r"^engine: actors were lost$"):
        pool.generate(prompts(1, "dies"), [Sampling(2)] * 2)
    assert (tmp_path / "died-dies").read_text() == "xx"


def test_what_an_engine_raises_comes_as_itself(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    pool = EnginePool(config(), fake(tmp_path))
    with pytest.raises(EngineError, match=r"^too long a prompt$"):
        pool.generate(prompts(9, "raises"), [Sampling(1)] * 10)
    with pytest.raises(DprayError, match=r"^an engine actor failed: ValueError$"):
        pool.generate(prompts(1, "a bug with words"), [Sampling(1)] * 2)


def test_a_model_whose_actors_are_lost_again_and_again_costs_nothing(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    tries = tmp_path / "tries"

    def load() -> None:
        with tries.open("a") as file:
            file.write("x")
        os._exit(1)

    stages: list[Progress] = []
    with pytest.raises(Resumable, match=r"lost 3 times \(ActorDiedError\)$"):
        check_loads(config(runtime__max_attempts=3), load, stages.append)
    assert tries.read_text() == "xxx"
    assert stages == [Progress("loading the model", detail="on a machine with 1 CPU to spare")]


def lose(actor: Any) -> None:
    """Return when Ray knows that it is lost."""

    def is_lost() -> bool:
        try:
            ray.get(actor.tried.remote())
        except ray.exceptions.RayActorError:
            return True
        return False

    ray.kill(actor)
    wait_for(is_lost)


def test_the_actor_that_tried_the_engine_is_the_first_of_the_pool_if_it_is_there(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    """It is ended where a shard, or anything else, needs its place."""
    ours = config(runtime__actors=1)

    def is_kept(*events: Callable[[Any], object]) -> bool:
        check_loads(ours, partial(fake(tmp_path), ours.engine), lambda progress: None)
        kept = run_placement().take_kept()
        assert kept is not None and run_placement().take_kept() is None
        run_placement().keep(kept)
        for event in events:
            event(kept)
        left = run_placement().take_kept()
        assert left in (None, kept)
        if left is not None:
            run_placement().keep(left)
        return left is not None

    with placed(ours, lambda progress: None, is_new=True):
        assert not is_kept(lose)
        assert not is_kept(lambda kept: run_placement().make_room(for_shards=True))
        assert not is_kept(lambda kept: run_placement().shard())
        assert not is_kept(lambda kept: run_placement().give_back())
        assert is_kept(lambda kept: run_placement().make_room())
        loaded = len(list(tmp_path.glob("engine-*")))
        pool = EnginePool(ours, fake(tmp_path))
        made = pool.generate(prompts(4), [Sampling(1)] * 4)
        pool.close()
    assert [c.text.split("|")[0] for c in made] == ["p0", "p1", "p2", "p3"]
    assert len(list(tmp_path.glob("engine-*"))) == loaded == 5


def test_the_model_that_a_training_begins_with_writes_no_text(
    config: Callable[..., Config],
) -> None:
    ours = config(method={"name": "dp_sgd", "batch_size": 20})
    with placed(ours, lambda progress: None, is_new=True):
        check_loads(ours, lambda: "untuned", lambda progress: None)
        assert run_placement().take_kept() is None


def test_what_a_loader_raises_on_an_actor_is_bad_input(config: Callable[..., Config]) -> None:
    def load() -> None:
        raise OSError("Marlowe's disk")

    with pytest.raises(InputError, match=r"^engine: it cannot be loaded \(OSError\)$"):
        check_loads(config(), load, lambda _: None)
    assert check_loads(config(), lambda: "loaded", lambda _: None) == (None, None)


@pytest.mark.parametrize("address", [None, "none"])
def test_a_trial_that_fails_is_told_and_closes_the_model(
    config: Callable[..., Config], address: str | None
) -> None:
    def load() -> Any:
        return open(os.devnull)

    def fails(model: Any) -> None:
        opened.append(model)
        raise InputError("method.max_tokens: 255")

    opened: list[Any] = []
    ours = config(**{"runtime__ray_address": address} if address else {})
    with pytest.raises(InputError, match=r"^method\.max_tokens: 255$"):
        check_loads(ours, load, lambda _: None, [("trying the model", fails)])
    assert all(model.closed for model in opened) and len(opened) == (address is not None)


def test_the_rates_that_an_actor_measures_come_back(config: Callable[..., Config]) -> None:
    def load() -> Engine:
        from tests.faults.driver import Words

        return Words()

    stages: list[Progress] = []
    trials = [("measuring the speed", lambda engine: measure_rates(engine, 3))]
    engine, rates = check_loads(config(), load, stages.append, trials)
    assert [each.activity for each in stages] == ["loading the model", "measuring the speed"]
    assert engine is None and rates is not None
    assert min(rates.prefill, rates.decode) > 0

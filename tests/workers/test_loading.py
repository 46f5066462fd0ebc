"""An actor that cannot load its model says why, and so does the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from dpray.config.config import Config, parse_config
from dpray.engines.base import EngineError
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.registry import make_plan
from dpray.types import InputError
from dpray.workers.groups import SliceWorker
from dpray.workers.pool_actor import PoolActor
from dpray.workers.shards import ShardActor

CASES = [
    (
        InputError("engine.model: no such folder: /m"),
        "engine.model: no such folder: /m",
        InputError,
    ),
    (EngineError("vLLM cannot load m: no GPU"), "vLLM cannot load m: no GPU", EngineError),
    (OSError("Marlowe's disk"), "it cannot be loaded (OSError)", EngineError),
]


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Config:
    return parse_config(settings())


def raising(error: Exception) -> Callable[..., Any]:
    def load(*_: Any, **__: Any) -> Any:
        raise error

    return load


@pytest.mark.parametrize(("error", "reason", "kind"), CASES)
def test_a_shard_that_cannot_be_made_is_answered_for_every_call(
    config: Config, error: Exception, reason: str, kind: type[Exception]
) -> None:
    actor = ShardActor(config, raising(error))
    for answer in (actor.load(pa.table({"text": ["x"]})), actor.call("counts")):
        assert type(answer) is kind and str(answer) == reason


@pytest.mark.parametrize(("error", "reason", "kind"), CASES)
def test_a_decoding_actor_without_an_engine_answers_with_the_reason_and_begins_nothing(
    config: Config, error: Exception, reason: str, kind: type[Exception]
) -> None:
    plan = make_plan(config).with_salt("0" * 32)
    ledger: Any = None  # whose absence would show
    decoder = partial(BatchDecoder, plan, ledger, "run", "attempt", raising(error))
    error_of_load = PoolActor(partial(SliceWorker, decoder, "batch", 8), most=8).load().error
    assert type(error_of_load) is kind and str(error_of_load) == reason


@pytest.mark.parametrize(("error", "reason", "kind"), CASES)
def test_an_engine_is_tried_before_the_charge_where_one_is_loaded(
    config: Config, error: Exception, reason: str, kind: type[Exception]
) -> None:
    with pytest.raises(InputError) as refused:
        make_plan(config).try_models(raising(error), print)
    asked = reason if kind is InputError else f"engine: {reason}"
    assert str(refused.value) == asked


def test_no_engine_is_tried_where_the_run_loads_none(config: Config) -> None:
    engine = config.engine.model_copy(update={"kind": "openai"})
    plan = replace(make_plan(config), config=config.model_copy(update={"engine": engine}))
    assert plan.try_models(raising(AssertionError("never called")), print) is None

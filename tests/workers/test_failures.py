"""A worker's error shows no private word: Ray keeps it, and shows it on its dashboard."""

from __future__ import annotations

import errno
import pickle
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from dpray.methods.dp_sgd.training import ranks
from dpray.types import DprayError, InputError
from dpray.workers import rows
from dpray.workers.failures import Kind, WorkerError, find_error, kind_of, own_errors
from dpray.workers.rows import without_words
from dpray.workers.shards import ShardActor

WORD = "Marlowe"


def quote(*_: Any, **__: Any) -> Any:
    raise ValueError(f"cannot read '{WORD} has a cough'")


class Quoting:
    """A shard's worker whose every method quotes."""

    load = count = quote


def shard() -> ShardActor:
    actor = ShardActor.__new__(ShardActor)
    actor._worker = Quoting()
    return actor


TABLE = pa.Table.from_pylist([{"label": "a", "text": WORD, "unit": "1", "rank": 0}])

TRAINING = SimpleNamespace(method=SimpleNamespace(settings=SimpleNamespace(zero_stage=2)))

PLACES: dict[str, Callable[[], Any]] = {
    "a shard loads": lambda: shard().load(TABLE),
    "a shard answers": lambda: shard().call(quote, {}),
    "rows are read": lambda: list(
        rows._read_tables({"part": [0]}, [quote], lambda part: part(), iter)
    ),
    "units are bounded": lambda: list(rows._bound(TABLE, 1, quote)),
    "lines are counted": lambda: rows._count_lines(TABLE),
    "a rank trains": lambda: ranks._rank({"training": TRAINING}),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_name_of_an_error_is_all_that_a_worker_tells(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "count_rows", quote)
    monkeypatch.setattr(ranks.ray.train.torch, "get_device", lambda: "cpu")
    monkeypatch.setattr(ranks, "shared_key", lambda device: "00")
    monkeypatch.setattr(ranks, "generator", lambda key: None)
    monkeypatch.setattr(ranks, "loading", quote)
    with pytest.raises(WorkerError, match=r"^ValueError$") as caught:
        PLACES[place]()
    assert WORD not in "".join(traceback.format_exception(caught.value))
    assert WORD.encode() not in pickle.dumps(caught.value)


def test_a_panic_of_a_library_in_rust_has_only_its_name() -> None:
    """It is no `Exception`, and would end the process: a lost one has its work repeated."""
    with pytest.raises(WorkerError, match=r"^PanicException$"), without_words():
        raise type("PanicException", (BaseException,), {})(WORD)
    with pytest.raises(SystemExit), without_words():
        raise SystemExit


def test_an_error_of_the_system_keeps_its_number() -> None:
    with pytest.raises(OSError) as caught, without_words():
        raise OSError(errno.ENOSPC, f"no space for {WORD}", f"/tmp/{WORD}")
    assert caught.value.errno == errno.ENOSPC and WORD not in str(caught.value)


def test_an_error_of_dpray_passes() -> None:
    with pytest.raises(InputError, match=r"row 3 has no text"), without_words():
        raise InputError("row 3 has no text")


def test_the_loss_of_an_actor_that_a_worker_called_is_a_loss_without_its_words() -> None:
    lost = ActorDiedError(RayTaskError("f", WORD, ValueError(WORD)))
    assert WORD in str(lost)
    with pytest.raises(RayActorError) as caught, without_words():
        raise lost
    assert kind_of(caught.value) is Kind.LOST
    assert WORD not in str(caught.value) and caught.value.__cause__ is None


def wrapped(error: Exception) -> Exception:
    """As Ray raises what a task raised."""
    found: Exception = RayTaskError("f", "Traceback\n  of several\nlines", error)
    return found.as_instanceof_cause()  # type: ignore[attr-defined,no-any-return]


def test_an_error_of_ours_is_found_without_rays_wrapper() -> None:
    ours = InputError("method.template: no")
    outer = RuntimeError("outer")
    outer.__cause__ = wrapped(ours)
    for error in (ours, wrapped(ours), outer, wrapped(wrapped(ours))):
        assert find_error(error, DprayError) is ours
    assert find_error(wrapped(ValueError("private")), DprayError) is None


def test_an_error_of_ours_comes_without_what_ray_data_adds_to_it() -> None:
    from ray.data._internal.util import _annotate_exception_with_retry_context

    error = _annotate_exception_with_retry_context(
        InputError("a.csv, row 2: the label is not one"), description="apply UDF transform",
        attempts=1, max_attempts=1, total_backoff_s=0.0, exception_str="",
    )  # fmt: skip
    assert "To change retry attempts" in str(error)

    def fails() -> None:
        with own_errors():
            raise wrapped(error)  # type: ignore[arg-type]

    with pytest.raises(InputError) as raised:
        fails()
    assert str(raised.value) == "a.csv, row 2: the label is not one"

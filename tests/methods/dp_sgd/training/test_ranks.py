"""An error of Ray Train is the ranks' own, or says that none of them began."""

from __future__ import annotations

import pickle

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, WorkerCrashedError
from ray.train.v2._internal.exceptions import (
    InsufficientClusterResourcesError,
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from dpray.methods.dp_sgd.training.ranks import reason
from dpray.types import InputError, Resumable
from dpray.workers.failures import Kind, is_own_failure, kind_of


@pytest.mark.parametrize(
    "error", [WorkerGroupStartupTimeoutError(2), InsufficientClusterResourcesError("16 GPUs")]
)
def test_no_mechanism_failed_where_the_cluster_has_no_room_for_the_ranks(error: Exception) -> None:
    found = reason(came(ControllerError(error)))
    assert isinstance(found, Resumable) and not is_own_failure(found)
    assert "make room" in str(found)


def test_ranks_that_were_lost_before_they_began_are_started_anew() -> None:
    """Their first cause is not in what comes from Ray's controller."""
    try:
        raise WorkerGroupStartupFailedError("an actor failed") from RayActorError()
    except WorkerGroupStartupFailedError as error:
        found = reason(came(ControllerError(error)))
    assert isinstance(found, WorkerCrashedError) and kind_of(found) is Kind.LOST


def test_what_a_rank_raised_comes_before_what_the_others_miss() -> None:
    ours = UserExceptionWithTraceback(InputError("data.text: row 3"), "")
    found = reason(WorkerGroupError("", {0: RayActorError(), 1: ours}))
    assert isinstance(found, InputError)
    alone = UserExceptionWithTraceback(ValueError("x"), "")
    assert isinstance(reason(WorkerGroupError("", {0: alone})), ValueError)
    assert is_own_failure(ValueError("x"))


def test_a_rank_that_memory_ended_is_a_lost_one() -> None:
    low = OutOfMemoryError("the node was running low on memory")
    found = reason(WorkerGroupError("", {0: RayActorError(), 1: low}))
    assert kind_of(found) is Kind.MEMORY and not is_own_failure(found)


def came(error: TrainingFailedError) -> TrainingFailedError:
    """The error as it comes from another process."""
    copy: TrainingFailedError = pickle.loads(pickle.dumps(error))
    return copy

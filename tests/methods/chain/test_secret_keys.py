"""Each stage of a chain draws its secret coins from a key of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dpray.config.config import Config
from dpray.ledger.ledger import Ledger
from dpray.registry import make_plan
from dpray.runs.folder import BATCHES_KEY, ReleaseFolder
from dpray.runs.session import Session
from dpray.types import Budget, InputError
from dpray.workers.engine import build_engine
from tests.workers.outcomes import open_budget

RUN = "0123"
STAGES = ("1-dp_kps", "2-private_prediction")
Key = Callable[[str], str]


@pytest.fixture
def ledger(config: Callable[..., Config]) -> Iterator[Ledger]:
    run = config("dp_kps", "private_prediction")
    with closing(open_budget(run)) as opened:
        charge = {RUN: (make_plan(run).dp_event, Budget(30.0, 1e-5))}
        opened.reserve("notes", charge, "record", "add_or_remove_one")
        yield opened


@pytest.fixture
def key(config: Callable[..., Config], ledger: Ledger, tmp_path: Path) -> Key:
    """Return the key that a stage has in a new attempt at the run."""
    plan = make_plan(config("dp_kps", "private_prediction"))

    def of(stage: str) -> str:
        with closing(ReleaseFolder(str(tmp_path / "out"))) as folder:
            whole = Session(plan, folder, ledger, RUN, "ab" * 16, lambda _: None, build_engine)
            with whole.link(stage, plan) as session:
                return session.secret_key(BATCHES_KEY, "nobody knows")

    return of


def test_two_stages_have_two_keys_and_each_keeps_its_own(key: Key, ledger: Ledger) -> None:
    first, second = (key(stage) for stage in STAGES)
    assert first != second
    ledger.begin(RUN, "attempt", [f"{stage}.batch" for stage in STAGES])
    assert [key(stage) for stage in STAGES] == [first, second]


def test_a_key_that_is_missing_after_its_stage_began_is_not_made_anew(
    key: Key, ledger: Ledger, tmp_path: Path
) -> None:
    for stage in STAGES:
        key(stage)
    ledger.begin(RUN, "attempt", [f"{STAGES[1]}.batch"])
    (tmp_path / "out" / "private" / f"{STAGES[1]}.{BATCHES_KEY}").unlink()
    with pytest.raises(InputError, match=rf"{STAGES[1]}\.{BATCHES_KEY} is missing, so that nobody"):
        key(STAGES[1])


def test_a_finished_run_keeps_no_stages_key(key: Key, tmp_path: Path) -> None:
    for stage in STAGES:
        key(stage)
    private = tmp_path / "out" / "private"
    assert len(list(private.glob("*.key"))) == 2
    with closing(ReleaseFolder(str(tmp_path / "out"))) as folder:
        folder.remove_work()
    assert not list(private.glob("*.key"))

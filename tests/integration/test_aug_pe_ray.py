"""Aug-PE on a real Ray, with what is killed in mid-run. `test_gpu_placement` has several shards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from dpray.ledger.ledger import Ledger
from tests.engines.api_server import Server, running_server
from tests.faults.test_kills import kill_workers
from tests.integration.processes import Cluster, Runs, environment, wait_for

pytestmark = pytest.mark.slow

AUG_PE = {
    "name": "aug_pe", "records": 12, "iterations": 4, "variations": 4, "max_tokens": 40,
    "word_var": None, "max_retries": 6,
}  # fmt: skip


@pytest.fixture
def endpoint() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def aug_pe(runs: Callable[..., Runs], endpoint: Server) -> Runs:
    """A shard actor with the real embedder, and an endpoint that answers one call at a time."""
    run = runs(runtime__actors=1, data__public_size=60)
    run.tree["method"] = AUG_PE
    run.tree["engine"] = {
        "kind": "openai", "model": "m", "base_url": endpoint.url, "max_in_flight": 2,
        "attempts": 30,
    }  # fmt: skip
    return run


def assert_once(run: Runs, report: dict[str, Any]) -> None:
    """Charged once, voted once an iteration, and the report's cost is the ledger's."""
    with closing(Ledger.open(run.url)) as ledger:
        assert ledger.verify() == []
        account = ledger.account("notes")
        votes = [unit for unit, _ in ledger.published(report["ledger"]["reservation"])]
    assert account is not None and len(account.charges) == 1
    assert (account.spent.epsilon, account.spent.delta) == (report["epsilon"], report["delta"])
    assert votes == [f"votes-{t:04d}" for t in range(1, 5)]
    records = [json.loads(line) for line in run.synthetic()]
    assert len(records) == report["records"] == 12


def voted(run: Runs) -> int:
    return run.counts()["published"]


KILLED_IN_A_VOTE = """
import os, signal, sys
from dpray.cli import main
from dpray.methods.aug_pe import release

vote, votes = release.noisy_votes, []

def killed(*arguments):
    votes.append(vote(*arguments))
    if len(votes) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return votes[-1]

release.noisy_votes = killed
main(["run", *sys.argv[1:], "--json"])
"""
"""Dies in a vote, before it is published."""


def test_driver_killed_in_a_vote_then_an_actor_then_the_driver_between_iterations(
    aug_pe: Runs, endpoint: Server, cluster: Cluster, capfd: pytest.CaptureFixture[str]
):
    """The run begins and ends without Ray, and is on Ray between."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_IN_A_VOTE, str(aug_pe.config), "runtime.ray_address=none"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert aug_pe.finish(process).code == -signal.SIGKILL
    assert aug_pe.counts().items() >= {"started": 2, "published": 1}.items()
    process = aug_pe.start()
    wait_for(lambda: voted(aug_pe) >= 2, process)
    kill_workers(cluster, "ShardActor")
    wait_for(lambda: voted(aug_pe) >= 3, process)
    process.kill()
    assert aug_pe.finish(process).code == -signal.SIGKILL
    asked = len(endpoint.requests)
    report = aug_pe.here(capfd).report
    assert_once(aug_pe, report)
    # Only what was in flight when the driver was killed is asked for again. One call tried it.
    assert len(endpoint.requests) <= report["calls"]["calls"] + 3
    assert asked < len(endpoint.requests)
    sent = json.dumps([body for _, body in endpoint.requests])
    assert "Marlowe" not in sent

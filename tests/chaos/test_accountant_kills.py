"""The accountant is killed at every operation of a run, by the name of its state: before its
transaction, before the commit, and before anybody has the answer. The run goes on by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.kept import keep
from tests.chaos.recount import recount
from tests.chaos.rehearsed import METHODS, RECORDS, make_budget
from tests.chaos.side_doors import with_faulty_workers
from tests.databases import new_schema
from tests.integration.processes import Runs

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1800)]

MOST_STARTS = 5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("state", ["before", "uncommitted", "after"])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_the_accountant_killed_at_each_operation(
    runs: Callable[..., Runs],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    method: str,
    state: str,
    database: str,
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    if database == "postgresql":
        url = new_schema(request.getfixturevalue("postgresql_socket"))
    make_budget(url)
    run = runs(data__public_size=RECORDS, privacy__ledger=url)
    with_faulty_workers(run, method, "accountant", state)
    deaths: Counter[str] = Counter()
    result = "held"
    try:
        for _ in range(MOST_STARTS):
            ended = run.run()
            assert ended.code in (0, 4), ended.err
            assert recount(url, [run.output], tmp_path / "since") == []
            if ended.code == 0:
                break
        assert len(run.synthetic()) == ended.report["records"]
        deaths = Counter(run.marker.with_suffix(".deaths").read_text().splitlines())
        assert {name.split()[1] for name in deaths} >= {"reserve", "begin", "publish", "commit"}
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        about = {"method": method, "database": database, "state": state}
        keep(accountant=True, **about, deaths=deaths, result=result)

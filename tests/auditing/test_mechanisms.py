"""Every mechanism keeps its claim, and the audit catches the faults that docs/audit.md names.

A right mechanism is reported with probability 0.1 % at most. In 6 to 80 audits each, the mean bound
of the faults nearest to their claims was about four of its standard deviations above them.
"""

from __future__ import annotations

import pytest

from tests.auditing.cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", CASES)
def test_claims_hold_and_faults_are_seen(name: str) -> None:
    case = CASES[name]
    found = case.finding()
    assert found.holds is not case.caught, found

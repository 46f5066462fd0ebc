"""Every mechanism keeps its claim, and the audit catches the faults that docs/audit.md names.

A right mechanism is reported with probability 0.1 % at most. In 6 to 80 audits each, the mean bound
of the faults nearest to their claims was about four of its standard deviations above them.
"""

from __future__ import annotations

import pytest

from tests.evaluation.cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


REPEATED = {
    "private prediction, dclip, 1 token(s): temperature / 2",
    "DP-KPS, vocabulary and densities: a term counts twice",
    "DP-KPS, vocabulary and densities: half the noise",
    "DP-KPS, densities, Gaussian: cut removed",
}
"""Another mechanism has the same fault in the same code."""


def is_tried(name: str) -> bool:
    """Return whether a case can show a mistake that no other one does. Less noise than half of it
    is not tried where half of it is caught, nor a fault that the audit does not see."""
    mechanism, _, fault = name.rpartition(": ")
    half = CASES.get(f"{mechanism}: half the noise")
    if half is not None and half.caught and fault in ("no noise", "a tenth of the noise"):
        return False
    return name not in REPEATED and (CASES[name].caught or fault == "none")


@pytest.mark.parametrize("name", list(filter(is_tried, CASES)))
def test_claims_hold_and_faults_are_seen(name: str) -> None:
    case = CASES[name]
    found = case.finding()
    assert found.holds is not case.caught, found

"""A pytest plugin with which a skipped test is a failed one: `pytest -p tests.no_skips`.

CI runs the suite with it, so that no test stops running there unseen.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

ALLOWED = {
    r"the extra dpray\[reference\] is not installed": "under the GPL",
    r"no folder \.\./shared": "its licences keep it out of the project",
    r"this process may not mount": "a container without that privilege",
    r"want a core each": "a machine with one core",
    r"GPU|CUDA": "a machine without one",
}
"""Patterns of reasons to skip, and why CI may give them."""


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(re.search(pattern, reason) for pattern in ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which fails here: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report

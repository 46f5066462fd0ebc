"""The report of the newest releases."""

import sys

import pytest

from tests.supply_chain.newest import (
    FAST_TESTS,
    ROOT,
    Outcome,
    constraints,
    deprecations,
    install,
    outcome,
    report,
    run,
)

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_good"/>
<testcase classname="tests.test_a" name="test_later"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_a" name="test_bad"><failure message="a&#10;  of 3"/></testcase>
<testcase classname="" name="tests.test_b"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""

WARNINGS = f"""tests/test_a.py::test_good
  {ROOT}/dpray/io/a.py:12: DeprecationWarning: g is old, use h
    g()
  /out/lib/python3.11/site-packages/torch/jit.py:5: FutureWarning: jit is old
  /out/lib/python3.11/site-packages/torch/jit.py:9: FutureWarning: jit is old
  /out/lib/python3.11/site-packages/torch/jit.py:9: UserWarning: no GPU
"""


def test_the_report_names_what_is_newer_and_what_failed() -> None:
    ours = constraints("# pins\nPyYAML==6.0.3\ntorch==2.13.0\nabsl_py==2.5.1\n")
    newest = {"pyyaml": "6.0.3", "torch": "2.14.1+cpu", "absl-py": "2.5.1", "extra": "1.0"}
    tests = outcome(JUNIT)
    assert tests.counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert tests.failed == [
        ("tests.test_a.test_bad", "  of 3"),
        (".tests.test_b", "collection failure"),
    ]
    page = report(ours, newest, tests, deprecations(WARNINGS))
    assert "| torch | 2.13.0 | 2.14.1+cpu |" in page and "| extra | none | 1.0 |" in page
    assert "pyyaml" not in page and "absl-py" not in page
    assert "1 passed, 2 failed, 1 skipped" in page and "`tests.test_a.test_bad`:   of 3" in page
    assert "- dpray/io/a.py:12: DeprecationWarning: g is old, use h\n" in page
    assert "- torch/jit.py:5: FutureWarning: jit is old\n" in page
    assert "Deprecations: 2" in page and "Not finished" not in page


def test_a_report_without_tests_says_so() -> None:
    assert "none ran" in report({}, {}, None, [])
    assert "**Not finished**: pip install" in report({}, {}, None, [], "pip install x")
    assert "0 passed" in report({}, {}, Outcome({"passed": 0}, []), [])


def test_the_first_step_that_fails_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("no folder")
    with (tmp_path / "log").open("w") as log:
        failed = install(tmp_path / "file" / "newest", log)
    assert "-m venv --clear" in failed and (tmp_path / "log").read_text().count("$ ") == 1


def test_what_has_no_end_is_ended(tmp_path) -> None:
    with (tmp_path / "log").open("w") as log:
        assert run([sys.executable, "-c", "import time; time.sleep(600)"], log, 1) != 0


TESTS = """
import os, time
import pytest

def test_good(): pass
def test_hangs(): time.sleep(600)
def test_dies(): os._exit(1)
def test_last(): pass
"""


@pytest.mark.slow
def test_tests_that_hang_or_die_or_cannot_be_read_do_not_stop_the_others(tmp_path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text("import no_such_module")
    junit = tmp_path / "newest.xml"
    options = [*FAST_TESTS, "--timeout=3", "--junit-xml", str(junit), "--rootdir", str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        status = run([sys.executable, "-m", "pytest", *options, str(tmp_path)], log)
    tests = outcome(junit.read_text())
    assert status == 1, (tmp_path / "log").read_text()
    assert tests.counts == {"passed": 2, "failed": 3, "skipped": 0}
    assert [name.rpartition(".")[2] for name, _ in tests.failed] == [
        "test_b",
        "test_hangs",
        "test_dies",
    ]

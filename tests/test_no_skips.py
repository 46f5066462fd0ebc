"""The rule of CI that a skipped test is a failed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SKIPPED = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason="no Chromium on this machine")
def test_by_mark():
    pass

@pytest.fixture
def server():
    pytest.skip("no nginx")

def test_by_fixture(server):
    pass

@pytest.mark.xfail(reason="a fault that is known")
def test_expected_to_fail():
    assert False

def test_allowed():
    pytest.importorskip("no_such_module", reason="the extra dpray[reference] is not installed")
"""


def outcome(folder, *options):
    quiet = ["-m", "pytest", "-q", "-c", "/dev/null", "-p", "xdist"]
    done = subprocess.run(
        [sys.executable, *quiet, *options, str(folder)],
        cwd=ROOT,
        # Other plugins take most of the time to start.
        env=os.environ | {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "test_of_functions.py").write_text(SKIPPED)
    return tmp_path


def test_a_skipped_test_fails_but_for_an_allowed_reason(suite):
    code, told = outcome(suite)
    assert code == 0 and "1 passed, 3 skipped, 1 xfailed" in told

    code, told = outcome(suite, "-n", "2", "-p", "tests.no_skips")
    assert code == 1 and "1 passed, 1 skipped, 1 xfailed" in told
    assert "no Chromium on this machine" in told and "no nginx" in told


def test_a_skipped_file_fails(suite):
    module = 'import pytest\npytest.skip("no browser", allow_module_level=True)\n'
    (suite / "test_of_a_file.py").write_text(module)
    code, told = outcome(suite, "-n", "2", "-p", "tests.no_skips")
    assert code in (1, 2) and "no browser" in told


def test_ci_runs_the_suite_by_that_rule():
    script = (ROOT / ".ci" / "run").read_text()
    assert "PYTEST_ADDOPTS" in script and "-p tests.no_skips" in script
    for package in ("chromium", "nginx-light", "postgresql", "prometheus"):
        assert package in script

"""Runs on the cluster, and small trainings, for the tests of what fails in their midst."""

from tests.integration.conftest import runs as runs
from tests.integration.conftest import training as training
from tests.integration.conftest import waiting_runs as waiting_runs

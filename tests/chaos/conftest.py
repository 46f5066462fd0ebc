"""Runs on the cluster, and small trainings, for the storms."""

from tests.integration.conftest import runs as runs
from tests.integration.conftest import training as training

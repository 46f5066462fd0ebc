"""Plans, and their runs on this machine or on Ray."""

import os

# Ray prints what its nodes and its lost tasks report on the driver's stdout, also where
# `log_to_driver` is off: such a line can quote what a task failed on, and stands between a program
# and the answer of `--json`. It stays in Ray's own logs. Read when Ray is imported, so set here.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
# The same of errors of a task that nobody asked for any more.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")

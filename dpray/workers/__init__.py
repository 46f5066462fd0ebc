"""The work of a run is spread over processes and machines by Ray."""

import os

# Ray prints the reports of its nodes and lost tasks on the driver's stdout, even where
# `log_to_driver` is off: such a line can quote private text, and breaks the output of `--json`.
# It stays in Ray's own logs. Ray reads these variables when it is imported, so they are set here.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
# This silences the errors of a task whose result is not awaited.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
# Without a bound, Ray repeats a task that its memory monitor ended, and a run whose rows do not fit
# into the memory would never end.
os.environ.setdefault("RAY_task_oom_retries", "3")

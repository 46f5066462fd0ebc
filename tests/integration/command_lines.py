"""Several command lines in one process: `python command_lines.py '[["run", "config.yaml"], ...]'`.

Prints a line of JSON: the exit code and the errors of each.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr
from io import StringIO

from dpray.cli import run_command


def outcome(arguments: list[str]) -> tuple[int, str]:
    with redirect_stderr(StringIO()) as errors:
        code = run_command(arguments)
    return code, errors.getvalue()


def main() -> None:
    print(json.dumps([outcome(arguments) for arguments in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()

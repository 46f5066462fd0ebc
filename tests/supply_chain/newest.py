"""`python -m tests.supply_chain.newest TESTS.xml REPORT.md` reports what the newest releases break.

The report has the packages that are beyond constraints.txt, and the tests that failed. It is the
end of `make newest`.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def constraints(text: str) -> dict[str, str]:
    """Return the version of each package in a constraints file."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            wanted = Requirement(line)
            found[canonicalize_name(wanted.name)] = str(wanted.specifier).removeprefix("==")
    return found


def installed() -> dict[str, str]:
    return {str(canonicalize_name(each.name)): each.version for each in metadata.distributions()}


def failures(junit: str) -> list[tuple[str, str]]:
    """Return a JUnit file's tests that failed or could not begin, each with a line of why."""
    found = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        for why in (case.find("failure"), case.find("error")):
            if why is not None:
                lines = (why.get("message") or "").strip().splitlines() or [""]
                found.append((f"{case.get('classname')}.{case.get('name')}", lines[-1]))
    return found


def report(
    ours: Mapping[str, str], newest: Mapping[str, str], failed: list[tuple[str, str]], ran: bool
) -> str:
    """Return the page. A package that is not in constraints.txt is new."""
    rows = [
        f"| {name} | {ours.get(name, 'none')} | {version} |"
        for name, version in sorted(newest.items())
        if name not in ours or Version(ours[name]) != Version(Version(version).public)
    ]
    lines = ["# The newest releases", "", "| package | constraints.txt | newest |", "|---|---|---|"]
    lines += [*rows, "", f"## Tests that failed: {len(failed) if ran else 'none ran'}", ""]
    lines += [f"- `{name}`: {why}" for name, why in failed]
    return "\n".join(lines) + "\n"


def main(junit: str, target: str) -> None:
    file = Path(junit)
    failed = failures(file.read_text()) if file.exists() else []
    ours = constraints((ROOT / "constraints.txt").read_text())
    page = report(ours, installed(), failed, file.exists())
    Path(target).write_text(page)
    print(page)


if __name__ == "__main__":
    main(*sys.argv[1:])

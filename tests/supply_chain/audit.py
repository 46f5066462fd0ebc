"""`make audit` looks up what is known against dpray's code and what it is built of.

    AUDIT/bin/python -m tests.supply_chain.audit [--without-vulnerabilities] PYTHON

The tools run in an environment of their own, AUDIT, and look at the packages of PYTHON's. Whatever
they find fails the audit, unless `exceptions.toml` says why it may stay. An exception that nothing
needs any more, or that is older than a year, fails it too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.manifests import pod_templates

ROOT = Path(__file__).parents[2]
EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
BILLS = ROOT / "out" / "sbom"

OURS = "dpray"
YEAR = datetime.timedelta(days=365)
KUBERNETES = ("1.30", "1.36")
"""The oldest and the newest version whose schemas the manifests are checked against."""

KNOWN = re.compile(
    r"\b(0BSD|Apache|BSD|BSL-1.0|CC0|CNRI|HPND|ISC|MIT|MPL|Mozilla|NCSA|PSF|Python Software|"
    r"Unlicense)\b",
    re.IGNORECASE,
)
REFUSED = re.compile(r"GPL|General Public|propriet|commercial|UNKNOWN", re.IGNORECASE)


class NotLookedUp(Exception):
    """The service with the known vulnerabilities did not answer."""


@dataclass(frozen=True)
class Found:
    """The findings of one check, one line each, and the number of things that it looked at."""

    findings: tuple[str, ...]
    looked_at: int


@dataclass(frozen=True)
class Waiver:
    """An entry of `exceptions.toml`: findings that match `what`, in which `*` stands for anything,
    may stay."""

    what: str
    reason: str
    date: datetime.date

    def covers(self, finding: str) -> bool:
        return fnmatchcase(finding, self.what)


def read_waivers(path: Path = EXCEPTIONS) -> dict[str, list[Waiver]]:
    """Return the exceptions of each check. Raises TypeError for a key that is missing or
    unknown."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {check: [Waiver(**entry) for entry in entries] for check, entries in tables.items()}


def problems(
    check: str, found: Found | None, waivers: Sequence[Waiver], today: datetime.date
) -> Iterator[str]:
    """Yield what fails the audit. Without `found` the check did not run: then nobody knows which
    exceptions it needs."""
    findings = found.findings if found else ()
    for finding in findings:
        if not any(waiver.covers(finding) for waiver in waivers):
            yield f"{check}: {finding}"
    for waiver in waivers:
        if not waiver.reason.strip():
            yield f"{check}: the exception {waiver.what!r} has no reason"
        if not today - YEAR <= waiver.date <= today:
            yield f"{check}: the exception {waiver.what!r} is not of the last year: look again"
        if found and not any(map(waiver.covers, findings)):
            yield f"{check}: the exception {waiver.what!r} is no longer needed"


# The checks


def run_tool(name: str, *arguments: str | Path, exit_codes: Sequence[int] = (0,)) -> str:
    """Return what a tool of this environment prints. Raises SystemExit if it fails."""
    command = [Path(sys.executable).parent / name, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in exit_codes:
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def installed(python: str) -> list[dict[str, str]]:
    """Return name, version and licence of each package."""
    told = run_tool(
        "pip-licenses", "--python", python, "--from=mixed", "--with-system", "--format=json"
    )
    packages: list[dict[str, str]] = json.loads(told)
    return packages


def licences(packages: Sequence[Mapping[str, str]]) -> Found:
    """Find the packages whose licence is not known to be a permissive one or the MPL."""
    named = {package["Name"]: package["License"].split("\n")[0] for package in packages}
    found = (f"{name}: {licence}" for name, licence in named.items() if not is_free(licence))
    return Found(tuple(found), len(named))


def is_free(licence: str) -> bool:
    return bool(KNOWN.search(licence)) and not REFUSED.search(licence)


LookUp = Callable[[Sequence[str]], str]
"""It returns pip-audit's JSON for lines like `name==version`, or "" if pip-audit failed."""


def look_up(lines: Sequence[str]) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        options = ("--disable-pip", "--no-deps", "--progress-spinner=off", "--format=json")
        return run_tool("pip-audit", *options, "-r", file.name, exit_codes=(0, 1))


def vulnerabilities(packages: Sequence[Mapping[str, str]], ask: LookUp = look_up) -> Found:
    """Find the known vulnerabilities. Raises NotLookedUp if the service does not answer: pip-audit
    itself calls a package that it cannot look up skipped, and ends well. One package is asked for
    before all others."""
    # The advisories know no local versions, such as 2.13.0+cpu.
    lines = [
        f"{each['Name']}=={each['Version'].partition('+')[0]}"
        for each in packages
        if each["Name"] != OURS
    ]
    if any("skip_reason" in each for each in _answer(ask(lines[:1]))):
        raise NotLookedUp
    answer = _answer(ask(lines))
    found = [f"{each['name']}: not looked up" for each in answer if "skip_reason" in each]
    for each in answer:
        found += [f"{each['name']}: {known['id']}" for known in each.get("vulns", ())]
    return Found(tuple(found), len(lines))


def _answer(told: str) -> list[dict[str, Any]]:
    try:
        answer: list[dict[str, Any]] = json.loads(told)["dependencies"]
    except ValueError:
        raise NotLookedUp from None
    return answer


def bandit() -> Found:
    """Find what bandit objects to, a line a test and file. No comment in the code hides any."""
    told = run_tool(
        "bandit", "--quiet", "--ignore-nosec", "--format=json", "-r", "dpray", "jobs",
        exit_codes=(0, 1),
    )  # fmt: skip
    report = json.loads(told)
    if report["errors"]:
        raise SystemExit(f"bandit cannot read {report['errors']}")
    found = {f"{each['test_id']} {each['filename']}" for each in report["results"]}
    return Found(tuple(sorted(found)), report["metrics"]["_totals"]["loc"])


def manifests() -> Found:
    """Find what Kubernetes itself would refuse in `cluster/kuberay`. Of kinds that are KubeRay's,
    whose schemas no package has, the pods are checked."""
    import kubernetes_validate
    import yaml

    found, looked_at = [], 0
    for path in sorted((ROOT / "cluster" / "kuberay").glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for part in parts_to_validate(manifest):
                looked_at += 1
                for version in KUBERNETES:
                    try:
                        kubernetes_validate.validate(part, version, strict=True)
                    except kubernetes_validate.ValidationError as error:
                        place = ".".join(map(str, error.absolute_path))
                        found.append(f"{path.name} {part['kind']} {place}: {error.message}")
    return Found(tuple(found), looked_at)


def parts_to_validate(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the manifest, or the pod templates of one whose kind Kubernetes does not know."""
    group = manifest["apiVersion"].partition("/")[0]
    if group not in ("ray.io", "monitoring.coreos.com"):
        yield manifest
        return
    for template in pod_templates(manifest):
        shell = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        yield shell | {"template": template}


def dockerfile() -> Found:
    """Find what hadolint objects to in the image's file. No comment in the file hides any."""
    options = ("--no-fail", "--disable-ignore-pragma", "--format", "json")
    objections = json.loads(run_tool("hadolint", *options, "cluster/Dockerfile"))
    return Found(tuple(f"{each['code']} {each['message']}" for each in objections), 1)


def write_bills(python: str, version: str) -> None:
    """Write the bills of materials: of the installed wheel with all around it, and of the image's
    packages with the hashes that it accepts."""
    BILLS.mkdir(parents=True, exist_ok=True)
    common = ("--output-reproducible", "--pyproject", "pyproject.toml", "-o")
    for kind, source in {"environment": python, "requirements": "cluster/requirements.txt"}.items():
        path = BILLS / f"{kind}.cdx.json"
        run_tool("cyclonedx-py", kind, *common, path, source)
        bill = json.loads(path.read_text(encoding="utf-8"))
        bill["metadata"]["component"]["version"] = version  # pyproject.toml leaves it to setuptools
        path.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="audit", description=__doc__.partition("\n")[0])
    parser.add_argument("python", help="the interpreter of the environment that is audited")
    parser.add_argument(
        "--without-vulnerabilities", action="store_true", help="pass without looking them up"
    )
    options = parser.parse_args(arguments)
    packages = installed(options.python)
    checks: dict[str, Callable[[], Found]] = {
        "vulnerabilities": partial(vulnerabilities, packages),
        "licences": partial(licences, packages),
        "bandit": bandit,
        "manifests": manifests,
        "dockerfile": dockerfile,
    }
    waivers = read_waivers()
    failed = [f"{name}: there is no such check" for name in set(waivers) - set(checks)]
    today = datetime.date.today()
    for name, check in checks.items():
        found = None
        if name == "vulnerabilities" and options.without_vulnerabilities:
            print(f"{name}: NOT LOOKED UP, as asked")
        else:
            try:
                found = check()
                print(f"{name}: {len(found.findings)} found, {found.looked_at} looked at")
            except NotLookedUp:
                failed.append(
                    f"{name}: NOT LOOKED UP, because the service does not answer; "
                    "--without-vulnerabilities passes without"
                )
        failed += problems(name, found, waivers.get(name, []), today)
    [version] = [each["Version"] for each in packages if each["Name"] == OURS]
    write_bills(options.python, version)
    print(f"bills of materials: {BILLS.relative_to(ROOT)}")
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

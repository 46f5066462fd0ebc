"""The audit's own rules; `make audit` runs its tools."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.supply_chain.audit import (
    Found,
    NotLookedUp,
    Waiver,
    is_free,
    licences,
    parts_to_validate,
    problems,
    read_waivers,
    vulnerabilities,
)

TODAY = datetime.date(2026, 11, 27)
FOUND = Found(("a: GPL", "b: UNKNOWN"), 5)


def waiver(what: str, reason: str = "because", days: int = 0) -> Waiver:
    return Waiver(what, reason, TODAY - datetime.timedelta(days=days))


def failures(found: Found | None, *waivers: Waiver) -> list[str]:
    return list(problems("check", found, waivers, TODAY))


def test_each_finding_needs_an_exception() -> None:
    assert failures(FOUND) == ["check: a: GPL", "check: b: UNKNOWN"]
    assert failures(FOUND, waiver("a: GPL")) == ["check: b: UNKNOWN"]
    assert failures(FOUND, waiver("a: GPL"), waiver("b: *")) == []
    assert failures(FOUND, waiver("A: *"), waiver("b: *"))[0] == "check: a: GPL"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (waiver("*", reason=" "), "has no reason"),
        (waiver("*", days=366), "not of the last year"),
        (waiver("*", days=-1), "not of the last year"),
        (waiver("c: *"), "no longer needed"),
    ],
)
def test_an_exception_has_to_be_of_use_and_looked_at(wrong: Waiver, why: str) -> None:
    assert failures(FOUND, waiver("*", days=365)) == []
    [failure] = failures(FOUND, waiver("*"), wrong)
    assert why in failure and repr(wrong.what) in failure


def test_a_check_that_did_not_run_needs_no_exception_and_looks_at_their_dates() -> None:
    assert failures(None, waiver("c: *")) == []
    assert len(failures(None, waiver("c: *", days=366))) == 1


def test_the_file_of_exceptions_has_known_keys_alone(tmp_path: Path) -> None:
    kept = read_waivers()
    assert set(kept) <= {"vulnerabilities", "licences", "bandit", "manifests"}
    assert all(entry.reason and isinstance(entry.date, datetime.date) for entry in kept["licences"])
    for more in ("", 'date = 2026-11-27\nwhy = "x"'):
        (tmp_path / "exceptions.toml").write_text(f'[[licences]]\nwhat = "a"\nreason = "b"\n{more}')
        with pytest.raises(TypeError):
            read_waivers(tmp_path / "exceptions.toml")


@pytest.mark.parametrize(
    ("licence", "free"),
    [
        ("MIT License", True),
        ("Apache-2.0 WITH LLVM-exception AND BSD-2-Clause", True),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
        ("LGPL-3.0-only", False),
        ("MIT AND GPL-2.0-or-later", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("Apache Software License; Other/Proprietary License", False),
        ("LIMITED", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_a_licence_is_free_if_it_is_known_and_nothing_in_it_is_refused(
    licence: str, free: bool
) -> None:
    assert is_free(licence) == free
    found = licences([{"Name": "a", "Version": "1", "License": f"{licence}\nand its text"}])
    assert found == Found(() if free else (f"a: {licence}",), 1)


PACKAGES = [
    {"Name": name, "Version": version}
    for name, version in {"a": "1.0", "dpray": "0.1.0", "torch": "2.13.0+cpu"}.items()
]


def answer(*dependencies: dict[str, Any]) -> str:
    return json.dumps({"dependencies": dependencies})


class Service:
    """Answers for each package by its name, and keeps what it was asked."""

    def __init__(self, **known: dict[str, Any]) -> None:
        self.known, self.asked = known, list[str]()

    def __call__(self, lines: Sequence[str]) -> str:
        self.asked += lines
        names = [line.partition("==")[0] for line in lines]
        return answer(*({"name": name, **self.known[name]} for name in names))


def test_vulnerabilities_are_looked_up_by_public_versions() -> None:
    service = Service(a={"vulns": []}, torch={"vulns": [{"id": "PYSEC-1"}, {"id": "GHSA-2"}]})
    found = vulnerabilities(PACKAGES, service)
    assert found == Found(("torch: PYSEC-1", "torch: GHSA-2"), 2)
    assert service.asked == ["a==1.0", "a==1.0", "torch==2.13.0"]


def test_what_the_service_skips_is_not_free_of_vulnerabilities() -> None:
    skipped = {"skip_reason": "not found"}
    service = Service(a={"vulns": []}, torch=skipped)
    assert vulnerabilities(PACKAGES, service).findings == ("torch: not looked up",)
    service = Service(a=skipped, torch=skipped)
    with pytest.raises(NotLookedUp):
        vulnerabilities(PACKAGES, service)
    assert service.asked == ["a==1.0"]
    with pytest.raises(NotLookedUp):
        vulnerabilities(PACKAGES, lambda lines: "")  # pip-audit ended with a traceback


def test_of_a_kind_that_kubernetes_does_not_know_the_pods_are_checked() -> None:
    template = {"spec": {"containers": [{"name": "ray-head"}]}}
    service = {"apiVersion": "v1", "kind": "Service"}
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": {"groups": [template] * 2}}
    assert list(parts_to_validate(service)) == [service]
    pods = list(parts_to_validate(cluster))
    assert [pod["kind"] for pod in pods] == ["PodTemplate"] * 2
    assert pods[0]["template"] == template

"""The files of `cluster/monitoring`, by Prometheus' own `promtool`, and their names by those that
the code registers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.dashboard.modules.metrics.dashboards import (
    default_dashboard_panels,
    serve_dashboard_panels,
)
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

from dpray.workers.metrics import METRICS
from tests.cluster.files import CLUSTER

MONITORING = CLUSTER / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "dashboard.json").read_text())
NAME = re.compile(r"\b(?:ray|dpray|kuberay|kube|pg)_\w+")
OTHERS = {
    "kuberay_job_deployment_status",  # KubeRay's operator
    "kube_pod_container_status_terminated_reason",  # kube-state-metrics
    "pg_up",  # PostgreSQL's exporter
}
"""Names that programs export which are not here to ask."""


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool (the Debian package prometheus)")
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True)


def rule_names(text: str) -> set[str]:
    """The metrics that rules ask for."""
    groups = yaml.safe_load(text)["groups"]
    return set(NAME.findall(" ".join(rule["expr"] for group in groups for rule in group["rules"])))


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def dashboard_names(dashboard: dict[str, Any]) -> set[str]:
    asked = [variable["query"] for variable in dashboard["templating"]["list"]]
    return set(NAME.findall(" ".join(expressions(dashboard) + asked)))


def ours() -> set[str]:
    """The names on Ray's pages."""
    ends = {"counter": "_total", "gauge": ""}
    return {f"ray_{metric.name}{ends[metric.kind]}" for metric in METRICS}


def rays() -> set[str]:
    """The names that this Ray's own dashboards and agents use."""
    files = (default_dashboard_panels.__file__, serve_dashboard_panels.__file__)
    panels = "".join(Path(file).read_text() for file in files)
    return set(NAME.findall(panels)) | {f"ray_{name}" for name in METRICS_GAUGES}


def test_every_name_in_the_files_is_exported_and_every_export_is_shown():
    rules = rule_names((MONITORING / "alerts.yaml").read_text())
    shown = dashboard_names(DASHBOARD)
    assert (rules | shown) - (ours() | rays()) == OTHERS
    assert ours() - shown == set()


def test_the_page_on_monitoring_lists_every_metric_and_every_alert():
    page = (CLUSTER.parent / "docs" / "operations.md").read_text()
    first_cells = " ".join(line.split("|")[1] for line in page.splitlines() if line[:3] == "| `")
    named = set(re.findall(r"`(\w+)`", first_cells))
    assert named == {name.removeprefix("ray_") for name in ours()} | set(FIRES)


def check_rules(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "rules.yaml"
    path.write_text(text)
    return promtool("check", "rules", path)


def check_dashboard(dashboard: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Raises ValidationError where its form is wrong; PromQL's judgement of its expressions."""
    jsonschema.Draft202012Validator(SCHEMA).validate(dashboard)
    rules = [
        {"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(expressions(dashboard))
    ]
    return check_rules(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), folder)


def test_prometheus_takes_the_files(tmp_path: Path):
    checked = [
        promtool("check", "config", "--syntax-only", MONITORING / "prometheus.yaml"),
        check_rules((MONITORING / "alerts.yaml").read_text(), tmp_path),
        check_dashboard(DASHBOARD, tmp_path),
    ]
    assert [(each.returncode, each.stderr) for each in checked] == [(0, "")] * 3


RUN = '{run="r", dataset="notes", method="dp_sgd"}'
DONE, PARTS = f"ray_dpray_activity_done{RUN}", f"ray_dpray_activity_parts{RUN}"
REQUESTS = "ray_serve_num_http_requests_total"
GOOD, BAD, ONE_DIES, ANOTHER_COMES = (
    f'{REQUESTS}{{application="dpray", node="{node}", status_code="{status}"}}'
    for node, status in (("a", 200), ("a", 503), ("b", 200), ("c", 200))
)
ATTEMPTS = f"ray_dpray_run_attempts{RUN}"
FAILED, COMPLETE = (
    f'kuberay_job_deployment_status{{namespace="n", name="dpray", deployment_status="{status}"}}'
    for status in ("Failed", "Complete")
)
EVICTIONS = 'ray_memory_manager_worker_eviction_total{Name="a", instance="i"}'
OOM, ENDED = (
    f'kube_pod_container_status_terminated_reason{{container="ray-worker", reason="{reason}"}}'
    for reason in ("OOMKilled", "Completed")
)
SPILLED, SHARED = (
    f'ray_object_store_memory{{Location="{place}", instance="i"}}'
    for place in ("SPILLED", "MMAP_SHM")
)
DISK, GPU, OTHER_GPU = (
    f'ray_node_{name}{{ip="10.0.0.1", GpuIndex="{index}"}}'
    for name, index in (
        ("disk_utilization_percentage", ""),
        ("gpus_utilization", 0),
        ("gpus_utilization", 1),
    )
)
NOTES = '{dataset="notes"}'
BUDGET = {
    f"ray_dpray_budget_epsilon{NOTES}": "10x200",
    f"ray_dpray_budget_delta{NOTES}": "1e-5x200",
}
FIRES = {
    "DprayBudgetNearlySpent": [
        (True, BUDGET | {f"ray_dpray_reserved_epsilon{NOTES}": "9.5x200"}),
        (False, BUDGET | {f"ray_dpray_reserved_epsilon{NOTES}": "8.9x200"}),
        (True, BUDGET | {f"ray_dpray_reserved_delta{NOTES}": "9.5e-6x200"}),
        (False, BUDGET | {f"ray_dpray_reserved_delta{NOTES}": "5e-6x200"}),
    ],
    "DprayRunRepeats": [
        (True, {f"ray_dpray_run_attempts{RUN}": "1x50 2x150"}),
        (False, {f"ray_dpray_run_attempts{RUN}": "1x200"}),
    ],
    "DprayRunWithoutProgress": [
        (True, {DONE: "0+1x40 40x160", PARTS: "90x200"}),
        (False, {DONE: "0+1x80 80x120", PARTS: "90x200"}),
        (False, {DONE: "0+1x40 _x160", PARTS: "90x40"}),  # it is over
    ],
    "DprayRunEndedInPart": [
        (True, {DONE: "0+1x100 _x100", PARTS: "200x100 _x100", ATTEMPTS: "1x100 _x100"}),
        (False, {DONE: "0+2x98 _x100", PARTS: "200x98 _x100", ATTEMPTS: "1x98 _x100"}),  # done
        (False, {DONE: "0+1x200", PARTS: "200x200", ATTEMPTS: "1x200"}),  # at work
        (False, {DONE: "0+1x40", PARTS: "200x40", ATTEMPTS: "1x40"}),  # long ago
    ],
    "DprayJobFailed": [(True, {FAILED: "_x100 1x100"}), (False, {COMPLETE: "1x200"})],
    "DprayOutOfMemory": [
        (True, {EVICTIONS: "_x110 1x90"}),
        (True, {EVICTIONS: "1x110 2x90"}),
        (False, {EVICTIONS: "1x50 2x150", ENDED: "1x200"}),
        (True, {OOM: "_x110 1x90"}),
    ],
    "DpraySpills": [
        (True, {SPILLED: "0x90 5x110"}),
        (False, {SPILLED: "0x90 5x10 0x100", SHARED: "5x200"}),
    ],
    "DprayDiskNearlyFull": [(True, {DISK: "80x100 86x100"}), (False, {DISK: "84x200"})],
    "DprayGpuIdles": [
        (True, {GPU: "90x60 0x140", OTHER_GPU: "0x200"}),
        (False, {GPU: "90x100 0x100", OTHER_GPU: "0x200"}),
    ],
    "DprayDatabaseIsDown": [
        (True, {"pg_up": "1x100 0x100"}),
        (False, {"pg_up": "1x100 0x1 1x100"}),
    ],
    "DprayNodesDoNotCome": [
        (True, {'ray_cluster_pending_nodes{node_type="gpu"}': "0x60 2x140"}),
        (False, {'ray_cluster_pending_nodes{node_type="gpu"}': "0x60 2x10 0x130"}),
    ],
    "DprayGatewayFails": [
        (True, {GOOD: "0+9x200", BAD: "0+1x200"}),
        (False, {GOOD: "0+99x200", BAD: "0+1x200"}),
        # All nodes count together, though one dies and another takes its place.
        (False, {GOOD: "0+9x200", BAD: "0+1x200", ONE_DIES: "0+90x200"}),
        (
            False,
            {
                GOOD: "0+9x200",
                BAD: "0+1x200",
                ONE_DIES: "0+90x100 _x100",
                ANOTHER_COMES: "_x101 0+90x99",
            },
        ),
        (True, {GOOD: "0+9x200", BAD: "0+1x200", ONE_DIES: "0+90x100 _x100"}),
    ],
}


def test_each_alert_fires_and_is_silent(tmp_path: Path):
    """A sample a minute for 200 minutes; at the 115th the alert fires, or does not."""
    named = [
        rule["alert"]
        for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert sorted(named) == sorted(FIRES)
    firing = 'count(ALERTS{{alertname="{}", alertstate="firing"}}) or vector(0)'
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": s, "values": values} for s, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": firing.format(alert),
                    "eval_time": "115m",
                    "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }
            ],
        }
        for alert, cases in FIRES.items()
        for fires, series in cases
    ]
    path = tmp_path / "tests.yaml"
    rules = {"rule_files": [str(MONITORING / "alerts.yaml")], "evaluation_interval": "1m"}
    path.write_text(yaml.safe_dump(rules | {"tests": tests}))
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr

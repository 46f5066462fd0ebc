"""The manifests of `cluster/kuberay`, checked offline and strictly: an unknown key is an error."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

from dpray.methods.config import load_config
from tests.cluster.files import CLUSTER, IMAGE, ROOT, read
from tests.cluster.manifests import pod_templates

SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "kuberay.json").read_text())
KUBERAY = CLUSTER / "kuberay"
MANIFESTS = [
    (path, manifest)
    for path in sorted(KUBERAY.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


def named(kind, name):
    """The one manifest of `cluster/kuberay` with this kind and name."""
    [found] = [
        manifest
        for _, manifest in MANIFESTS
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    ]
    return found


PODS = [
    pytest.param(path, template, id=f"{path.stem}-{number}")
    for path, manifest in MANIFESTS
    for number, template in enumerate(pod_templates(manifest))
]


def validate_manifest(manifest):
    schema = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)


@pytest.mark.parametrize(
    "manifest",
    [pytest.param(m, id=f"{m['kind']}-{m['metadata']['name']}") for _, m in MANIFESTS],
)
def test_a_manifest_fits_the_closed_schema(manifest):
    validate_manifest(manifest)


def test_the_schema_is_closed_everywhere():
    def open_objects(node, at):
        if isinstance(node, dict):
            if node.get("type") == "object" and "additionalProperties" not in node:
                yield at
            for key, inner in node.items():
                yield from open_objects(inner, f"{at}/{key}")

    jsonschema.Draft202012Validator.check_schema(SCHEMAS)
    assert list(open_objects(SCHEMAS["$defs"], "")) == []


def test_the_job_and_the_standing_cluster_are_the_same_cluster():
    job = read(CLUSTER / "kuberay" / "rayjob.yaml")["spec"]
    cluster = read(CLUSTER / "kuberay" / "raycluster.yaml")["spec"]
    workers = cluster["workerGroupSpecs"]

    assert job["rayClusterSpec"] == cluster
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert job["backoffLimit"] == 0
    for worker in workers:
        assert worker["minReplicas"] == worker["replicas"] == 0 < worker["maxReplicas"]

    claim = read(CLUSTER / "kuberay" / "storage.yaml")["metadata"]["name"]
    for group in (cluster["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert pod["restartPolicy"] == "Never"
        assert volumes["dpray"]["persistentVolumeClaim"]["claimName"] == claim
        for container in pod["containers"]:
            assert container["image"] == IMAGE
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)


def test_the_head_has_no_cpus_and_there_are_workers_to_read():
    cluster = read(KUBERAY / "raycluster.yaml")["spec"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}

    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert set(workers) == {"cpu", "gpu"}
    for name, group in workers.items():
        assert "num-cpus" not in group["rayStartParams"]
        [container] = group["template"]["spec"]["containers"]
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (name == "gpu")


@pytest.mark.parametrize(("path", "template"), PODS)
def test_every_pod_has_the_security_context(path, template):
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # What runs there writes to /tmp at least.
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in mounts and "/" not in mounts
    is_head = [container["name"] for container in spec["containers"]] == ["ray-head"]
    assert is_head or spec["automountServiceAccountToken"] is False


def test_the_pods_that_the_tests_look_at_are_all():
    assert [parameter.id for parameter in PODS] == [
        "proxy-0",
        *(f"raycluster-{number}" for number in range(3)),
        *(f"rayjob-{number}" for number in range(4)),
        *(f"rayservice-{number}" for number in range(3)),
    ]
    for spec in (cluster_of(name) for name in ("raycluster", "rayjob", "rayservice")):
        assert spec["autoscalerOptions"]["securityContext"]["allowPrivilegeEscalation"] is False


def cluster_of(name):
    spec = read(KUBERAY / f"{name}.yaml")["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def test_the_endpoints_have_the_same_cluster_without_the_ledger_and_the_shared_volume():
    def without(group):
        pod = group["template"]["spec"]
        pod["volumes"] = [v for v in pod["volumes"] if v["name"] not in ("dpray", "ledger-ca")]
        for container in pod["containers"]:
            assert len(container.pop("env")) == 2
            container["volumeMounts"] = [
                m for m in container["volumeMounts"] if m["name"] not in ("dpray", "ledger-ca")
            ]
        return group

    service, cluster = cluster_of("rayservice"), cluster_of("raycluster")
    assert "dpray-ledger" not in (KUBERAY / "rayservice.yaml").read_text()
    cluster["headGroupSpec"] = without(cluster["headGroupSpec"])
    cluster["workerGroupSpecs"] = [without(group) for group in cluster["workerGroupSpecs"]]
    assert service == cluster


def test_a_submitter_has_neither_the_ledgers_password_nor_the_volume():
    pod = read(KUBERAY / "rayjob.yaml")["spec"]["submitterPodTemplate"]["spec"]
    [container] = pod["containers"]
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]
    assert "env" not in container and "envFrom" not in container


def test_the_service_serves_what_the_serve_file_does():
    spec = read(KUBERAY / "rayservice.yaml")["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    # KubeRay takes no worker for ready on which Serve's proxy does not answer.
    assert config == read(CLUSTER / "serve.yaml") | {"proxy_location": "EveryNode"}
    ours = named("Service", "dpray-serve")
    assert spec["serveService"]["metadata"]["name"] == ours["metadata"]["name"]
    assert spec["serveService"]["spec"]["ports"] == ours["spec"]["ports"]
    assert spec["serveService"]["spec"]["type"] == ours["spec"]["type"] == "ClusterIP"


def test_secrets_are_named_and_never_written_down():
    """A password, a token or a key stands in a Secret; of a caller's key the file has the hash."""
    for path, manifest in MANIFESTS:
        assert manifest["kind"] != "Secret", path
        text = json.dumps(manifest)
        assert not re.search(r"(?i)(password|token|secret)\W+value\W", text), path
        assert "bearerToken" not in text and "stringData" not in text
    env = cluster_of("raycluster")["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert env[0] == {
        "name": "PGPASSWORD",
        "valueFrom": {"secretKeyRef": {"name": "dpray-ledger", "key": "password"}},
    }


def allowed(role, port, peer):
    """Say whether the policies let a pod of this namespace labelled `peer` reach `port` of
    `role`."""
    policies = [
        manifest["spec"]
        for _, manifest in MANIFESTS
        if manifest["kind"] == "NetworkPolicy"
        and manifest["spec"]["podSelector"]["matchLabels"] == {"dpray-role": role}
        and "Ingress" in manifest["spec"]["policyTypes"]
    ]
    assert policies, f"{role}: everything is allowed"
    for rule in (rule for policy in policies for rule in policy["ingress"]):
        peers = [
            each["podSelector"]["matchLabels"]
            for each in rule.get("from", [])
            if "namespaceSelector" not in each
        ]
        ports = [each["port"] for each in rule.get("ports", [])]
        if ({"dpray-role": peer} in peers or "from" not in rule) and (port in ports or not ports):
            return True
    return False


@pytest.mark.parametrize(
    ("role", "port", "peers"),
    [
        ("ray", 8000, {"ray", "proxy"}),
        ("ray", 8265, {"ray", "submitter"}),
        ("ray", 6379, {"ray"}),
        ("ray", 10001, {"ray"}),
        ("ray", 8080, {"ray"}),
        ("proxy", 8443, {"ray", "proxy", "submitter", "other"}),
        ("proxy", 80, set()),
        ("submitter", 22, set()),
    ],
)
def test_the_policies_let_in_whom_they_should(role, port, peers):
    everybody = ("ray", "proxy", "submitter", "other")
    assert {peer for peer in everybody if allowed(role, port, peer)} == peers


OPERATOR = ("kuberay-operator", "kuberay-operator")
PROMETHEUS = ("monitoring", "prometheus")


@pytest.mark.parametrize(
    ("port", "outsiders"),
    [
        (8265, {OPERATOR}),
        (8000, {OPERATOR}),
        (8080, {PROMETHEUS}),
        (6379, set()),
        (10001, set()),
    ],
)
def test_other_namespaces_reach_one_port_each(port, outsiders):
    [policy] = [m["spec"] for _, m in MANIFESTS if m["metadata"]["name"] == "dpray-ray"]
    found = {
        (
            peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"],
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"],
        )
        for rule in policy["ingress"]
        for peer in rule["from"]
        if "namespaceSelector" in peer and port in [each["port"] for each in rule.get("ports", [])]
    }
    assert found == outsiders


def test_policies_budget_and_services_select_the_pods_that_there_are():
    roles = {
        parameter.id: parameter.values[1]["metadata"]["labels"]["dpray-role"] for parameter in PODS
    }
    assert roles == {
        name: "proxy" if name == "proxy-0" else "submitter" if name == "rayjob-0" else "ray"
        for name in roles
    }
    budget = named("PodDisruptionBudget", "dpray-head")["spec"]
    assert budget["selector"]["matchLabels"] == {"dpray-role": "ray", "ray.io/node-type": "head"}

    cluster = named("RayCluster", "dpray")
    upstream = named("Service", "dpray-serve")["spec"]
    assert upstream["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    ports = {
        port["name"]: port["containerPort"]
        for port in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    }
    [port] = upstream["ports"]
    assert port["port"] == port["targetPort"] == ports["serve"]
    assert read(CLUSTER / "serve.yaml")["http_options"]["port"] == ports["serve"]
    nginx = (CLUSTER / "proxy" / "nginx.conf").read_text()
    assert f"server dpray-serve:{ports['serve']};" in nginx
    [tls] = named("Deployment", "dpray-proxy")["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert f"listen {tls['containerPort']} ssl;" in nginx


def test_the_manifests_run_a_job_that_is_there():
    entrypoint = read(CLUSTER / "kuberay" / "rayjob.yaml")["spec"]["entrypoint"]
    command, run, path, *overrides = entrypoint.split()
    workdir = re.search(r"^WORKDIR (\S+)$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)

    assert (command, run) == ("dpray", "run")
    config = load_config(ROOT / Path(path).relative_to(workdir[1]), overrides)
    assert "my-bucket" in config.data.path  # the reader's own, set in the manifest


def merged(target, patch):
    """Return `target` after a JSON merge patch (RFC 7396) without nulls."""
    if not (isinstance(target, dict) and isinstance(patch, dict)):
        return patch
    return target | {key: merged(target.get(key), value) for key, value in patch.items()}


def test_kueue_gets_the_same_job_suspended_in_its_queue():
    job = named("RayJob", "dpray-private-prediction")
    queued = merged(job, read(CLUSTER / "kueue.yaml"))

    validate_manifest(queued)
    assert queued["metadata"] == job["metadata"] | {
        "labels": {"kueue.x-k8s.io/queue-name": "dpray"},
        "annotations": {"kueue.x-k8s.io/elastic-job": "true"},
    }
    assert queued["spec"] == job["spec"] | {"suspend": True}
    # What Kueue's webhook asks for besides.
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert "clusterSelector" not in job["spec"]
    groups = [group["groupName"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    assert "head" not in groups

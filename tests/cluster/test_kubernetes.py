"""The manifests of `cluster/kuberay`, checked offline and strictly: an unknown key is an error."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from dpray.methods.config import load_config
from dpray.serving.settings import LimitsConfig
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


OPERATORS = ("1.6", "1.7")
"""Versions of KubeRay."""


def definitions(version):
    """Return the schema's definitions without what `version` of KubeRay does not have yet."""

    def known(node):
        if isinstance(node, list):
            return [known(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        return {
            key: known(inner)
            for key, inner in node.items()
            if not (isinstance(inner, dict) and inner.get("$comment", "").startswith("since v"))
            or inner["$comment"] <= f"since v{version}"
        }

    return known(SCHEMAS["$defs"])


DEFINITIONS = {version: definitions(version) for version in OPERATORS}


def validator(manifest, version=OPERATORS[0]):
    schema = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": DEFINITIONS[version]}
    return jsonschema.Draft202012Validator(schema)


def validate_manifest(manifest, version=OPERATORS[0]):
    validator(manifest, version).validate(manifest)


@pytest.mark.parametrize("version", OPERATORS)
@pytest.mark.parametrize(
    "manifest",
    [pytest.param(m, id=f"{m['kind']}-{m['metadata']['name']}") for _, m in MANIFESTS],
)
def test_a_manifest_fits_the_closed_schema(manifest, version):
    validate_manifest(manifest, version)


@pytest.mark.parametrize(
    "manifest",
    [pytest.param(m, id=f"{m['kind']}-{m['metadata']['name']}") for _, m in MANIFESTS],
)
def test_a_misspelt_key_is_refused_wherever_it_stands(manifest):
    """Each object of each manifest gets a key that no version knows, but for maps of free names."""

    def objects(node, at=()):
        if isinstance(node, dict):
            yield at
        for key, inner in (
            node.items()
            if isinstance(node, dict)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        ):
            if key not in FREE_NAMES:
                yield from objects(inner, (*at, key))

    wrong, closed = copy.deepcopy(manifest), validator(manifest)
    for place in list(objects(manifest)):
        inner = wrong
        for key in place:
            inner = inner[key]
        inner["misspelt"] = {}
        assert not closed.is_valid(wrong)  # at the first error: `validate` looks for the best one
        del inner["misspelt"]


FREE_NAMES = ("labels", "annotations", "matchLabels", "selector", "nodeSelector", "rayStartParams")


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayservice"])
def test_the_line_for_mutual_tls_fits_the_operator_that_knows_it(name):
    text = (KUBERAY / f"{name}.yaml").read_text()
    assert text.count("# tlsOptions:") == 1
    manifest = yaml.safe_load(text.replace("# tlsOptions:", "tlsOptions:"))
    validate_manifest(manifest, "1.7")
    with pytest.raises(jsonschema.ValidationError, match="tlsOptions"):
        validate_manifest(manifest, "1.6")


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayservice"])
def test_rays_autoscaler_reads_the_machines_from_the_manifest(name):
    def machines(spec):
        resource = {"metadata": {"name": "dpray", "namespace": "default"}, "spec": spec}
        kinds = _derive_autoscaling_config_from_ray_cr(resource)["available_node_types"]
        return {kind: each["resources"] for kind, each in kinds.items()}

    spec = cluster_of(name)
    gib = 1024**3
    assert machines(spec) == {
        "headgroup": {"CPU": 0, "memory": 32 * gib},
        "cpu": {"CPU": 16, "memory": 64 * gib},
        "gpu": {"CPU": 8, "memory": 32 * gib, "GPU": 1},
    }
    del spec["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["resources"]
    with pytest.raises(ValueError, match="CPU"):
        machines(spec)


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

    for group in (cluster["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert pod["restartPolicy"] == "Never"
        for volume, claim in {"dpray": "dpray", "models": "dpray-models"}.items():
            assert volumes[volume]["persistentVolumeClaim"]["claimName"] == claim
            assert named("PersistentVolumeClaim", claim)
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
    for container in spec["containers"] + spec.get("initContainers", []):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # What runs there writes to /tmp at least.
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in mounts and "/" not in mounts
        # The kubelet ends a pod whose scratch volumes hold more than its limit.
        disk = {
            kind: gibibytes(container["resources"][kind]["ephemeral-storage"])
            for kind in ("requests", "limits")
        }
        scratch = [
            gibibytes(volume["emptyDir"]["sizeLimit"])
            for volume in spec["volumes"]
            if "emptyDir" in volume and volume["emptyDir"].get("medium") != "Memory"
        ]
        assert disk["requests"] == disk["limits"]
        assert container["name"] == "wait-for-service" or disk["limits"] > sum(scratch)
    is_head = [container["name"] for container in spec["containers"]] == ["ray-head"]
    assert is_head or spec["automountServiceAccountToken"] is False


def gibibytes(quantity):
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * {"Mi": 1 / 1024, "Gi": 1}[unit]


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayservice"])
def test_the_head_alone_has_the_ledgers_password_and_no_pod_asks_a_hub(name):
    spec = cluster_of(name)
    pods = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    pods["head"] = spec["headGroupSpec"]["template"]["spec"]
    for pool, pod in pods.items():
        secret = pool == "head" and name != "rayservice"
        assert ("dpray-ledger" in json.dumps(pod)) == secret
        assert pod["nodeSelector"]["dpray/pool"] == pool
        [container] = pod["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert (env["HF_HUB_OFFLINE"], "HF_TOKEN" in env) == ("1", False)
        [models] = [m for m in container["volumeMounts"] if m["name"] == "models"]
        assert (models["mountPath"], models["readOnly"]) == (env["HF_HUB_CACHE"], True)


def test_the_pod_that_fetches_models_fetches_what_the_configurations_name():
    [container] = named("Job", "dpray-model")["spec"]["template"]["spec"]["containers"]
    fetched = set(re.findall(r"hf download (\S+)", container["command"][-1]))
    [token] = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {
        "name": "dpray-hub",
        "key": "token",
        "optional": True,
    }
    configs = [read(path) for path in (ROOT / "jobs").glob("*_gpu.yaml")]
    asked = {
        each[key]["model"] for each in configs for key in ("engine", "embedder") if key in each
    }
    assert fetched == asked
    volumes = named("Job", "dpray-model")["spec"]["template"]["spec"]["volumes"]
    assert 'claimName": "dpray"' not in json.dumps(volumes), "what runs write"


def test_the_pods_that_the_tests_look_at_are_all():
    assert [parameter.id for parameter in PODS] == [
        "model-0",
        "proxy-0",
        *(f"raycluster-{number}" for number in range(3)),
        *(f"rayjob-{number}" for number in range(4)),
        *(f"rayservice-{number}" for number in range(3)),
        "redis-0",
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
            container["env"] = [e for e in container["env"] if not e["name"].startswith("PG")]
            container["volumeMounts"] = [
                m for m in container["volumeMounts"] if m["name"] not in ("dpray", "ledger-ca")
            ]
        return group

    service, cluster = cluster_of("rayservice"), cluster_of("raycluster")
    assert "dpray-ledger" not in (KUBERAY / "rayservice.yaml").read_text()
    cluster["headGroupSpec"] = without(cluster["headGroupSpec"])
    cluster["workerGroupSpecs"] = [without(group) for group in cluster["workerGroupSpecs"]]
    for group in service["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        drain = pod["containers"][0]["env"].pop()
        assert drain["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
        assert int(drain["value"]) == LimitsConfig().request_timeout_seconds
        assert pod.pop("terminationGracePeriodSeconds") > int(drain["value"])
    assert service.pop("gcsFaultToleranceOptions") == {
        "redisAddress": "redis://dpray-redis:6379",
        "redisPassword": {
            "valueFrom": {"secretKeyRef": {"name": "dpray-redis", "key": "password"}}
        },
    }
    assert service == cluster
    delay = read(KUBERAY / "rayservice.yaml")["spec"]["rayClusterDeletionDelaySeconds"]
    assert delay > LimitsConfig().request_timeout_seconds


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
    [password] = [each for each in env if each["name"] == "PGPASSWORD"]
    assert password == {
        "name": "PGPASSWORD",
        "valueFrom": {"secretKeyRef": {"name": "dpray-ledger", "key": "password"}},
    }


def reached(role):
    """Return the ports that pods of `role` may reach, and where: a role, a namespace, an address or
    "anywhere". `head` is what the policies give the head of Ray besides."""
    labels = (
        {"dpray-role": "ray", "ray.io/node-type": "head"}
        if role == "head"
        else {"dpray-role": role}
    )
    found = set()
    for _, manifest in MANIFESTS:
        spec = manifest["spec"]
        if manifest["kind"] != "NetworkPolicy" or spec["podSelector"]["matchLabels"] != labels:
            continue
        assert "Egress" in spec["policyTypes"], role
        for rule in spec["egress"]:
            ports = [each["port"] for each in rule.get("ports", [])] or ["any"]
            for peer in rule.get("to", [{}]):
                if "podSelector" in peer:
                    place = peer["podSelector"]["matchLabels"]["dpray-role"]
                elif "namespaceSelector" in peer:
                    place = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
                else:
                    place = peer.get("ipBlock", {}).get("cidr", "anywhere")
                found |= {(place, port) for port in ports}
    return found


@pytest.mark.parametrize(
    ("role", "places"),
    [
        ("ray", {("ray", "any"), ("kube-system", 53), ("10.0.0.0/28", 443)}),
        (
            "head",
            {
                ("10.0.0.16/32", 5432),
                ("10.0.0.17/32", 443),
                ("10.0.0.17/32", 6443),
                ("redis", 6379),
            },
        ),
        ("proxy", {("ray", 8000), ("kube-system", 53)}),
        ("redis", set()),
        ("model", {("anywhere", 443), ("anywhere", 53)}),
    ],
)
def test_what_holds_rows_reaches_nothing_on_the_internet(role, places):
    assert reached(role) == places


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
        name: "submitter" if name == "rayjob-0" else "ray" if name.startswith("ray") else name[:-2]
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
    [wait] = named("Deployment", "dpray-proxy")["spec"]["template"]["spec"]["initContainers"]
    assert "until getent hosts dpray-serve; do" in wait["command"][-1]
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

"""The files of `cluster/` and `jobs/`, checked offline and strictly: an unknown key is an error."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

import dpray
from dpray.config import load_config
from dpray.orchestration.methods import make_plan
from dpray.types import InputError

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "kuberay.json").read_text())
IMAGE = f"registry.example.com/dpray:{dpray.__version__}-gpu"
METHODS = ("private_prediction", "aug_pe", "dp_kps", "dp_sgd")
JOBS = [path for name in METHODS for path in sorted((ROOT / "jobs").glob(f"{name}_?pu.yaml"))]
MANIFESTS = sorted((CLUSTER / "kuberay").glob("*.yaml"))


def read(path):
    return yaml.safe_load(path.read_text())


def validate_manifest(manifest):
    schema = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)


def changed(tree, path, value):
    """A copy of `tree` with one value set; a path's last key may be new."""
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return tree


def test_the_aws_file_is_what_the_autoscaler_takes():
    config = read(CLUSTER / "aws.yaml")

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)

    kinds = prepared["available_node_types"]
    gpu, head = kinds["gpu"], kinds[prepared["head_node_type"]]
    assert set(kinds) == {"head", "gpu"}
    assert (gpu["min_workers"], gpu["max_workers"], head["max_workers"]) == (0, 8, 0)
    assert prepared["docker"]["image"] == IMAGE
    assert "--env RAY_AUTH_MODE=token" in prepared["docker"]["run_options"]
    assert prepared["setup_commands"] == prepared["head_setup_commands"] == []
    assert "--dashboard-host=127.0.0.1" in prepared["head_start_ray_commands"][-1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_worker",), 3),
        (("available_node_types", "gpu", "min_worker"), 0),
        (("available_node_types", "gpu", "max_workers"), "eight"),
        (("available_node_types", "gpu", "resources"), {"GPU": -1}),
        (("docker", "imgae"), "x"),
        (("auth", "user"), "ubuntu"),
        (("upscaling_speed",), -1.0),
    ],
)
def test_a_wrong_aws_file_is_seen(path, value):
    config = changed(read(CLUSTER / "aws.yaml"), path, value)
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_fits_the_closed_schema(path):
    validate_manifest(read(path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("apiVersion",), "ray.io/v1alpha1"),
        (("metadata", "name"), "Dpray_Job"),
        (("spec", "entryPoint"), "dpray"),
        (("spec", "submissionMode"), "k8sJobMode"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("spec", "rayClusterSpec", "autoscalerOptions", "version"), 2),
        (("spec", "rayClusterSpec", "autoscalerOptions", "idleTimeout"), 60),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "minReplica"), 0),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "maxReplicas"), "8"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "volumes", 0), {}),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers"), []),
    ],
)
def test_a_wrong_manifest_is_seen(path, value):
    manifest = read(CLUSTER / "kuberay" / "rayjob.yaml")
    with pytest.raises(jsonschema.ValidationError):
        validate_manifest(changed(manifest, path, value))


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
    assert [w["minReplicas"] for w in workers] == [0] == [w["replicas"] for w in workers]

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


def test_the_manifests_run_a_job_that_is_there():
    entrypoint = read(CLUSTER / "kuberay" / "rayjob.yaml")["spec"]["entrypoint"]
    command, run, path = entrypoint.split()
    workdir = re.search(r"^WORKDIR (\S+)$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)

    assert (command, run) == ("dpray", "run")
    assert (ROOT / Path(path).relative_to(workdir[1])).is_file()


def test_the_image_copies_what_is_there_and_runs_as_a_user_with_a_number():
    """Its packages and its wheel are the matter of tests/test_packaging.py."""
    lines = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]

    assert steps[0] == ["FROM", f"rayproject/ray:{ray.__version__}-py311-gpu"]
    assert [step[1] for step in steps if step[0] == "USER"] == ["1000"]
    copied = [word for step in steps if step[0] == "COPY" for word in step[1:-1]]
    owners, sources = (
        {word for word in copied if word.startswith("--") == option} for option in (True, False)
    )
    assert owners == {"--chown=1000:100"}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert {"constraints.txt", "LICENSE", "dpray", "jobs"} <= sources


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_can_be_planned_within_its_budget(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    plan = make_plan(config)

    assert 0.9 * config.privacy.epsilon < plan.cost.epsilon <= config.privacy.epsilon
    assert plan.summary()["warnings"] == []
    with pytest.raises(InputError, match=r"^method\.batchsize: there is no such key"):
        load_config(path, ["method.batchsize=3"])


def test_the_cpu_job_uses_what_is_packaged():
    config = load_config(ROOT / "jobs" / "private_prediction_cpu.yaml")

    assert (ROOT / config.data.path).is_file()
    assert (ROOT / config.engine.model / "config.json").is_file()
    assert config.runtime.gpus_per_actor == 0


def test_the_readmes_name_every_file():
    for folder in ("cluster", "jobs"):
        text = (ROOT / folder / "README.md").read_text()
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and p.name != "README.md"]
        assert [p.name for p in files if p.name not in text] == []

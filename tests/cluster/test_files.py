"""The other files of `cluster/`, and those of `jobs/`, checked offline and strictly: an unknown key
is an error."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray
from ray.autoscaler._private.util import prepare_config, validate_config

from dpray.methods.config import load_config
from dpray.methods.registry import make_plan
from dpray.serving.errors import FRONT_ENVIRONMENT
from dpray.types import InputError
from tests.cluster.files import CLUSTER, IMAGE, ROOT, read

METHODS = ("private_prediction", "aug_pe", "dp_kps", "dp_sgd")
JOBS = [path for name in METHODS for path in sorted((ROOT / "jobs").glob(f"{name}_?pu.yaml"))]
# What a reader is shown to copy: files of ours, and the project's own documents.
SHOWN = [
    path
    for start in ("README.md", "cluster/**/*", "docs/**/*", "jobs/*", "dpray/**/*")
    for path in sorted(ROOT.glob(start))
    if path.suffix in (".yaml", ".md")
]
CLOUDS = ("aws", "gcp")
GOOGLE = Path(__file__).parent / "schemas" / "google_node.json"
POSTGRESQL_URL = re.compile(r"postgresql(?:\+psycopg)?://[^\s`)\"']*")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_cloud_file_is_what_the_autoscaler_takes(cloud):
    config = read(CLUSTER / f"{cloud}.yaml")

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)

    kinds = prepared["available_node_types"]
    head = kinds[prepared["head_node_type"]]
    assert set(kinds) == {"head", "cpu", "gpu"}
    assert (head["max_workers"], head["resources"]) == (0, {"CPU": 0})
    for workers in (kinds["cpu"], kinds["gpu"]):
        assert (workers["min_workers"], workers["max_workers"]) == (0, 8)
        assert workers["resources"].get("CPU") != 0
    assert prepared["max_workers"] == 16
    assert prepared["provider"]["use_internal_ips"] is True
    assert prepared["provider"]["cache_stopped_nodes"] is False
    assert prepared["docker"]["image"] == IMAGE
    assert "--env RAY_AUTH_MODE=token" in prepared["docker"]["run_options"]
    assert prepared["setup_commands"] == prepared["head_setup_commands"] == []
    assert "--dashboard-host=127.0.0.1" in prepared["head_start_ray_commands"][-1]
    for command in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "--metrics-export-port=8080" in prepared[command][-1]


def test_the_clouds_differ_in_what_they_must_alone():
    """All but the provider and the machines is the same."""
    files = [read(CLUSTER / f"{cloud}.yaml") for cloud in CLOUDS]
    for config in files:
        for key in ("provider", "available_node_types"):
            del config[key]
    assert files[0] == files[1]


def test_aws_machines_are_encrypted_private_and_of_two_profiles():
    nodes = {
        k: v["node_config"] for k, v in read(CLUSTER / "aws.yaml")["available_node_types"].items()
    }
    profiles = {name: node["IamInstanceProfile"]["Arn"] for name, node in nodes.items()}
    assert profiles["head"] != profiles["gpu"] == profiles["cpu"]
    for name, node in nodes.items():
        assert [disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"]] == [True]
        assert len(node["SubnetIds"]) == 1
        assert ("InstanceMarketOptions" in node) == (name == "gpu")


def test_google_machines_are_private_and_of_two_accounts():
    kinds = read(CLUSTER / "gcp.yaml")["available_node_types"]
    for kind in kinds.values():
        validate_google(kind["node_config"])
    nodes = {name: kind["node_config"] for name, kind in kinds.items()}
    accounts = {name: node["serviceAccounts"][0]["email"] for name, node in nodes.items()}
    assert accounts["head"] != accounts["gpu"] == accounts["cpu"]
    assert {name for name, node in nodes.items() if "scheduling" in node} == {"gpu"}
    # Ray finds them out on AWS alone.
    resources = {name: kind["resources"] for name, kind in kinds.items()}
    assert resources == {"head": {"CPU": 0}, "cpu": {"CPU": 16}, "gpu": {"CPU": 8, "GPU": 1}}


def validate_google(node):
    """Ray's own schema leaves what the cloud is asked for open."""
    jsonschema.Draft202012Validator(json.loads(GOOGLE.read_text())).validate(node)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_nodes_get_no_file_that_holds_more_than_they_need(cloud):
    mounts = read(CLUSTER / f"{cloud}.yaml")["file_mounts"]
    assert mounts.pop("/home/ray/.ray/auth_token") == "~/.ray/auth_token"
    assert set(mounts) == {"/home/ray/.pgpass", "/home/ray/.postgresql/root.crt"}
    readme = (CLUSTER / "README.md").read_text()
    for made in mounts.values():
        assert made.startswith("~/.dpray/")
        assert Path(made).name in readme


def test_every_url_of_a_remote_ledger_checks_who_answers():
    urls = [(path, url) for path in SHOWN for url in POSTGRESQL_URL.findall(path.read_text())]
    assert {path.name for path, _ in urls} >= {"private_prediction_gpu.yaml", "dp_sgd_gpu.yaml"}
    assert [(path.name, url) for path, url in urls if "sslmode=verify-full" not in url] == []


def test_examples_name_models_that_anyone_can_load():
    named = re.compile(r"\bmodel: *[\"']?([\w.-]+/[\w./-]+)")
    gated = re.compile(r"gemma|llama|mistral", re.IGNORECASE)
    models = [(path, model) for path in SHOWN for model in named.findall(path.read_text())]
    assert len(models) > 8
    assert [(path.name, model) for path, model in models if gated.search(model)] == []


def test_the_image_copies_what_is_there_and_runs_as_a_user_with_a_number():
    """Its packages and its wheel are the matter of tests/test_packaging.py."""
    lines = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]

    assert steps[0] == ["ARG", "DEVICE=gpu"]
    assert steps[1] == ["FROM", f"rayproject/ray:{ray.__version__}-py311-${{DEVICE}}"]
    assert [step[1] for step in steps if step[0] == "USER"] == ["1000"]
    copied = [word for step in steps if step[0] == "COPY" for word in step[1:-1]]
    owners, sources = (
        {word for word in copied if word.startswith("--") == option} for option in (True, False)
    )
    assert owners == {"--chown=1000:100"}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert {"constraints.txt", "cluster/requirements.txt", "LICENSE", "dpray", "jobs"} <= sources
    variables = dict(word.split("=", 1) for step in steps if step[0] == "ENV" for word in step[1:])
    assert variables == FRONT_ENVIRONMENT
    cpu, gpu = lines[-1].split(" else ")
    assert '".[all,cpu]"' in cpu
    assert "--require-hashes --requirement requirements.txt " in gpu and "--no-deps ." in gpu


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_can_be_planned_within_its_budget(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    plan = make_plan(config)

    assert 0.9 * config.privacy.epsilon < plan.cost.epsilon <= config.privacy.epsilon
    assert plan.summary()["warnings"] == []
    assert config.method.name != "private_prediction" or plan.config.engine.dtype == "float32"
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

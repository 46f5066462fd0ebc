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
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import (
    ResourceDemandScheduler,
    ResourceRequestSource,
    SchedulingNode,
    SchedulingNodeStatus,
)
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.instance_manager_pb2 import NodeKind

from dpray.methods.config import load_config
from dpray.methods.registry import make_plan
from dpray.serving.errors import FRONT_ENVIRONMENT
from dpray.types import InputError
from tests.cluster.files import CLUSTER, IMAGE, ROOT, read

METHODS = ("private_prediction", "aug_pe", "dp_kps", "dp_sgd")
JOBS = [path for name in METHODS for path in sorted((ROOT / "jobs").glob(f"{name}*_?pu.yaml"))]
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
    assert set(kinds) == {"head", "cpu", "gpu-spot", "gpu"}
    assert (head["max_workers"], head["resources"]) == (0, {"CPU": 0})
    for workers in (kinds["cpu"], kinds["gpu-spot"], kinds["gpu"]):
        assert (workers["min_workers"], workers["max_workers"]) == (0, 8)
        assert workers["resources"].get("CPU") != 0
    assert prepared["max_workers"] == 16
    assert prepared["provider"]["use_internal_ips"] is True
    assert prepared["provider"]["cache_stopped_nodes"] is False
    assert prepared["docker"]["image"] == IMAGE
    options = prepared["docker"]["run_options"]
    assert "--env RAY_AUTH_MODE=token" in options and "--env HF_HUB_OFFLINE=1" in options
    # The folder that outlives the cluster, from the machine into the container.
    assert "--volume /mnt/dpray:/mnt/dpray" in options
    assert any(
        " /mnt/dpray" in each and "mount -t" in each for each in prepared["initialization_commands"]
    )
    assert prepared["setup_commands"] == prepared["head_setup_commands"] == []
    assert "--dashboard-host=127.0.0.1" in prepared["head_start_ray_commands"][-1]
    for command in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "--metrics-export-port=8080" in prepared[command][-1]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_misspelt_key_of_a_cloud_file_is_refused(cloud):
    for place in ((), ("docker",), ("available_node_types", "gpu")):
        config = read(CLUSTER / f"{cloud}.yaml")
        inner = config
        for key in place:
            inner = inner[key]
        inner["misspelt"] = 1
        with pytest.raises(jsonschema.ValidationError):
            validate_config(prepare_config(config))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_spot_machines_come_first_and_the_same_on_demand_where_none_is_left(cloud):
    """As Ray's autoscaler chooses."""
    kinds = read(CLUSTER / f"{cloud}.yaml")["available_node_types"]
    alike = [copy.deepcopy(kinds[kind]) for kind in ("gpu-spot", "gpu")]
    for each in alike:
        each.pop("priority", None)
        for key in ("InstanceMarketOptions", "scheduling"):
            each["node_config"].pop(key, None)
    assert alike[0] == alike[1]

    config = read(CLUSTER / f"{cloud}.yaml")
    for kind in ("gpu", "gpu-spot"):
        config["available_node_types"][kind]["resources"] = {"CPU": 8, "GPU": 1}  # as AWS tells Ray
    configured = AutoscalingConfig(config, skip_content_hash=True).get_node_type_configs()
    nodes = [
        SchedulingNode.from_node_config(
            configured[kind], status=SchedulingNodeStatus.TO_LAUNCH, node_kind=NodeKind.WORKER
        )
        for kind in ("gpu", "gpu-spot")
    ]
    asked = [ResourceRequestUtil.make({"GPU": 1.0})]

    def best(available):
        scheduler = ResourceDemandScheduler
        source = ResourceRequestSource.PENDING_DEMAND
        chosen, *_ = scheduler._sched_best_node(
            asked, copy.deepcopy(nodes), source, available, available
        )
        return chosen.node_type

    assert best({}) == "gpu-spot"
    assert best({"gpu-spot": 0.0}) == "gpu"


def test_the_clouds_differ_in_what_they_must_alone():
    """All but the provider, the machines and how they mount the shared folder is the same."""
    files = [read(CLUSTER / f"{cloud}.yaml") for cloud in CLOUDS]
    for config in files:
        for key in ("provider", "available_node_types", "initialization_commands"):
            del config[key]
    assert files[0] == files[1]


def test_aws_machines_are_encrypted_private_and_of_two_profiles():
    nodes = {
        k: v["node_config"] for k, v in read(CLUSTER / "aws.yaml")["available_node_types"].items()
    }
    profiles = {name: node["IamInstanceProfile"]["Arn"] for name, node in nodes.items()}
    assert profiles["head"] != profiles["gpu"] == profiles["gpu-spot"] == profiles["cpu"]
    for name, node in nodes.items():
        assert [disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"]] == [True]
        assert len(set(node["SubnetIds"])) == 2
        assert len(node["SecurityGroupIds"]) == 1
        assert node["MetadataOptions"] == {"HttpTokens": "required"}
        assert ("InstanceMarketOptions" in node) == (name == "gpu-spot")


def statements(name):
    return json.loads((CLUSTER / "aws" / f"{name}.json").read_text())["Statement"]


def test_the_policies_of_aws_name_what_the_machines_have_and_no_more():
    """tests/cluster/mocked_aws.py compares their actions with the calls that Ray makes."""
    text = {
        name: (CLUSTER / "aws" / f"{name}.json").read_text()
        for name in ("head", "worker", "launcher")
    }
    node = read(CLUSTER / "aws.yaml")["available_node_types"]["head"]["node_config"]
    for named in (*node["SubnetIds"], *node["SecurityGroupIds"], node["ImageId"]):
        assert f'/{named}"' in text["head"] and f'/{named}"' in text["launcher"]
    mount = read(CLUSTER / "aws.yaml")["initialization_commands"][-1]
    for named in re.findall(r"fs(?:ap)?-0+", mount):
        assert f'/{named}"' in text["head"] and f'/{named}"' in text["worker"]

    for name in text:
        for statement in statements(name):
            actions = statement["Action"]
            actions = [actions] if isinstance(actions, str) else actions
            assert not any("*" in action for action in actions)
            # EC2's lists know no resources.
            looks = all(action.startswith("ec2:Describe") for action in actions)
            assert (statement["Resource"] == "*") == looks
    assert statements("head")[: len(statements("worker"))] == statements("worker")
    assert "ec2:" not in text["worker"] and "iam:" not in text["worker"]
    assert "s3:" not in text["launcher"]
    passed = {
        name: [s["Resource"] for s in statements(name) if s["Action"] == "iam:PassRole"]
        for name in text
    }
    role = "arn:aws:iam::000000000000:role/dpray-"
    assert passed == {"head": [f"{role}worker"], "worker": [], "launcher": [f"{role}head"]}


def test_the_rules_of_aws_let_nobody_in_but_the_cluster_and_the_machine_that_submits():
    rules = json.loads((CLUSTER / "aws" / "ingress.json").read_text())
    assert all("IpRanges" not in rule for rule in rules)
    assert [rule.get("FromPort") for rule in rules] == [None, 22]
    out = json.loads((CLUSTER / "aws" / "egress.json").read_text())
    assert [rule["FromPort"] for rule in out if "IpRanges" in rule] == [443]


def test_google_machines_are_private_and_of_two_accounts():
    kinds = read(CLUSTER / "gcp.yaml")["available_node_types"]
    for kind in kinds.values():
        validate_google(kind["node_config"])
    nodes = {name: kind["node_config"] for name, kind in kinds.items()}
    accounts = {name: node["serviceAccounts"][0]["email"] for name, node in nodes.items()}
    assert accounts["head"] != accounts["gpu"] == accounts["gpu-spot"] == accounts["cpu"]
    spot = {
        name for name, node in nodes.items() if "provisioningModel" in node.get("scheduling", {})
    }
    assert spot == {"gpu-spot"}
    # Ray finds them out on AWS alone. Without their memory, no actor that reserves some starts one.
    resources = {name: kind["resources"] for name, kind in kinds.items()}
    gpu, cpu = ({"CPU": 8, "GPU": 1, "memory": 20e9}, {"CPU": 16, "memory": 40e9})
    assert resources == {"head": {"CPU": 0}, "cpu": cpu, "gpu-spot": gpu, "gpu": gpu}
    wrong = copy.deepcopy(nodes["gpu"])
    wrong["networkInterfaces"][0]["accessConfigs"] = [{}]  # a public address
    with pytest.raises(jsonschema.ValidationError):
        validate_google(wrong)


def validate_google(node):
    """Ray's own schema leaves what the cloud is asked for open."""
    jsonschema.Draft202012Validator(json.loads(GOOGLE.read_text())).validate(node)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_nodes_get_no_file_that_holds_more_than_they_need(cloud):
    mounts = read(CLUSTER / f"{cloud}.yaml")["file_mounts"]
    assert mounts == {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}


def test_the_ledgers_password_goes_to_the_head_alone():
    readme = (CLUSTER / "README.md").read_text()
    for made, place in {
        "pgpass": "/home/ray/.pgpass",
        "ledger-ca.crt": "/home/ray/.postgresql/root.crt",
    }.items():
        assert f"ray rsync-up cluster/aws.yaml ~/.dpray/{made} {place}" in readme


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
    cuda = variables.pop("NVIDIA_REQUIRE_CUDA")
    assert variables == FRONT_ENVIRONMENT
    # A driver's version: CUDA 13.0 came with 580.
    installed = re.search(
        r"^nvidia-cuda-runtime==(\d+\.\d+)\.", (CLUSTER / "requirements.txt").read_text(), re.M
    )
    assert installed and cuda == f'"cuda>={installed[1]}"' == '"cuda>=13.0"'
    assert "580.65.06" in (CLUSTER / "README.md").read_text()
    cpu, gpu = lines[-1].split(" else ")
    assert '".[all,cpu]"' in cpu
    assert "--require-hashes --requirement requirements.txt " in gpu and "--no-deps ." in gpu


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_can_be_planned_within_its_budget(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    plan = make_plan(config)

    assert 0.9 * config.privacy.epsilon < plan.cost.epsilon <= config.privacy.epsilon
    said = [each.split(" ")[0] for each in plan.summary()["warnings"]]
    assert said == ["signal"] * (path.stem == "aug_pe_gpu")  # it has the paper's sizes
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
        found = (p for p in (ROOT / folder).rglob("*") if p.is_file() and p.name != "README.md")
        files = [p for p in found if p.parent.name != "__pycache__"]
        assert [p.name for p in files if p.name not in text] == []

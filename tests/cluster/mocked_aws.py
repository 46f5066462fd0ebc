"""`cluster/aws.yaml` and the policies of `cluster/aws`, by Ray's own launcher against a mocked EC2.
The calls have to be those that the policies allow, and no others. `make audit` runs it, with boto3
and moto in a folder of their own: they ask for an older python-dateutil than constraints.txt has.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ParamValidationError
from moto import mock_aws
from ray.autoscaler._private.aws import utils
from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.util import prepare_config

from tests.cluster.files import CLUSTER, read

AWS = CLUSTER / "aws"
KINDS = ("head", "cpu", "gpu-spot", "gpu")
IMAGE = "ami-00000000000000000"
SUBNETS = ("subnet-0000000000000000a", "subnet-0000000000000000b")
GROUP = "sg-00000000000000000"


def policy(name: str) -> list[dict[str, Any]]:
    document = json.loads((AWS / f"{name}.json").read_text())
    assert document["Version"] == "2012-10-17"
    return document["Statement"]


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def actions(name: str, service: str) -> set[str]:
    """The actions of one service that a policy allows."""
    return {
        action.removeprefix(f"{service}:")
        for statement in policy(name)
        for action in listed(statement["Action"])
        if action.startswith(f"{service}:")
    }


@dataclass
class Account:
    """A mocked account with the network that the file names, and the calls that were made to it."""

    config: dict[str, Any]
    ec2: Any
    calls: set[str] = field(default_factory=set)

    def bootstrap(self) -> dict[str, Any]:
        return bootstrap_aws(prepare_config(copy.deepcopy(self.config)))

    def groups(self) -> set[str]:
        return {each["GroupId"] for each in self.ec2.describe_security_groups()["SecurityGroups"]}


@pytest.fixture
def account(tmp_path, monkeypatch) -> Iterator[Account]:
    """Placeholders of the files are replaced by what the mocked account has."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    config = read(CLUSTER / "aws.yaml")
    with mock_aws():
        forget_sessions()
        ec2 = boto3.client("ec2", region_name=config["provider"]["region"])
        network = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        made = {
            GROUP: ec2.create_security_group(GroupName="dpray", Description="-", VpcId=network)[
                "GroupId"
            ],
            IMAGE: ec2.describe_images()["Images"][0]["ImageId"],
        }
        for number, (name, zone) in enumerate(zip(SUBNETS, "ab", strict=True)):
            subnet = ec2.create_subnet(
                VpcId=network,
                CidrBlock=f"10.0.{number}.0/24",
                AvailabilityZone=f"{config['provider']['region']}{zone}",
            )
            made[name] = subnet["Subnet"]["SubnetId"]
        made |= make_profiles()
        text = json.dumps(config)
        for was, becomes in made.items():
            assert was in text, was
            text = text.replace(was, becomes)
        account = Account(json.loads(text), ec2)
        boto3.setup_default_session()
        boto3.DEFAULT_SESSION.events.register(
            "before-call", lambda model, **_: account.calls.add(model.name)
        )
        yield account
    forget_sessions()


def make_profiles() -> dict[str, str]:
    """Make the roles as README.md says; the mocked IAM reads the policies. Return what each
    profile's name in the file becomes."""
    iam = boto3.client("iam")
    made = {}
    for name in ("head", "worker"):
        iam.create_role(
            RoleName=f"dpray-{name}", AssumeRolePolicyDocument=(AWS / "trust.json").read_text()
        )
        iam.put_role_policy(
            RoleName=f"dpray-{name}",
            PolicyName="dpray",
            PolicyDocument=(AWS / f"{name}.json").read_text(),
        )
        profile = iam.create_instance_profile(InstanceProfileName=f"dpray-{name}")[
            "InstanceProfile"
        ]
        iam.add_role_to_instance_profile(
            InstanceProfileName=f"dpray-{name}", RoleName=f"dpray-{name}"
        )
        made[f"arn:aws:iam::000000000000:instance-profile/dpray-{name}"] = profile["Arn"]
    return made


def forget_sessions() -> None:
    boto3.DEFAULT_SESSION = None
    for cached in (utils.client_cache, utils.resource_cache):
        cached.cache_clear()


def start_and_end(config: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Start and end a machine of each kind as Ray's autoscaler does; what EC2 says of them."""
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    started = {}
    for kind in kinds:
        node_config = config["available_node_types"][kind]["node_config"]
        tags = {"ray-node-kind": "head" if kind == "head" else "worker", "ray-user-node-type": kind}
        [(node, machine)] = provider.create_node(node_config, tags, 1).items()
        assert provider.non_terminated_nodes({}) == [node]
        provider.set_node_tags(node, {"ray-node-status": "up-to-date"})
        assert provider.internal_ip(node).startswith("10.0.")
        assert provider.external_ip(node) is None
        started[kind] = machine.meta.data
        provider.terminate_node(node)
    return started


def test_rays_launcher_makes_the_cluster_and_no_role_and_no_group(account):
    groups = account.groups()
    config = account.bootstrap()
    machines = start_and_end(config, KINDS)

    assert account.groups() == groups
    for kind, machine in machines.items():
        profile = machine["IamInstanceProfile"]["Arn"].rpartition("/")[2]
        assert profile == ("dpray-head" if kind == "head" else "dpray-worker")
        assert (machine.get("InstanceLifecycle") == "spot") == (kind == "gpu-spot")
        [group] = machine["SecurityGroups"]
        assert group["GroupName"] == "dpray"


def test_the_policies_allow_the_calls_that_ray_makes_and_no_others(account):
    account.calls.clear()
    config = AWSNodeProvider.fillout_available_node_types_resources(account.bootstrap())
    start_and_end(config, ("head",))
    assert account.calls == actions("launcher", "ec2")

    account.calls.clear()
    start_and_end(config, KINDS[1:])
    assert account.calls == actions("head", "ec2")


def test_a_zone_without_machines_is_followed_by_the_next(account, monkeypatch):
    config = account.bootstrap()
    [first, second] = config["available_node_types"]["gpu-spot"]["node_config"]["SubnetIds"]
    asked = []

    def full(params, **_):
        asked.append(params["SubnetId"])
        if params["SubnetId"] == first:
            raise ClientError({"Error": {"Code": "InsufficientInstanceCapacity"}}, "RunInstances")

    boto3.DEFAULT_SESSION.events.register("provide-client-params.ec2.RunInstances", full)
    machine = start_and_end(config, ("gpu-spot",))["gpu-spot"]
    assert (asked, machine["SubnetId"]) == ([first, second], second)


@pytest.mark.parametrize("key", ["InstanceTyp", "IamInstanceProfil", "MetadataOption"])
def test_a_misspelt_key_of_a_machine_is_refused(account, key):
    [right] = [
        each for each in ("InstanceType", "IamInstanceProfile", "MetadataOptions") if key in each
    ]
    node_config = account.config["available_node_types"]["gpu-spot"]["node_config"]
    node_config[key] = node_config.pop(right)
    config = account.bootstrap()
    with pytest.raises(ParamValidationError, match=f'Unknown parameter in input: "{key}"'):
        start_and_end(config, ("gpu-spot",))


def test_a_subnet_of_another_network_is_refused(account):
    other = account.ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    made = account.ec2.create_subnet(VpcId=other, CidrBlock="10.1.0.0/24")["Subnet"]["SubnetId"]
    account.config["available_node_types"]["cpu"]["node_config"]["SubnetIds"][0] = made
    with pytest.raises(Exception, match=made):
        account.bootstrap()

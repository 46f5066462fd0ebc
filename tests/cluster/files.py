"""The files of `cluster/`, as its tests read them."""

from pathlib import Path

import yaml

import dpray

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
IMAGE = f"registry.example.com/dpray:{dpray.__version__}-gpu"


def read(path):
    return yaml.safe_load(path.read_text())

"""The files of `cluster/`, as its tests read them."""

import copy
from pathlib import Path

import yaml

import dpray

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
IMAGE = f"registry.example.com/dpray:{dpray.__version__}-gpu"


def read(path):
    return yaml.safe_load(path.read_text())


def changed(tree, path, value):
    """A copy of `tree` with one value set; a path's last key may be new."""
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return tree

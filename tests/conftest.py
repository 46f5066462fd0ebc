"""Fixtures for the whole suite."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings as hypothesis_settings

# The same examples in every run: a failure in CI is one that anybody can repeat.
hypothesis_settings.register_profile("repeatable", derandomize=True, deadline=None)
# pytest --hypothesis-profile=long tests/fuzz: other examples in every run, and many of them.
hypothesis_settings.register_profile(
    "long", max_examples=4_000, database=None, deadline=None, print_blob=True
)
hypothesis_settings.load_profile("repeatable")

pytest_plugins = ["tests.clusters", "tests.databases"]

# What the tests' files import stays, and the collector would go through it again and again: that
# is a quarter of the time. It is at work again when all are there.
gc.disable()

TOGETHER = {
    "cluster": (
        "faults/test_kills.py",
        "integration/test_job.py",
        "integration/test_admission.py",
        "integration/test_aug_pe_ray.py",
        "integration/test_ray_run.py",
        "faults/test_shards.py",
        "workers/test_gathering.py",
        "workers/test_accountant_actor.py",
        "integration/test_memory.py",
    ),
    "gpus": ("integration/test_gpu_placement.py", "workers/test_engine_pool.py"),
    "vllm": (
        "tests/test_two_worlds.py",
        "engines/test_vllm.py",
        "engines/test_conformance.py",
        "engines/test_not_numbers.py",
        "engines/test_unreadable_tokens.py",
        "engines/test_parts.py",
        "engines/test_weights.py",
        "engines/test_bits.py",
    ),
}
"""Files that one process runs. They share the fixture `cluster` or `gpu_cluster`, or vLLM, whose
import takes ten seconds of a core."""

LONGEST = (
    *TOGETHER["cluster"],
    "integration/test_serve.py",
    *TOGETHER["vllm"],
    "gpu/test_figures.py",
    "faults/test_nodes.py",
    *TOGETHER["gpus"],
    "faults/test_notice.py",
    "integration/test_zero.py",
    "evaluation/test_mechanisms.py",
    "engines/test_second_runner.py",
    "engines/test_made_models.py",
    "integration/test_autoscaling.py",
    "tests/test_extreme_numbers.py",
)
"""The files that take longest, in this order; the rest of their folders come after them."""


def name_of(file: Path) -> str:
    """Return its name and its folder's: `tests/chaos` has a test_kills.py too."""
    return "/".join(file.parts[-2:])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, or all files that share something."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Together(config, log)


def scope_of(nodeid: str) -> str:
    """Return the name of what one process runs as a whole: a group of files, or a file."""
    file = nodeid.partition("::")[0]
    name = name_of(ROOT / file)
    return next((group for group in TOGETHER if name in TOGETHER[group]), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then the others with slow tests: what the processes take
    last from one queue of files is short."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, bool, bool]:
        name = name_of(item.path)
        if item.path not in slow:
            return (len(LONGEST), True, True)
        first = LONGEST.index(name) if name in LONGEST else len(LONGEST)
        return (first, not name.startswith("integration/"), False)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Keep the collector from going through everything that the tests' files have imported at each
    close of an engine: that takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries in C++ report what is left at the end, which is everything that is frozen."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """End a pytest process whose teardown hangs, after printing where. No other limit covers that:
    once a test has failed, pytest-timeout and pytest itself watch no more."""
    given = item.config.getoption("timeout")
    limit = float(item.config.getini("timeout") if given is None else given)
    stderr = item.config.stash[fault_handler_stderr_fd_key]  # sys.stderr may be captured
    if limit > 0 and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", autouse=True)
def refuse_ray() -> Iterator[None]:
    """A file of tests that leaves Ray running changes what the next file starts on: it fails."""
    yield
    if (ray := sys.modules.get("ray")) and ray.is_initialized():
        ray.shutdown()
        pytest.fail("Ray was left running in this process")


ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real texts and a small language model, where a checkout has them beside it."""
    if not SHARED.is_dir():
        pytest.skip("no folder ../shared with real texts and a model")
    return SHARED


@pytest.fixture(scope="session")
def vllm_installed() -> None:
    """Skip what needs vLLM where it is not installed. It is not imported: the engine does so."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")


@pytest.fixture(scope="session")
def at_the_end() -> Iterator[ExitStack]:
    """Closes vLLM's engines after all tests: one that is closed takes along what all engines of a
    process share."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama-shaped model of two layers."""
    from tests.engines.tiny_model import make_model

    return str(make_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def engine(model_folder: str) -> Iterator[Any]:
    """The real engine on that model, loaded once: `tests.engines.kept` keeps it open."""
    from dpray.config.sections import EngineConfig
    from dpray.engines.transformers import TransformersEngine

    engine = TransformersEngine(EngineConfig(model=model_folder))
    yield engine
    engine.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The same test on the host and, where there is one, on a GPU: `make gpu`."""
    import torch

    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Many threads make small models slow."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def records_file(tmp_path: Path) -> Path:
    """60 labelled records; every text holds the word Marlowe, which must turn up nowhere else."""
    from tests.engines.tiny_model import sentence

    rng = random.Random(1)
    path = tmp_path / "records.jsonl"
    with open(path, "w") as file:
        for number in range(60):
            text = f"{sentence(rng, 8)} Marlowe {number}"
            file.write(json.dumps({"text": text, "label": "ab"[number % 2]}) + "\n")
    return path


@pytest.fixture
def settings(tmp_path: Path, records_file: Path, model_folder: str) -> Callable[..., Any]:
    """A configuration that runs here in seconds; `section__key=value` changes it, and
    `section=tree` a whole section."""

    def make(**changes: Any) -> dict[str, Any]:
        tree: dict[str, Any] = {
            "data": {
                "path": str(records_file),
                "label": "label",
                "labels": ["a", "b"],
                "public_size": 60,
            },
            "privacy": {
                "epsilon": 50.0,
                "delta": 1e-5,
                "ledger": f"sqlite:///{tmp_path}/ledger.db",
                "dataset": "notes",
            },
            "method": {
                "name": "private_prediction",
                "batches": "disjoint",
                "batch_size": 5,
                "max_tokens": 4,
                "max_records": 24,
                "clip_bound": 1.0,
            },
            "engine": {"kind": "transformers", "model": model_folder},
            "runtime": {"ray_address": "none", "batches_per_task": 4},
            "output": {"path": str(tmp_path / "out")},
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            if key:
                tree[section][key] = value
            else:
                tree[section] = dict(value)
        return tree

    return make


@pytest.fixture
def auto_settings(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Any]:
    """The same for a question about all methods: 4,000 records that are not there, and the words of
    DP-KPS's vocabulary with their counts."""

    def make(counts: dict[str, int], records: int, **changes: Any) -> dict[str, Any]:
        words = tmp_path / "words.txt"
        words.write_text("".join(f"{word}\t{count}\n" for word, count in counts.items()))
        method = {
            "name": "auto",
            "records": records,
            "private_prediction": {"max_tokens": 4, "batch_size": 16},
            "dp_kps": {"vocabulary": str(words)},
            "dp_sgd": {"max_length": 16},
        }
        asked = {"data__path": "/nowhere/x.jsonl", "data__public_size": 4000}
        return settings(**({"method": method, "privacy__epsilon": 4.0} | asked | changes))

    return make


@pytest.fixture
def config_file(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., str]:
    """A file of `settings`, for the command line."""

    def write(**changes: Any) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(settings(**changes)))
        return str(path)

    return write


@pytest.fixture
def sequences(tmp_path: Path) -> dict[str, Any]:
    """The sections of a run that releases the sequences themselves."""
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("".join(f"word{i}\n" for i in range(20)))
    method = {
        "name": "dp_kps", "vocabulary": str(vocabulary), "vocabulary_size": 7,
        "phrases_per_record": 4, "sequence_length": 3, "records": 8,
    }  # fmt: skip
    return {"method": method, "engine": {"kind": "none"}, "privacy__epsilon": 8.0}

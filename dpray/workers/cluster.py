"""This module connects to Ray, starts actors that Ray never repeats, and hashes files in tasks."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from dpray.config.config import Config
from dpray.config.sections import RuntimeConfig
from dpray.engines.vllm.model import ENVIRONMENT, IN_PROCESS, OF_GPU, RUNNER
from dpray.extras import Late
from dpray.io.file_list import READERS, file_digest, file_digests, list_files, total_size
from dpray.io.files import network_file_system
from dpray.types import InputError, Resumable
from dpray.workers.engine import has_stages, living_nodes
from dpray.workers.failures import own_errors
from dpray.workers.memory import Role, reserved
from dpray.workers.placement import Place
from dpray.workers.rows import without_words

# Late: actors, which connect to nothing, need no Ray Data, and it takes a second.
data_context, data_stats = Late("ray.data.context"), Late("ray.data._internal.stats")

PATIENCE = 30
"""Seconds in which a cluster has to answer: the head may be starting again."""

HASHED_HERE = 1 << 30
"""Files of fewer bytes are hashed in this process, in less time than another one takes to start."""

COUNTED_BY = (
    "register_dataset_to_stats_actor",
    "update_execution_metrics",
    "update_iteration_metrics",
)
"""Ray Data calls these to report exact numbers of rows to Ray's metrics and dashboard."""


def start_ray(address: str | None, environment: Mapping[str, str] | None = None) -> None:
    """Connect to the cluster at `address` or at RAY_ADDRESS, or start Ray on this machine; do
    nothing if this process is connected already. All processes that this one starts there get the
    variables of `environment`. Raises InputError if no cluster answers, and Resumable if Ray does
    not start: this machine may be too busy."""
    if not ray.is_initialized():
        _connect(address, environment or {})
    # Ray 2.60 deprecates the options of `map_batches` below, and offers no other place for
    # max_restarts and max_task_retries.
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
    context = data_context.DataContext.get_current()
    # Pinned: Ray's default has changed before, and an environment may name another one.
    context.shuffle_strategy = data_context.ShuffleStrategy.SHUFFLE_V2
    # In files, rows would be served by a port of Ray Data's own.
    context.use_disk_based_hash_shuffle = False
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
    context.max_errored_blocks = 0
    context.max_consecutive_actor_init_deaths = 0
    # Ray Data's log repeats what a task raised; the error itself reaches the runner.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    keep_counts_here()


def named_cluster(address: str | None) -> str:
    """Return the address of the cluster that is asked for, `address` or RAY_ADDRESS; "" for a Ray
    on this machine. Raises InputError for the address of a dashboard, which takes jobs and no
    drivers: `ray job submit` reads RAY_ADDRESS, too."""
    of_environment = os.environ.get("RAY_ADDRESS", "") if address in (None, "", "auto") else ""
    named = of_environment or address or ""
    if urlsplit(named).scheme in ("http", "https"):
        key = "RAY_ADDRESS" if of_environment else "runtime.ray_address"
        others = "local or none" if of_environment else "auto, local or none"
        raise InputError(
            f"{key}: http:// is where a cluster takes jobs (`ray job submit`); a run connects to "
            f"HOST:6379 or ray://HOST:10001, or has runtime.ray_address: {others}"
        )
    return named


def _connect(address: str | None, environment: Mapping[str, str]) -> None:
    named = named_cluster(address)
    try:
        _wait_for_listener(named)
        # Workers' output is not copied here, because it could quote the text that a task failed on.
        runtime_env = {"env_vars": dict(environment)} if environment else None
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=runtime_env,
        )
    except (OSError, ValueError, ray.exceptions.AuthenticationError):
        raise InputError(
            f"runtime.ray_address: no connection to Ray at {named}; a cluster that asks for a "
            f"token needs RAY_AUTH_MODE=token and its token here too"
        ) from None
    except Exception as error:
        # Ray's own, without a class: one of its processes was not ready in time.
        reason = str(error).partition(". ")[0]
        raise Resumable(f"Ray did not start ({reason}); give the same command again") from None


@retry(
    retry=retry_if_exception_type(OSError),
    stop=stop_after_delay(PATIENCE),
    wait=wait_fixed(1),
    reraise=True,
)
def _wait_for_listener(address: str) -> None:
    """Return when something listens at `address`, at once if it names no port ("auto", "").
    Raises OSError after PATIENCE: Ray itself would go on trying for thirteen minutes."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.port is not None:
        socket.create_connection((place.hostname or "", place.port), timeout=5).close()


def keep_counts_here() -> None:
    """Stop Ray Data from publishing row counts. Its executor, which runs in this process, reports
    the exact rows of every operator to an actor that shows them on metrics pages and on the
    dashboard. No setting turns this off, so the functions that report are replaced. Raises
    AttributeError if Ray uses other functions for it: no count may leak unnoticed."""
    manager = data_stats._StatsManager
    for name in COUNTED_BY:
        getattr(manager, name)
        setattr(manager, name, staticmethod(lambda *_, **__: None))


def hash_files(path: str, on_share: Callable[[float], None]) -> list[bytes]:
    """Return the digests of the files that `path` names, as `file_digests` does. Tasks on all
    machines hash large ones, so that they do not all pass through the network of this one. They
    take no CPU: the run's own group may hold all there are. Raises InputError for a file that
    cannot be read, and Ray's error if machines are lost again and again."""
    files = list_files(path)
    if total_size(files) < HASHED_HERE:
        return file_digests(path, on_share)
    hashing = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_hash)
    most = READERS * len(living_nodes())
    left, place_of, digests = deque(enumerate(files)), dict[Any, int](), dict[int, bytes]()
    while left or place_of:
        while left and len(place_of) < most:
            place, file = left.popleft()
            place_of[hashing.remote(file)] = place
        done, _ = ray.wait([*place_of], timeout=1.0)
        with own_errors():
            digests |= {place_of.pop(each): ray.get(each) for each in done}
        on_share(len(digests) / len(files))
    return [digests[place] for place in range(len(files))]


def refuse_unreached(folder: Path, machines: int) -> None:
    """Raise InputError for a local folder if the cluster has several machines."""
    if machines > 1 and network_file_system(str(folder)) is None:
        raise InputError(
            "data.query: its rows are copied to output.path, which the cluster's other machines "
            "do not see; set output.path to a shared folder, or export the rows to a bucket"
        )


def _hash(file: str) -> bytes:
    with without_words():
        return file_digest(file)


OWN_ACTORS = {"EngineActor", "ShardActor", "RayTrainWorker"}
"""The classes of the actors that have a run's engines, its shards and its ranks."""


def actors_alive() -> int | None:
    """Count the actors of this program's run that have started and answer; None without a cluster.
    That says which machines are there, and nothing of what the actors hold."""
    if not ray.is_initialized():
        return None
    try:
        job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        # Ray's public list asks the dashboard, which a cluster need not have.
        found = ray._private.state.actors(job_id=job, actor_state_name="ALIVE")
    except Exception:  # a cluster that is gone: the run says so itself
        return None
    return sum(each["ActorClassName"] in OWN_ACTORS for each in found.values())


class NeverRepeated:
    """The remote class of actors that Ray neither restarts nor repeats the calls of, with
    `runtime.cpus_per_actor` CPUs, `gpus` GPUs and the memory of their role each."""

    def __init__(self, actor: type, config: Config, gpus: float, role: Role) -> None:
        variables: dict[str, str] = {}
        if gpus and has_stages(config):  # vLLM's own actors inherit it, before they import anything
            runner = {RUNNER: os.environ.get(RUNNER, "0")}
            variables = ENVIRONMENT | IN_PROCESS | OF_GPU | runner
        if not gpus:
            cores = [node["Resources"].get("CPU", 1.0) for node in living_nodes()]
            variables = of_threads(config.runtime, cores, os.environ)
        self._class: Any = ray.remote(actor)
        self._cpus, self._memory = config.runtime.cpus_per_actor, reserved(config, role)
        self._options = {
            "num_gpus": gpus or None,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": variables} if variables else None,
        }

    def remote(self, *arguments: object, place: Place | None = None) -> Any:
        """Start an actor in this place, or where Ray likes."""
        anywhere = {"num_cpus": self._cpus, "memory": self._memory}
        where = anywhere if place is None else place.options(self._cpus)
        return self._class.options(**(self._options | where)).remote(*arguments)


THREADS, WAITING = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"


def of_threads(
    runtime: RuntimeConfig, cores: Sequence[float], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the environment of an actor whose model runs on a CPU: none where its
    threads are `given`.

    It has as many threads as the other actors leave of the `cores` of each machine: Ray would give
    it one for each CPU that it books, by default one. A thread that waits for the others sleeps. By
    default it keeps its core busy, and two threads that shared two cores with other work took seven
    times as long for a text.
    """
    if THREADS in given:
        return {}
    left = min(cores, default=1.0) // runtime.actors
    number = max(1, int(runtime.cpus_per_actor), int(left))
    return {THREADS: str(number), WAITING: given.get(WAITING, "passive")}


def is_local(config: Config) -> bool:
    """Return whether the engine runs on this machine: then its folders can be checked here."""
    return named_cluster(config.runtime.ray_address) in ("", "none", "local")

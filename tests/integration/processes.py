"""Runs as a person starts them: processes of their own, on a Ray cluster of their own."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dpray.cli import run_command
from dpray.ledger.ledger import Ledger
from tests.clusters import OF_RAY
from tests.faults import driver as faults

TIMEOUT = 500
"""Seconds. Five times what the slowest step of a test takes where the cores have nothing else to
do: a replica of vLLM that starts anew, under a minute and a half."""
NODE = {
    # Ray's own workers come last of all (nice 15) otherwise: beside busy neighbours they get a
    # twentieth of a core.
    "RAY_worker_niceness": "0",
    # A worker that has nothing to do is kept for the run's next task: each new one takes three
    # seconds of a core.
    "RAY_enable_worker_prestart": "0",
    "RAY_num_workers_soft_limit": "8",
    "RAY_idle_worker_killing_time_threshold_ms": "60000",
    # Ray gives a new node ten seconds to appear: too little beside busy neighbours.
    "RAY_raylet_start_wait_time_s": "120",
}
"""The environment of our clusters' nodes."""
MARKER = b"Marlowe"
"""A word that every record of the fixtures holds, and nothing else."""


@dataclass(frozen=True)
class Cluster:
    """A running `ray start --head`."""

    address: str
    dashboard: str
    temp_dir: Path
    head: subprocess.Popen[bytes]

    def workers(self, name: str) -> list[psutil.Process]:
        """The head's."""
        return workers_of(self.head, name)

    def logs(self) -> list[Path]:
        # Not through the link `session_latest`, which every driver makes anew.
        return [path for path in self.temp_dir.glob("session_2*/logs/**/*") if path.is_file()]


def workers_of(node: subprocess.Popen[bytes] | psutil.Process, name: str) -> list[psutil.Process]:
    """The processes of a node whose Ray title holds `name`."""
    found = []
    for process in family(node):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::") and name in title:
            found.append(process)
    return found


GIVEN: set[int] = set()  # the ports that `free_ports` has returned to this process


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at, on any address, and that no connection and no other call
    gets: Ray takes some of them many seconds later, and a head whose port is gone by then ends."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20_000 + worker % 3 * 4_000  # up to 31,999: Linux gives connections the ports beyond
    left = sorted({*range(first, first + 4_000)} - GIVEN)
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.sample(left, len(left)):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("", port))
                ports.append(port)
    GIVEN.update(ports)
    return ports


def environment(**more: str) -> dict[str, str]:
    """Ours, but for a cluster of somebody else's; one thread, the venv's programs first."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {
        "OMP_NUM_THREADS": "1",
        "PATH": programs,
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return kept | OF_RAY | ours | more


@contextmanager
def short() -> Iterator[Path]:
    """A folder that is not under pytest's: the path of a socket may have 107 bytes only."""
    folder = Path(tempfile.mkdtemp(prefix="dpray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def small_disk_at(folder: Path, size: str) -> Iterator[bool]:
    """Mount a disk of this size at a new folder; yield whether this process may."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    yield mounted
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Leave so much room on a disk."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with open(filler, "r+b") as file:
        file.truncate(filler.stat().st_size - left)
    return filler


@contextmanager
def ray_cluster(
    temp_dir: Path,
    cpus: int = 2,
    gpus: int = 0,
    jobs: bool = False,
    machines: Callable[[str], dict[str, Any]] | None = None,
    **variables: str,
) -> Iterator[Cluster]:
    """Start a cluster of one node with so many CPUs and GPUs as Ray is told of; it starts a process
    for each CPU that has work. `jobs` says whether it has the dashboard, which takes jobs, and
    `machines` makes the autoscaler's configuration of the cluster's address. Its environment holds
    `variables` too."""
    port, dashboard, client, metrics = free_ports(4)
    # A fixed port otherwise: of another cluster's dashboard, if that came first.
    variables = {"DASHBOARD_METRIC_PORT": str(metrics)} | variables
    options: dict[str, Any] = {
        "port": port,
        "include-dashboard": jobs,
        "dashboard-port": dashboard,
        "ray-client-server-port": client,
        "num-cpus": cpus,
        "num-gpus": gpus,
        "temp-dir": temp_dir,
    }
    address = f"127.0.0.1:{port}"
    if machines is not None:
        options["autoscaling-config"] = temp_dir / "machines.json"
        options["autoscaling-config"].write_text(json.dumps(machines(address)))
    with ray_node(temp_dir / "ray-start.out", options, "--head", **variables) as head:
        yield Cluster(address, f"http://127.0.0.1:{dashboard}", temp_dir, head)


@contextmanager
def another_node(
    cluster: Cluster, out: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Of three CPUs."""
    options = {"address": cluster.address, "num-cpus": 3}
    with ray_node(out, options, **variables) as node:
        yield node


@contextmanager
def ray_node(
    out: Path, options: dict[str, object], *flags: str, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """What `ray start` starts; `out` is the file for what it prints."""
    agent, agent_grpc = free_ports(2)
    options = {
        "dashboard-agent-listen-port": agent,
        "dashboard-agent-grpc-port": agent_grpc,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "object-store-memory": 150_000_000,
        "node-ip-address": "127.0.0.1",
    } | options
    # Without what copies the workers' output to drivers, which dpray's do not take, and without an
    # autoscaler that nobody asked for.
    flags = ("--block", "--include-log-monitor=false", *flags)
    if "autoscaling-config" not in options:
        flags = ("--no-monitor", *flags)
    command = [str(Path(sys.executable).parent / "ray"), "start", *flags]
    with open(out, "wb") as file:
        node = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=environment(**(NODE | variables)),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        try:
            wait_for(lambda: "Ray runtime started" in out.read_text(), node)
        except AssertionError as error:
            raise AssertionError(f"{error}: {out.read_text()[-2000:]}") from None
        yield node
    finally:
        kill(node)  # asked to end, it takes ten seconds


def kill(process: subprocess.Popen[Any]) -> None:
    """At once, with all that it started."""
    for one in [*family(process), process]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def family(process: subprocess.Popen[Any] | psutil.Process) -> list[psutil.Process]:
    """All that it started and that is there yet."""
    with suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def end(process: subprocess.Popen[Any]) -> None:
    """Stop a process that we started, with all that it started."""
    started = family(process)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in psutil.wait_procs(started, timeout=3)[1]:
        one.kill()


def wait_for(
    ready: Callable[[], object], process: subprocess.Popen[Any] | None = None, pause: float = 0.2
) -> None:
    """Wait until `ready()`, asked every `pause` seconds. Raises AssertionError after TIMEOUT, or if
    `process` ends before; its output is in the message."""
    deadline = time.monotonic() + TIMEOUT
    while not ready():
        assert time.monotonic() < deadline, "waited too long"
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended before: {process.communicate()}")
        time.sleep(pause)


DPRAY_RUN = ["-m", "dpray", "run"]
FAULT_DRIVER = faults.__file__
WORDS = "tests/words"
"""The model of `tests.faults.driver` is no folder, so that no driver reads its tokenizer."""
COMMAND_LINES = str(Path(__file__).with_name("command_lines.py"))


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        # The whole of it: nothing else stands on stdout under `--json`.
        report: dict[str, Any] = json.loads(self.out)
        return report


class Runs:
    """`dpray run` on one configuration, as processes."""

    def __init__(self, tree: dict[str, Any], cluster: Cluster, folder: Path) -> None:
        self.tree, self.cluster = tree, cluster
        self.output = Path(tree["output"]["path"])
        self.url: str = tree["privacy"]["ledger"]
        self.program = DPRAY_RUN
        self.fault: str | None = None
        self.processes: list[subprocess.Popen[str]] = []
        self.marker = folder / "marker"
        self.folder = folder

    def with_fault(self, fault: str) -> Runs:
        """Give it the engine of `tests.faults.driver` with a fault."""
        self.fault = fault
        self.tree["engine"]["model"] = WORDS
        self.program = [FAULT_DRIVER, fault, str(self.marker)]
        return self

    @property
    def config(self) -> Path:
        """The file with `tree` as it stands now."""
        path = self.folder / f"{self.output.name}.yaml"
        path.write_text(yaml.safe_dump(self.tree))
        return path

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """On the cluster, unless `variables` of the environment say otherwise."""
        variables = {"RAY_ADDRESS": self.cluster.address} | variables
        process = subprocess.Popen(
            [sys.executable, *self.program, str(self.config), "--json"],
            # Ray's own workers come last of all (nice 15) otherwise: beside busy neighbours they
            # get a twentieth of a core.
            env=environment(**({"RAY_worker_niceness": "0"} | variables)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> Ended:
        """Its end; whatever it was, no private text was printed, kept or logged."""
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            end(process)
            raise
        ended = Ended(process.returncode, out, err)
        self.assert_nothing_private(ended)
        return ended

    def run(self, **variables: str) -> Ended:
        return self.finish(self.start(**variables))

    def here(self, capfd: pytest.CaptureFixture[str], address: str = "none") -> Ended:
        """The end of `dpray run` in this process, which loads no libraries anew: without Ray, or
        with the fixture `driver` and its cluster's address on Ray. Where an unfinished run works
        may change."""
        capfd.readouterr()
        where = f"runtime.ray_address={address}"
        if self.fault is None:
            code = run_command(["run", str(self.config), where, "--json"])
        else:
            code = faults.main(self.fault, str(self.marker), str(self.config), where)
        ended = Ended(code, *capfd.readouterr())
        self.assert_nothing_private(ended)
        return ended

    def counts(self) -> dict[str, int]:
        """What the ledger says of this run's batches; all zero before it is charged."""
        try:
            with closing(Ledger.open(self.url)) as ledger:
                return ledger.counts(self.id)
        except Exception:
            return {"started": 0, "published": 0}

    def under_way(self) -> set[tuple[str, str]]:
        """The batches that are begun and not published, each with the attempt that began it."""
        with closing(Ledger.open(self.url)) as ledger:
            return set(ledger.unfinished(self.id))

    @property
    def id(self) -> str:
        run: dict[str, str] = json.loads((self.output / "run.json").read_text())
        return run["run_id"]

    def engines_waited(self) -> int:
        """The engines with the fault `waits` that have come to their wait, dead ones too."""
        return len(list(self.folder.glob(f"{self.marker.name}.*")))

    def in_mid_batch(self) -> bool:
        """Some batches are published, others are begun and not published."""
        counts = self.counts()
        return counts["started"] > counts["published"] > 0

    def assert_whole(self, report: dict[str, Any]) -> None:
        """Charged once and in full; each batch published once; each of its records stands once."""
        with closing(Ledger.open(self.url)) as ledger:
            assert ledger.verify() == []
            account = ledger.account(self.tree["privacy"]["dataset"])
            published = [batch for batch, _ in ledger.published(report["ledger"]["reservation"])]
        assert account is not None
        assert (account.spent.epsilon, account.spent.delta) == (report["epsilon"], report["delta"])
        assert len(published) == len(set(published)) == report["batches"]["published"]
        assert report["batches"]["missing"] == report["batches"]["failed"] == 0
        records = [json.loads(line) for line in self.synthetic()]
        assert len(records) == report["records"] > 0
        assert {record["batch"] for record in records} <= set(published)
        # No batch's records stand there twice.
        most = self.tree["method"]["max_records"] // report["batches"]["total"]
        for batch in published:
            assert sum(record["batch"] == batch for record in records) <= most

    def synthetic(self) -> list[str]:
        # Not `splitlines`: a text may hold other ends of lines than "\n".
        return (self.output / "synthetic.jsonl").read_text().split("\n")[:-1]

    def assert_nothing_private(self, ended: Ended) -> None:
        assert MARKER.decode() not in ended.out + ended.err
        for path in [*self.output.rglob("*"), *self.cluster.logs()]:
            if path.is_file():
                assert MARKER not in path.read_bytes(), path.name

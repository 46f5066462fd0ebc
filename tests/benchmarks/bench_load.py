"""A good client's answers while others load `dpray serve`, and the memory that it leaves.

    python -m tests.benchmarks.bench_load [--seconds 20] [--rest 30] [--clients 300] [--direct]
        [--only LOAD] [--rounds 1] [--json FILE]

Ray Serve on this machine serves the packaged model and all-MiniLM-L6-v2 as `jobs/serve_cpu.yaml`
does, to two keys in two gateways, behind nginx with `cluster/proxy/nginx.conf`; `--direct` leaves
nginx out. A client of `openai` with one key asks for 12 tokens and for an embedding again and
again, each on a new connection. One load after the other runs for `--seconds` with the other key.
Then all rests for `--rest` seconds. Memory is resident, of all of Serve's and vLLM's processes;
their own memory is what no file and no other process shares. Files are those that Serve's proxy and
gateways have open.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copytree
from typing import Annotated, Any, NamedTuple

import psutil
import typer

from dpray.engines.model_path import resolve_model
from tests.benchmarks.good_client import asking, asks, good_client
from tests.cluster.proxy import running_proxy
from tests.integration import loads
from tests.integration.endpoints import EMBEDDER, KEY, OTHER, start_serve
from tests.integration.loads import Load, Target, loading
from tests.integration.processes import Cluster, end, family, free_ports, ray_cluster, short
from tests.serving.front import hashed

NAME = "dpray-demo"
ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32, "kv_cache_gib": 1.0}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
SERVING = ("ServeController", "ProxyActor", "ServeReplica", "EngineCore", "RayWorkerWrapper")
"""Parts of the titles of Serve's and vLLM's processes."""


class Case(NamedTuple):
    """A load, and the part of Serve that is killed when a quarter of the time is over."""

    load: Load | None
    count: int
    killed: str = ""


def cases(clients: int) -> dict[str, Case]:
    few = clients // 4
    return {
        "none": Case(None, 0),
        f"{clients} clients that wait when told to": Case(loads.polite_clients, clients),
        f"{clients} clients that do not": Case(loads.rude_clients, clients),
        "1,100 slow senders": Case(loads.slow_senders, 1100),
        "1,100 slow senders with a wrong key": Case(loads.slow_strangers, 1100),
        "10,000 half-open connections": Case(loads.half_open, 10_000),
        "40 clients with bodies at and above the limit": Case(loads.large_bodies, 40),
        "80 clients, 125 texts a request": Case(loads.embedding_clients, 80),
        f"{few} clients, a gateway killed": Case(
            loads.polite_clients, few, "ServeReplica:dpray:gateway"
        ),
        f"{few} clients, Serve's proxy killed": Case(loads.polite_clients, few, "ProxyActor"),
        f"{few} clients, the embedder killed": Case(
            loads.polite_clients, few, "ServeReplica:dpray:embedder"
        ),
        f"{few} clients, the LLM killed": Case(loads.polite_clients, few, "ServeReplica:dpray:llm"),
    }


@contextmanager
def served(cluster: Cluster, folder: Path) -> Iterator[int]:
    """Run `dpray serve`; yield its port."""
    model = Path(copytree(resolve_model("dpray/demo/model"), folder / NAME))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    port = free_ports(1)[0]
    serve = {"port": port, "keys": [hashed(KEY), hashed(OTHER)], "gateways": 2}
    config = {
        "engine": ENGINE | {"model": str(model)},
        "embedder": {"model": EMBEDDER},
        "serve": serve | {"llm": {"name": NAME}},
    }
    process = start_serve(cluster, config, folder)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), (folder / "err").read_text()
        yield port
    finally:
        end(process)


def serving(cluster: Cluster) -> dict[int, str]:
    """Return the titles of Serve's and vLLM's processes."""
    found = {}
    for process in family(cluster.head):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline()).strip()
            if any(name in title for name in SERVING):
                found[process.pid] = title
    return found


def state(cluster: Cluster) -> dict[str, Any]:
    """Return the resident and own MB of each process and of all, the open files, and the
    MB of the logs."""
    memory: dict[str, tuple[float, float]] = {}
    files = 0
    for pid, title in serving(cluster).items():
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            memory[f"{title} {pid}"] = process.memory_info().rss / 1e6, own_bytes(pid) / 1e6
            if "ProxyActor" in title or "gateway" in title:
                files += process.num_fds()
    logs = {path.name: path.stat().st_size / 1e6 for path in cluster.logs()}
    resident, own = (sum(each[place] for each in memory.values()) for place in (0, 1))
    whole = {"MB": resident, "own MB": own, "files": files, "log MB": sum(logs.values())}
    return whole | {"each": memory, "logs": logs}


def own_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def run_case(
    cluster: Cluster,
    case: Case,
    target: Target,
    ask: dict[str, Callable[[], object]],
    seconds: float,
    rest: float,
) -> dict[str, Any]:
    before = state(cluster)
    with asking(ask) as noted:
        if case.load is None:
            time.sleep(seconds)
            answers = {}
        else:
            with loading(case.load, target, case.count) as answers:
                time.sleep(seconds / 4)
                if case.killed:
                    cluster.workers(case.killed)[0].kill()
                time.sleep(seconds * 3 / 4)
                at_end = state(cluster)
    if case.load is None:
        at_end = state(cluster)
    answered_again(ask)
    time.sleep(rest)
    return {
        "answers": dict(answers),
        "good": {kind: each.figures for kind, each in noted.items()},
        "before": before,
        "end": at_end,
        "rested": state(cluster),
    }


def answered_again(ask: dict[str, Callable[[], object]]) -> None:
    for each in ask.values():
        while True:
            with suppress(Exception):
                each()
                break
            time.sleep(1)


def row(name: str, found: dict[str, Any]) -> str:
    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))

    good, states = found["good"], [found[at] for at in ("before", "end", "rested")]
    cells = [name, listed(found["answers"])]
    for each in good.values():
        cells += [f"{each['requests']}", listed(each["failed"]) or "0"]
        cells.append(f"{each['p50']:.2f}, {each['p99']:.2f}")
    cells += [", ".join(f"{each[kind]:,.0f}" for each in states) for kind in ("MB", "own MB")]
    cells.append(", ".join(str(each["files"]) for each in states))
    return f"| {' | '.join(cells)} |"


HEAD = """\
| load | its answers | chats | failed | p50, p99, s | embeddings | failed | p50, p99, s \
| MB before, at the end, rested | their own | open files |
|---|---|---:|---|---:|---:|---|---:|---:|---:|---:|"""


def main(
    seconds: float = 20,
    rest: float = 30,
    clients: int = 300,
    direct: bool = False,
    only: Annotated[list[str] | None, typer.Option(help="Parts of the loads' names.")] = None,
    rounds: int = 1,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    found: dict[str, Any] = {}
    with (
        short() as folder,
        # What else this machine does must not have Ray end processes for want of memory.
        ray_cluster(folder, RAY_memory_monitor_refresh_ms="0") as cluster,
        served(cluster, folder) as port,
        in_front(folder, port, direct) as (where, certificate, tls),
    ):
        target = Target(where, OTHER, NAME, EMBEDDER, certificate)
        ask = asks(good_client(target.url, KEY, tls), NAME, EMBEDDER)
        answered_again(ask)
        time.sleep(min(rest, 10))
        print(HEAD, flush=True)
        chosen = {
            name: case
            for name, case in cases(clients).items()
            if only is None or any(part in name for part in only)
        }
        for number in range(rounds):
            for name, case in chosen.items():
                found[f"{name}, {number}"] = run_case(cluster, case, target, ask, seconds, rest)
                print(row(name, found[f"{name}, {number}"]), flush=True)
                if json_file is not None:
                    json_file.write_text(json.dumps(found, indent=1))


@contextmanager
def in_front(folder: Path, port: int, direct: bool) -> Iterator[tuple[int, str | None, Any]]:
    """The port that callers reach, the file of its certificate, and a client's context for it."""
    if direct:
        yield port, None, None
        return
    (folder / "proxy").mkdir()
    with running_proxy(folder / "proxy", port) as proxy:
        yield proxy.port, str(folder / "proxy" / "tls.crt"), proxy.tls


if __name__ == "__main__":
    typer.run(main)

"""The seconds in which requests fail or wait when a gateway of `dpray serve` is killed, with one
gateway and with two.

    python tests/benchmarks/bench_gateways.py [--gateways 1] [--gateways 2] [--rounds 3]

Ray Serve on this machine serves a small embedder. Two clients of `openai` without retries and two
with its default retries send one request after the other while the process is killed. "failing" is
the time from the kill to the last failure, "waiting" the longest time without an answer; both of
the clients without retries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import openai
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.integration.endpoints import EMBEDDER, KEY, start_serve
from tests.integration.processes import Cluster, end, free_ports, ray_cluster, short, wait_for
from tests.serving.front import hashed
from tests.serving.traffic import traffic


@contextmanager
def served(cluster: Cluster, gateways: int, folder: Path) -> Iterator[openai.OpenAI]:
    """A client of `dpray serve`."""
    config: dict[str, Any] = {"port": free_ports(1)[0], "keys": [hashed(KEY)], "gateways": gateways}
    tree = {"embedder": {"model": EMBEDDER}, "serve": config}
    process = start_serve(cluster, tree, folder)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        yield openai.OpenAI(base_url=said["base_url"], api_key=KEY)
    finally:
        end(process)


def killed(cluster: Cluster, client: openai.OpenAI, number: int) -> list[object]:
    """Kill one of the `number` gateways, and return the cells of a row."""

    def replicas() -> list[Any]:
        return cluster.workers("ServeReplica:dpray:gateway")

    def embed(retries: int) -> Any:
        asks = client.with_options(max_retries=retries)
        return lambda: asks.embeddings.create(model=EMBEDDER, input="an old bridge")

    with (
        traffic(embed(openai.DEFAULT_MAX_RETRIES)) as retried,
        traffic(embed(0)) as tried,
    ):
        wait_for(lambda: len(tried.answered) > 20)
        began = monotonic()
        replicas()[0].kill()
        wait_for(lambda: tried.answered_since(began) > 20)
        wait_for(lambda: len(replicas()) == number and len(tried.answered) > 200)
    failing, waiting = tried.outage(began), tried.longest_pause()
    return [number, f"{failing:.2f}", f"{waiting:.2f}", len(tried.failed), len(retried.failed)]


def main(gateways: Annotated[list[int] | None, typer.Option()] = None, rounds: int = 3) -> None:
    print("| gateways | failing, s | waiting, s | failed | failed, retries |")
    print("|---:|---:|---:|---:|---:|")
    for number in gateways or [1, 2]:
        with (
            short() as folder,
            ray_cluster(folder) as cluster,
            served(cluster, number, folder) as client,
        ):
            for _ in range(rounds):
                cells = killed(cluster, client, number)
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    typer.run(main)

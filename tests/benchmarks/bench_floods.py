"""The slowest answer that one key's client waits for while another key floods `dpray serve`.

    python -m tests.benchmarks.bench_floods [--seconds 20] [--quiet 30] [--model FOLDER]

Ray Serve on this machine serves the packaged model (32 sequences at a time, as
`jobs/serve_cpu.yaml`) to two keys. One client of `openai` sends one request of 12 tokens after the
other, and gives up after a minute. It is alone for `--quiet` seconds; then the other key floods the
endpoint for `--seconds`, one flood after the other: each sends all its requests at once, and again
when all are answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import typer

from tests.integration.endpoints import KEY, OTHER, start_serve
from tests.integration.floods import (
    flooding,
    p99,
    seconds_of_answers,
    sequences,
    unknown_keys,
    wrong_biases,
)
from tests.integration.processes import Cluster, end, free_ports, ray_cluster, short
from tests.serving.front import hashed

NAME = "dpray-demo"
ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32, "kv_cache_gib": 1.0}
PATIENCE = 60.0
FLOODS = [
    ("120 requests of 128 sequences", 120, sequences(NAME, prompts=8, n=16, tokens=512)),
    ("120 requests of 16 sequences", 120, sequences(NAME, prompts=1, n=16, tokens=512)),
    ("64 bodies with 75,000 wrong `logit_bias` entries", 64, wrong_biases(NAME, 75_000)),
    ("64 bodies with 85,000 unknown keys", 64, unknown_keys(NAME, 85_000)),
]


@contextmanager
def served(cluster: Cluster, model: str, folder: Path) -> Iterator[str]:
    """The address of `dpray serve`."""
    keys = [hashed(KEY), hashed(OTHER)]
    config: dict[str, Any] = {"port": free_ports(1)[0], "keys": keys, "llm": {"name": NAME}}
    process = start_serve(cluster, {"engine": ENGINE | {"model": model}, "serve": config}, folder)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "err").read_text()
        yield json.loads(line)["base_url"]
    finally:
        end(process)


def main(seconds: float = 20, quiet: float = 30, model: str = "dpray/demo/model") -> None:
    with short() as folder, ray_cluster(folder) as cluster, served(cluster, model, folder) as url:
        client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=PATIENCE)

        def ask() -> None:
            with suppress(openai.APITimeoutError):
                client.completions.create(
                    model=NAME,
                    prompt="The old bridge",
                    max_tokens=12,
                    extra_body={"ignore_eos": True},
                )

        seconds_of_answers(ask, 0, fewest=20)
        alone = seconds_of_answers(ask, quiet)
        limit = p99(alone)
        print("| flood | answers to it | requests | p99, s | slowest, s | slowest / quiet p99 |")
        print("|---|---|---:|---:|---:|---:|")
        print(f"| none | | {len(alone)} | {limit:.3f} | {max(alone):.3f} | |", flush=True)
        for name, at_once, body in FLOODS:
            with flooding(url, OTHER, body, at_once) as statuses:
                took = seconds_of_answers(ask, seconds)
            said = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
            cells = f"{len(took)} | {p99(took):.3f} | {max(took):.3f} | {max(took) / limit:.1f}"
            print(f"| {name} | {said} | {cells} |", flush=True)
            # The requests of a caller who went away may take a while to end.
            while max(seconds_of_answers(ask, 5)) > 3 * limit:
                pass


if __name__ == "__main__":
    typer.run(main)

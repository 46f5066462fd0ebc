"""`dpray serve` as a process, and how tests call it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from tests.integration.processes import MARKER, TIMEOUT, Cluster, environment

WORD = MARKER.decode()
KEY, OTHER = "dpray-integration-key-one", "dpray-integration-key-two"
EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
LLM = "tiny"


def start_serve(cluster: Cluster, config: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    """It prints one line when it is ready; its errors are in `folder`, in the file `err`."""
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        [sys.executable, "-m", "dpray", "serve", str(path), "--json"],
        env=environment(RAY_ADDRESS=cluster.address),
        stdout=subprocess.PIPE,
        stderr=open(folder / "err", "w"),
        text=True,
    )


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[str]
    said: dict[str, Any]
    cluster: Cluster

    @property
    def url(self) -> str:
        return str(self.said["base_url"]).removesuffix("/v1")

    def client(self, key: str = KEY, retries: int = 0) -> openai.OpenAI:
        """A new client reads all certificates: fifty milliseconds of a core."""
        return openai.OpenAI(
            base_url=self.said["base_url"], api_key=key, max_retries=retries, timeout=TIMEOUT
        )

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT)

    def post(self, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"} | more.pop("headers", {})
        return self.http.post(path, headers=headers, **more)

    def get(self, path: str, key: str | None = KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.get(path, headers=headers)


def chat(client: openai.OpenAI, words: str = "", tokens: int = 12) -> Any:
    return client.chat.completions.create(
        model=LLM,
        messages=[{"role": "user", "content": f"{WORD} the old bridge {words}"}],
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )

"""`dpray serve` serves the LLM and the embedder at one OpenAI-compatible address."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dpray.commands.plan import AsJson, ConfigFile, Overrides
from dpray.engines.text import has_chat_template
from dpray.extras import Late, require
from dpray.io.yaml_text import dump_yaml
from dpray.serving.settings import ServeFile, load_serve_config
from dpray.terminal import Terminal

if TYPE_CHECKING:
    from dpray.serving import applications
else:  # A mistyped key should not have to wait for Ray.
    applications = Late("dpray.serving.applications")

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write the file for `serve deploy` to stdout; start none.")
]


def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Serve the language model and the embedder, until Ctrl+C."""
    file = load_serve_config(config, overrides)
    require("dpray serve", "fastapi", "limits", "torch")
    if dry_run:
        tree = applications.serve_config(file)
        typer.echo(json.dumps(tree) if as_json else dump_yaml(tree).rstrip())
        return
    require("dpray serve", "vllm")
    console = Terminal(stderr=as_json)
    console.print("starting the models; `serve status` shows what they wait for")

    def ready(url: str) -> None:
        if as_json:
            typer.echo(json.dumps(_endpoints(file, url)))
        else:
            _show(file, url, console)

    applications.serve_until_stopped(file, ready)
    console.print("stopped")


def _endpoints(file: ServeFile, url: str) -> dict[str, object]:
    return {
        "base_url": url,
        "llm": file.llm_name,
        "embedder": file.embedder_name,
        "health": url.removesuffix("/v1") + "/-/healthz",
        "auth": file.serve.auth,
    }


def _show(file: ServeFile, url: str, console: Terminal) -> None:
    key = "your key" if file.serve.auth == "keys" else "any word: no key is asked for"
    lines = [f"Serving at {url} (Ctrl-C stops it). From Python:", ""]
    lines += ["  from openai import OpenAI", f'  client = OpenAI(base_url="{url}", api_key=KEY)']
    if file.llm_name and file.engine:
        call = 'completions.create(model="{}", prompt="...", max_tokens=64)'
        if has_chat_template(file.engine.model):
            call = (
                'chat.completions.create(model="{}", '
                'messages=[{{"role": "user", "content": "..."}}])'
            )
        lines.append(f"  client.{call.format(file.llm_name)}")
    if file.embedder_name:
        lines.append(
            f'  client.embeddings.create(model="{file.embedder_name}", input=["...", "..."])'
        )
    lines += ["", f"KEY: {key}. Health: {_endpoints(file, url)['health']}"]
    console.plain("\n".join(lines))

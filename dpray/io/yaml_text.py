"""YAML that somebody else wrote: read and looked at before anything is built from it.

PyYAML and OmegaConf build what a text says. A short one may say a great deal (aliases of aliases of
a list), and a deeply nested one ends in a RecursionError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 4_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100


class YamlRefused(yaml.YAMLError):
    """The text is too long, too large once its aliases are followed, or nested too deeply."""


def read_yaml_text(path: str | Path) -> str:
    """Read a file's text. Raises OSError, UnicodeDecodeError, YamlRefused where it is too long."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise YamlRefused(f"more than {MOST_BYTES} bytes")
    return content.decode("utf-8-sig")


def parse_yaml(text: str) -> Any:
    """Parse a text that `check_yaml` lets through into a plain value."""
    check_yaml(text)
    return yaml.safe_load(text)


def check_yaml(text: str) -> None:
    """Raises YamlRefused for a text of more than `MOST_NODES` nodes, each alias counted with all
    that it stands for, or with more than `MOST_LEVELS` levels; YAMLError for one that is not YAML.

    Works on the parser's events, which takes neither recursion nor memory for the nodes.
    """
    sizes: dict[str, int | None] = {}
    """The nodes below each anchor; None while its own node is still open."""
    opened: list[tuple[str | None, int]] = []
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in sizes:
                size = sizes[event.anchor]
                if size is None:
                    raise YamlRefused(f"the alias {event.anchor} stands within itself")
                nodes += size
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, nodes))
            nodes += 1
            if event.anchor is not None:
                sizes[event.anchor] = None
            if len(opened) > MOST_LEVELS:
                raise YamlRefused(f"nested more than {MOST_LEVELS} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        if nodes > MOST_NODES:
            raise YamlRefused(f"more than {MOST_NODES} values")

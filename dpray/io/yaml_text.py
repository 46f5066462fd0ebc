"""Untrusted YAML is checked before anything is built from it.

PyYAML and OmegaConf build whatever a text describes: a short one may describe a great deal (aliases
of aliases of a list), and a deeply nested one ends in a RecursionError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 4_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100


class YamlRefused(yaml.YAMLError):
    """The text is too long, too large with its aliases expanded, or nested too deeply."""


def read_yaml_text(path: str | Path) -> str:
    """Read a file's text. Raises OSError, UnicodeDecodeError, YamlRefused where it is too long."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise YamlRefused(f"more than {MOST_BYTES} bytes")
    return content.decode("utf-8-sig")


def parse_yaml(text: str) -> Any:
    """Parse a text into a plain value, after `check_yaml`."""
    check_yaml(text)
    return yaml.safe_load(text)


def check_yaml(text: str) -> None:
    """Raise YamlRefused for a text of more than `MOST_NODES` nodes, aliases expanded, or more than
    `MOST_LEVELS` levels; YAMLError for one that is not YAML.

    It works on the parser's events, without recursion and without memory for the nodes.
    """
    sizes: dict[str, int | None] = {}
    """Counts the nodes of each anchor; an anchor has None while its own node is open."""
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

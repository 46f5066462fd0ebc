"""YAML 1.2 with plain numbers. Untrusted YAML is checked before anything is built from it: a short
text may describe a great deal (aliases of aliases of a list), and a deeply nested one ends in a
RecursionError.

A number is written in decimal digits, with a point and an exponent if it has them: 4, 0.5, 1e-6.
`.inf` is infinity. `true`, `false` and `null` (or `~`) are what they are in JSON. All else is a
text: also 1:30, 0x10, 0o10, 012, 1_000, `yes`, `no`, a date, and 1e400, which no float holds.
"""

from __future__ import annotations

import math
import re
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml import events as parsed
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers

MOST_BYTES = 4_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100

FLOAT = "tag:yaml.org,2002:float"

PLAIN = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE"),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)"),
    (FLOAT, r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
    (FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
]
"""A scalar without quotes is of the first of these types whose pattern it matches."""


class YamlRefused(ValueError):
    """The text is not YAML, or is too long, too large with its aliases expanded, or nested too
    deeply. The message is one line."""


def read_yaml_text(path: str | Path) -> str:
    """Read a file's text. Raises OSError, UnicodeDecodeError, YamlRefused where it is too long."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise YamlRefused(f"more than {MOST_BYTES} bytes")
    return content.decode("utf-8-sig")


def parse_yaml(text: str) -> Any:
    """Parse a text into a plain value. Raises YamlRefused that names the line, also for a key that
    is given twice."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Constructor = _PlainTypes, _PlainNumbers
    try:
        _check(yaml.parse(text))
        return yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # Without the values, one of which may be the key of an endpoint.
        problem = str(error.problem or error.context).partition(" with value")[0]
        raise YamlRefused(f"line {mark.line + 1}: {problem}" if mark else problem) from None
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, YamlRefused):
            raise
        raise YamlRefused(str(error).splitlines()[0]) from None


def text_lines(text: str) -> dict[tuple[str, ...], tuple[int, bool]]:
    """Return the line on which each value of a YAML text begins, by the keys and places that lead
    to it, and whether the lines of the value are those of the text. `parse_yaml` has read the text:
    it is not too large."""
    yaml: Any = YAML(typ="safe", pure=True)
    lines: dict[tuple[str, ...], tuple[int, bool]] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), yaml.compose(text))]
    while waiting:
        keys, node = waiting.pop()
        style = getattr(node, "style", None)
        lines[keys] = (node.start_mark.line + 1 + (style in ("|", ">")), style == "|")
        if isinstance(node, MappingNode):
            waiting += [((*keys, str(key.value)), value) for key, value in node.value]
        elif isinstance(node, SequenceNode):
            waiting += [((*keys, str(place)), each) for place, each in enumerate(node.value)]
    return lines


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return a plain tree as YAML that readers of YAML 1.1 and 1.2 understand alike."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer = _AllTypes, _FloatsOfBoth
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = MOST_BYTES
    text = StringIO()
    yaml.dump(tree, text)
    return text.getvalue()


class _Size:
    """Counts a text's nodes, aliases expanded, from the parser's events: without recursion, and
    without memory for the nodes."""

    def __init__(self) -> None:
        self.nodes = 0
        self._of_anchors: dict[str | None, int | None] = {}
        """The number of nodes of each anchor; None while its own node is open."""
        self._opened: list[tuple[str | None, int]] = []

    def add(self, event: Any) -> None:
        match event:
            case parsed.AliasEvent():
                self._add_alias(event.anchor)
            case parsed.ScalarEvent():
                self.nodes += 1
                self._of_anchors[event.anchor] = 1
            case parsed.CollectionStartEvent():
                self._opened.append((event.anchor, self.nodes))
                self._of_anchors[event.anchor] = None
                self.nodes += 1
            case parsed.CollectionEndEvent():
                anchor, before = self._opened.pop()
                self._of_anchors[anchor] = self.nodes - before
        if self.nodes > MOST_NODES:
            raise YamlRefused(f"more than {MOST_NODES} values")
        if len(self._opened) > MOST_LEVELS:
            raise YamlRefused(f"nested more than {MOST_LEVELS} levels deep")

    def _add_alias(self, anchor: str) -> None:
        size = self._of_anchors.get(anchor, 0)  # the parser refuses an alias without an anchor
        if size is None:
            raise YamlRefused(f"the alias {anchor} stands within itself")
        self.nodes += size


def _check(events: Any) -> None:
    """Raise YamlRefused for a text of more than `MOST_NODES` nodes or `MOST_LEVELS` levels, and for
    tags and directives, which would give a value another meaning."""
    size = _Size()
    for event in events:
        if isinstance(event, parsed.DocumentStartEvent) and (event.version or event.tags):
            raise YamlRefused("a directive (%) has no meaning here")
        if (tag := getattr(event, "tag", None)) is not None:
            line = event.start_mark.line + 1
            raise YamlRefused(f"line {line}: write the value without the tag {tag}")
        size.add(event)


def _by_any_first_letter(types: list[tuple[str, Any]]) -> Any:
    class Types(VersionedResolver):
        @property
        def versioned_resolver(self) -> Any:
            return {None: types}

    return Types


_PLAIN_TYPES: list[tuple[str, Any]] = [
    (tag, re.compile(rf"(?:{pattern})\Z")) for tag, pattern in PLAIN
]
_PlainTypes = _by_any_first_letter(_PLAIN_TYPES)
_AllTypes = _by_any_first_letter(_PLAIN_TYPES + [(tag, p) for _, tag, p, _ in implicit_resolvers])
"""A text that any version takes for something else is dumped in quotes."""


class _PlainNumbers(SafeConstructor):
    def finite(self, node: Any) -> float | str:
        number = float(self.construct_yaml_float(node))
        too_large = math.isinf(number) and "inf" not in node.value.lower()
        return str(node.value) if too_large else number


_PlainNumbers.add_constructor(FLOAT, _PlainNumbers.finite)


class _FloatsOfBoth(SafeRepresenter):
    def with_point(self, number: float) -> Any:
        node = self.represent_float(number)
        if "." not in node.value:  # YAML 1.1 takes 1e-06 for a text
            node.value = node.value.replace("e", ".0e")
        return node


_FloatsOfBoth.add_representer(float, _FloatsOfBoth.with_point)

"""YAML 1.2 with plain numbers, for configurations and templates.

A number is written in decimal digits, with a point and an exponent if it has them: 4, 0.5, 1e-6.
`.inf` is infinity. `true`, `false` and `null` (or `~`) are what they are in JSON. All else is a
text: also 1:30, 0x10, 0o10, 012, 1_000, `yes`, `no`, a date, and 1e400, which no float holds.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from dpray.types import Json

NULL, BOOL, INT, FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))

PLAIN = [
    (NULL, re.compile(r"(~|null|Null|NULL|)\Z")),
    (BOOL, re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")),
    (INT, re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")),
    (FLOAT, re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")),
    (FLOAT, re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")),
]
"""A scalar without quotes is of the first of these types whose pattern it matches."""


class YamlRefused(ValueError):
    """The text is not YAML, gives a key twice, or has an alias. The message is one line."""


def parse_yaml(text: str) -> object:
    """Parse a text into a plain value. Raises YamlRefused, which names the line."""
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context)
        raise YamlRefused(f"line {mark.line + 1}: {problem}" if mark else problem) from None
    except RecursionError:
        raise YamlRefused("nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise YamlRefused(str(error).splitlines()[0]) from None


def dump_yaml(tree: Json) -> str:
    """Return a plain tree as YAML that readers of YAML 1.1 and 1.2 understand alike."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


_SafeLoader: Any = yaml.SafeLoader  # its types name few of its methods


class _PlainLoader(_SafeLoader):
    yaml_implicit_resolvers = {None: PLAIN}  # noqa: RUF012 (as in the class above)

    def compose_node(self, parent: object, index: object) -> object:
        event: object = self.peek_event()
        if isinstance(event, yaml.AliasEvent):  # it may lead back to its own beginning
            problem, mark = "write the value itself in place of the alias", event.start_mark
            raise yaml.MarkedYAMLError(None, None, problem, mark)  # type: ignore[arg-type]
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> object:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = self.construct_object(key)
                if name in seen:
                    mark = key.start_mark
                    raise yaml.MarkedYAMLError(None, None, f'found duplicate key "{name}"', mark)
                seen.add(name)
        return super().construct_mapping(node, deep)

    def finite(self, node: yaml.ScalarNode) -> float | str:
        number = self.construct_yaml_float(node)
        too_large = math.isinf(number) and "inf" not in node.value.lower()
        return str(node.value) if too_large else number


_PlainLoader.add_constructor(FLOAT, _PlainLoader.finite)


class _Dumper(yaml.SafeDumper):
    """Puts a text into quotes that either version takes for something else."""


for _tag, _pattern in PLAIN:
    _Dumper.add_implicit_resolver(_tag, _pattern, None)

"""Untrusted Jinja templates are rendered safely: no code runs, and a rendering ends.

Jinja's immutable sandbox keeps a template away from Python's internals, but not from
`'a' * 10**10` or from nested loops. So templates get a part of the language: output, `if`, `for`
and `set`; the filters and methods named here; values of at most `MOST` characters, and
`MOST_IN_ALL` of them together; and `SECONDS` for a rendering. In this part of the language a value
grows only by an operator, a filter, a method or a list, each of which is checked before its result
is used, or when it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import (
    Callable,
    Generator,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sized,
    ValuesView,
)
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError, safe_range
from jinja2.visitor import NodeTransformer

MOST = 10_000_000
"""A text that a template makes, or an intermediate value, has at most so many characters."""

MOST_IN_ALL = 20 * MOST
"""A rendering reads or makes at most so many characters and entries, counted every time."""

MOST_VALUES = 1_000_000
"""A list or mapping has at most so many entries, nested ones included."""

MOST_SOURCE = 100_000
SECONDS = 10.0
MOST_BITS = 64
MOST_INDENT = 16
MOST_DIGITS = 1_000
"""A number in a base other than ten, for which Python has no bound, has at most so many digits."""

STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign)

FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "select", "selectattr", "sort", "string", "title", "tojson",
    "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip

LOOPS = ("map", "reject", "rejectattr", "select", "selectattr")
"""These filters apply a test or a filter to each value: `select('in', values)`."""

METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "get", "index", "isalnum", "isalpha",
    "isdecimal", "isdigit", "islower", "isnumeric", "isoformat", "isspace", "istitle", "isupper",
    "items", "join", "keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "upper", "values",
})  # fmt: skip


@dataclass
class _Left:
    """Counts the time and the size that a rendering has left."""

    deadline: float
    size: int = MOST_IN_ALL

    def spend(self, size: int = 0) -> None:
        self.size -= size
        if self.size < 0:
            raise TooMuch(f"looks at more than {MOST_IN_ALL} characters and values")
        if time.monotonic() > self.deadline:
            raise TooMuch("takes too long")


_left: ContextVar[_Left] = ContextVar("left to the rendering")


@contextmanager
def _bounds(seconds: float) -> Generator[None]:
    token = _left.set(_Left(time.monotonic() + seconds))
    try:
        yield
    finally:
        _left.reset(token)


class TooMuch(SecurityError):
    """A template exceeds its time or its size."""


def rendered(source: str, variables: Mapping[str, Any], seconds: float = SECONDS) -> str:
    """Render a template. Raises any exception of the template, SecurityError where it uses what is
    not in the language or exceeds its bounds. A message may quote a variable."""
    template = compiled(source)
    pieces: list[str] = []
    length = 0
    with _bounds(seconds):
        for piece in template.generate(variables):
            length += len(piece)
            if length > MOST:
                raise _too_much()
            pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=64)
def compiled(source: str) -> jinja2.Template:
    """Compile a template, and cache it here: templates travel to workers, and compiled ones cannot.
    Raises TemplateError for a source that is not in the language."""
    if len(source) > MOST_SOURCE:
        raise TooMuch(f"longer than {MOST_SOURCE} characters")
    environment = _Sandbox()
    tree = environment.parse(source)
    for node in tree.find_all((nodes.Stmt, nodes.Getattr, nodes.Getitem, nodes.NSRef)):
        _refuse(node)
    with _bounds(SECONDS):  # Jinja evaluates constant expressions here
        return environment.from_string(_Checks().visit(tree))


def _refuse(node: nodes.Node) -> None:
    if isinstance(node, nodes.Stmt) and not isinstance(node, STATEMENTS):
        raise SecurityError(f"a template has no {type(node).__name__.lower()} statement")
    if isinstance(node, nodes.NSRef) or (isinstance(node, nodes.For) and node.recursive):
        raise SecurityError("a template has no namespaces and no recursive loops")
    name = node.attr if isinstance(node, nodes.Getattr) else None
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        name = node.arg.value
    if isinstance(name, str) and name.startswith("__"):
        raise SecurityError(f"access to attribute '{name}' is unsafe")


class _Checks(NodeTransformer):
    """Puts a filter around the values of `for`, `set` and `~`, for which Jinja calls no method of
    its environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_timed")
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = _filter(node.node, "_checked")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "join")


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, autoescape=False, finalize=_checked)
        given = {name: self.filters[name] for name in FILTERS} | {"json": _json}
        self.filters = {name: _bounded(name, each) for name, each in given.items()}
        self.filters |= {"_timed": _timed, "_checked": _checked}
        self.globals = {"range": safe_range}

    def is_safe_callable(self, obj: Any) -> bool:
        if obj is safe_range:
            return True
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(owner, LoopContext):
            return name in ("cycle", "changed")
        return isinstance(obj, BuiltinMethodType) and name in METHODS

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_safe_callable(obj):
            raise SecurityError("a template may not call this")
        args = tuple(map(_listed, args))
        if isinstance(owner := getattr(obj, "__self__", None), str):
            _check_growth(obj.__name__, owner, *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            raise SecurityError("a template has no `%` on texts")
        if operator == "**" and numbers and left.bit_length() * abs(right) > MOST_BITS:
            raise _too_much()
        if operator == "*" and numbers and left.bit_length() + right.bit_length() > MOST_BITS:
            raise _too_much()
        if operator == "*" and not numbers:
            if (made := _factor(left) * _factor(right)) > MOST:
                raise _too_much()
            _left.get().spend(made)
        if operator == "+" and not numbers and _size(left) + _size(right) > MOST:
            raise _too_much()
        return super().call_binop(context, operator, left, right)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter of Jinja's refuse arguments of which it would make too large a value."""

    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # with Jinja's mark for filters that take the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [*map(_listed, args[passed:])]
        if name == "map" and len(values) > 1:
            raise SecurityError("a template's `map` takes attribute= alone")
        _check_growth(name, *values, *kwargs.values())
        if name in LOOPS:
            values[0] = _timed(values[0])
        return function(*args[:passed], *values, **kwargs)

    return bounded


def _check_growth(name: str, value: Any, *args: Any) -> None:
    """Raise TooMuch where the filter or method would make too large a value."""
    size, grown = sum(map(_size, (value, *args))), 0
    if name == "int" and args and size > MOST_DIGITS:
        raise _too_much()
    if name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        grown = str(value).count(old) * len(new)
    elif name == "join":
        # A text's method joins its argument; the filter joins the value.
        parts, between = (args[0], value) if isinstance(value, str) and args else (value, args[:1])
        grown = len(parts) * _size(between) if isinstance(parts, Sized) else 0
    elif name in ("round", "json", "tojson"):
        if any(isinstance(each, int) and abs(each) > MOST_INDENT for each in args):
            raise _too_much()
        grown = size * MOST_INDENT if args and name != "round" else 0
    if size + grown > MOST:
        raise _too_much()
    _left.get().spend(grown)


def _listed(value: Any) -> Any:
    """Return a list in place of an iterator or view, whose size `_size` cannot see."""
    unsized = isinstance(value, Iterator | range | KeysView | ValuesView | ItemsView)
    return list(value) if unsized else value


def _factor(value: Any) -> int:
    return abs(value) if isinstance(value, int) else _size(value)


def _size(value: Any) -> int:
    """Count the characters and entries of a value, nested ones included, as often as they would be
    written. Raises TooMuch where there are too many entries to count."""
    size = entries = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        entries += 1
        if entries > MOST_VALUES or size > MOST:
            raise _too_much()
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | KeysView | ValuesView | ItemsView):
            waiting += each
        else:
            size += 1
    _left.get().spend(size + entries)
    return size


def _checked(value: Any) -> Any:
    if _size(value) > MOST:
        raise _too_much()
    return value


def _timed(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of a loop until the time is over."""
    left = _left.get()
    for value in values:
        left.spend()
        yield value


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _too_much() -> TooMuch:
    return TooMuch(f"makes more than {MOST} characters or {MOST_VALUES} values")

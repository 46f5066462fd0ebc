"""The optional dependencies. A missing one is reported in one sentence, with the command that
installs it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dpray.types import InputError

_EXTRAS = {
    "torch": ("PyTorch", "torch"),
    "sentence_transformers": ("sentence-transformers", "torch"),
    "deepspeed": ("DeepSpeed", "train"),
    "peft": ("PEFT", "train"),
    "tensorboardX": ("Ray Train", "train"),
    "fastapi": ("Ray Serve", "serve"),
    "limits": ("limits", "serve"),
    "vllm": ("vLLM", "vllm"),
    "psycopg": ("psycopg", "postgres"),
    "jsonschema": ("jsonschema", "eval"),
    "phonenumbers": ("phonenumbers", "eval"),
    "openpyxl": ("openpyxl", "office"),
    "wordfreq": ("wordfreq", "languages"),
    "stopwordsiso": ("stopwordsiso", "languages"),
}
"""By module: the name of its library, and the extra of dpray that installs it. Ray itself is always
installed, so Ray Train and Ray Serve are recognised by modules that only their extras install."""


class Late:
    """A library, or a module of dpray that imports one, which is imported when something of it is
    first used: torch takes seconds, and a process that only plans needs none of it. A module has it
    in the place of the library:

        if TYPE_CHECKING:
            import transformers
        else:
            transformers = Late("transformers")

    It keeps the module's names, and is a plain object: a selection names torch a hundred times, and
    a module takes a microsecond to find that it lacks an attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: Mapping[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        with collector_at_rest():
            module = import_module(self._name)
            self._known = vars(module)
            return getattr(module, name)  # a name of transformers is an import, too


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Import libraries here: what they make stays, and Python's collector would go through it again
    and again, a sixth of the time that transformers takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


if TYPE_CHECKING:
    import torch as torch
else:
    torch = Late("torch")


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return find_spec(module) is not None


def require(user: str, *modules: str, extra: str | None = None) -> None:
    """Raise InputError if `user`, a key or a command, needs a module that is not installed. If
    several extras install a module, `extra` names the one that has all that `user` needs."""
    for module in modules:
        if not is_installed(module):
            library, its_extra = _EXTRAS[module]
            command = f"pip install 'dpray[{extra or its_extra}]'"
            raise InputError(f"{user} needs {library}, which is not installed: {command}")
